"""The rules of a Lark text in llguidance's dialect, as far as it takes to tell that they are safe.

Contract: `read_rules(text)` never raises; `check_depth` refuses what would end the process and is
to be asked before the library sees the text, `check_ends` refuses rules that no text completes.
Both raise InvalidGrammar naming the rule. What is not understood (a syntax error, a template)
counts as something that ends: the library has the last word. Used by `llguidance_backend.py`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.errors import InvalidGrammar

# The library follows rules by recursion: of some 2,000 in a row it would end the process.
MAX_RULE_DEPTH = 1_000
# No part of it can go back, so that no text is slow to read.
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]++|(?:\#|//)[^\n]*+)|(?P<newline>\n)"""
    r"""|(?P<text>"(?:\\.|[^"\\\n])*+"i?)|(?P<regex>/(?:\\.|[^/\\])++/[a-z]*+)"""
    r"""|(?P<special><[^<>\n]++>)"""
    r"""|(?P<name>!?[_?]?[a-z][_a-z0-9\-]*+|_?[A-Z][_A-Z0-9\-]*+)"""
    r"""|(?P<json>%(?:json|regex|llguidance)\b)|(?P<nested>%lark[ \t\r\n]*+\{)"""
    r"""|(?P<statement>%\w++)|(?P<leaf>@[\w-]++|::[ \t]*+\w*+|[\d.]++)"""
    r"""|(?P<times>[+*?]|\{[ \t]*+\d*+[ \t]*+(?:,[ \t]*+\d*+[ \t]*+)?\}"""
    r"""|~[ \t]*+\d++(?:\.\.\d++)?)|(?P<mark>[^"/<])""",
    re.DOTALL,
)
_MAY_BE_NONE = re.compile(r"[*?]|\{[ \t]*0*[ \t]*,|\{[ \t]*0+[ \t]*\}|~[ \t]*0+(?!\d)")
_Token = tuple[str, str]  # kind, text
_END: _Token = ("end", "")
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_MAX_NESTED = 32  # grammars in grammars; the library takes fewer


@dataclass(slots=True)
class Rules:
    """What rules lead to.

    alternatives: by rule, or group in one (whose name is no name), what each of its alternatives
    needs to be complete; one without needs is complete by itself. refs: by rule, the names in it.
    specials: control tokens as they are written, `<...>`.
    """

    alternatives: dict[str, list[list[str]]] = field(default_factory=dict)
    refs: dict[str, list[str]] = field(default_factory=dict)
    specials: list[str] = field(default_factory=list)


def read_rules(text: str) -> Rules:
    """The rules of a text, those of nested grammars under names of their own."""
    reader = _Reader(_tokens(text))
    reader.grammar()
    return reader.rules


def check_depth(rules: Rules) -> None:
    """Raise InvalidGrammar where rules lead to too many others in a row."""
    seen: set[str] = set()
    for root in ("start", *rules.refs):
        way = [iter((root,))]
        while way:
            name = next(way[-1], None)
            if name is None:
                way.pop()
            elif name in rules.refs and name not in seen:
                seen.add(name)
                way.append(iter(rules.refs[name]))
            if len(way) > MAX_RULE_DEPTH:
                raise InvalidGrammar(
                    f"The grammar leads through more than {MAX_RULE_DEPTH} rules in a row.",
                    param="grammar",
                )


def check_ends(rules: Rules) -> None:
    """Raise InvalidGrammar where an answer could get into a rule that no text completes."""
    ending = _ending(rules.alternatives)
    name = next((name for name in _reached(rules) if name not in ending), None)
    if name is None:
        return
    way: list[str] = []
    while name not in way:  # of each alternative something does not end
        way.append(name)
        needs = rules.alternatives[name][0]
        name = next(n for n in needs if n in rules.alternatives and n not in ending)
    circle = [entry for entry in way[way.index(name) :] if entry in rules.refs]
    raise InvalidGrammar(
        f"The lark grammar allows no answer: the rule `{circle[0].rpartition(' ')[2]}` always "
        "leads back to itself; give it an alternative that ends.",
        param="grammar",
    )


def _ending(alternatives: Mapping[str, list[list[str]]]) -> set[str]:
    """Names that some text completes."""
    missing: list[int] = []
    heads: list[str] = []
    users: defaultdict[str, list[int]] = defaultdict(list)
    ending: set[str] = set()
    for head, entries in alternatives.items():
        for needs in entries:
            needed = {name for name in needs if name in alternatives}
            for name in needed:
                users[name].append(len(heads))
            heads.append(head)
            missing.append(len(needed))
    waiting = [head for head, count in zip(heads, missing, strict=True) if not count]
    while waiting:
        head = waiting.pop()
        if head in ending:
            continue
        ending.add(head)
        for number in users[head]:
            missing[number] -= 1
            if not missing[number]:
                waiting.append(heads[number])
    return ending


def _reached(rules: Rules) -> Iterable[str]:
    """The rules that an answer can get to, the near ones first."""
    found = {"start": None}
    waiting = ["start"]
    for name in waiting:  # grows on the way
        new = [ref for ref in rules.refs.get(name, ()) if ref in rules.refs and ref not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return [name for name in found if name in rules.refs]


def _tokens(text: str) -> list[_Token]:
    """All tokens, and an end; up to what the library cannot read either: then it reads nothing."""
    tokens: list[_Token] = []
    match = _TOKEN.match(text)
    while match is not None:
        kind, at = match.lastgroup or "", match.end()
        if kind == "json":
            start = _SPACE.match(text, at)
            try:
                _, at = _DECODER.raw_decode(text, at if start is None else start.end())
            except (ValueError, RecursionError):
                break
        elif kind != "space":
            tokens.append((kind, match[0]))
        match = _TOKEN.match(text, at)
    return [*tokens, _END]


class _Reader:
    """Over the tokens. Names of a nested grammar begin with its number and a space."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._made = 0  # groups and nested grammars
        self.rules = Rules()

    def grammar(self, prefix: str = "", level: int = 0) -> None:
        """Lines up to the end, or up to the brace that ends a nested grammar."""
        while (token := self._take()) != _END and (token[1] != "}" or not level):
            name = self._header(token)
            if name is not None:
                self._body(prefix + name, prefix, level)
            elif token[0] != "newline":
                while self._tokens[self._at][0] not in ("newline", "end"):
                    self._at += 1

    def _take(self) -> _Token:
        token = self._tokens[self._at]
        self._at += token is not self._tokens[-1]
        return token

    def _header(self, token: _Token) -> str | None:
        """The rule that a line is of, which goes on behind its colon; None: it is of none."""
        if token[1] == "%ignore":
            return token[1]
        if token[0] != "name":
            return None
        for at in range(self._at, len(self._tokens)):
            kind, text = self._tokens[at]
            if text == ":":
                self._at = at + 1
                return token[1].lstrip("!?")
            if kind in ("newline", "end"):
                break
        return None

    def _body(self, rule: str, prefix: str, level: int) -> None:
        """Read a rule up to the line's end; a line that begins with a bar goes on with it."""
        refs = self.rules.refs.setdefault(rule, [])
        alternatives = self.rules.alternatives
        alternatives.setdefault(rule, []).append([])
        heads = [rule]
        while True:
            kind, text = self._tokens[self._at]
            if kind in ("newline", "end") or (text == "}" and level):
                if not self._goes_on():
                    return
                continue
            self._at += 1
            if kind == "special":
                self.rules.specials.append(text)
            elif text == "|":
                alternatives[heads[-1]].append([])
            elif text in ("(", "["):
                heads.append(self._new(f"{rule}({text}"))
                alternatives[heads[-1]] = [[]]
            elif text in (")", "]") and len(heads) > 1:
                group = heads.pop()
                if not group.endswith("["):
                    self._need(group, alternatives[heads[-1]])
            elif kind == "name":
                refs.append(prefix + text.lstrip("!?"))
                self._need(refs[-1], alternatives[heads[-1]])
            elif kind == "nested" and level < _MAX_NESTED:
                inner = self._new(" ")
                self.grammar(inner, level + 1)
                refs.append(f"{inner}start")
                self._need(refs[-1], alternatives[heads[-1]])

    def _need(self, name: str, entries: list[list[str]]) -> None:
        """The newest alternative needs a name, unless what follows says that it may be left out."""
        if not _MAY_BE_NONE.match(self._tokens[self._at][1]):
            entries[-1].append(name)

    def _new(self, name: str) -> str:
        self._made += 1
        return f"{self._made}{name}"

    def _goes_on(self) -> bool:
        at = self._at
        while self._tokens[at][0] == "newline":
            at += 1
        if at == self._at or self._tokens[at][1] != "|":
            return False
        self._at = at
        return True
