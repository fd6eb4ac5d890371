"""Grammars of clients in the notation of llama.cpp and xgrammar (GBNF) -> expressions, or Lark.

Contract: rules are `name ::= ...`, `root` is the answer (or the first rule). A grammar whose rules
do not contain themselves is one regular expression. Others become Lark rules over single
characters: longer terminals would match as much as they can, which such grammars do not mean.
Raises GrammarError with a sentence about what is wrong. Called by `rules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from headrace.core.schema.regex import RegexError, literal_regex, normal_regex
from headrace.core.schema.regex_classes import DOT, written

MAX_RULES = 1_000
MAX_NESTING = 64
MAX_TEXT = 65_536  # characters of a translation
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<name>[A-Za-z_][\w-]*)|(?P<defines>::=)"""
    r"""|(?P<text>"(?:\\.|[^"\\])*")|(?P<set>\[(?:\\.|[^\]\\])*\])"""
    r"""|(?P<times>[*+?]|\{\d{0,5}(?:,\d{0,5})?\})|(?P<mark>[()|.])""",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)


class GrammarError(ValueError):
    """Why a grammar is refused, as a sentence without its subject."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class _Node:
    """kind: text, set, any (leaves), rule, sequence, choice, times. text: of a leaf, name, mark."""

    kind: str
    text: str = ""
    nodes: tuple[_Node, ...] = ()


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in this notation."""
    return "::=" in text


def translate(text: str) -> tuple[bool, str]:
    """(whether it is a regular expression, the translation)."""
    try:
        parser = _Parser(_tokens(text))
        rules = parser.rules()
        root = "root" if "root" in rules else next(iter(rules))
        if _recursive(rules, root, parser.used):
            _check_ends(rules, root)
            return False, _lark(rules, root)
        return True, _checked(_expression(rules, rules[root], {}))
    except RecursionError:
        raise GrammarError("has rules that are nested too deeply") from None


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise GrammarError(f"cannot be read in line {line}: {text[at : at + 20]!r}")
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._level = 0
        self.used: dict[str, int] = {}  # names in rules, and the line where each stands first

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._at < len(self._tokens):
            name = self._tokens[self._at]
            if not self._begins_rule() or name.text in rules:
                self._fail("a rule `name ::= ...` with a new name is expected")
            self._at += 2
            rules[name.text] = self._choice()
            if len(rules) > MAX_RULES:
                self._fail(f"more than {MAX_RULES} rules are not possible")
        if not rules:
            self._fail("there are no rules")
        return rules

    def _fail(self, problem: str) -> NoReturn:
        line = self._tokens[min(self._at, len(self._tokens) - 1)].line if self._tokens else 1
        raise GrammarError(f"cannot be read in line {line}: {problem}")

    def _begins_rule(self) -> bool:
        kinds = [token.kind for token in self._tokens[self._at : self._at + 2]]
        return kinds == ["name", "defines"]

    def _peek(self) -> str:
        if self._at >= len(self._tokens) or self._begins_rule():
            return ""
        return self._tokens[self._at].text

    def _choice(self) -> _Node:
        nodes = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else _Node("choice", "", tuple(nodes))

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while (text := self._peek()) and text not in "|)":
            node = self._item()
            while self._peek() and self._tokens[self._at].kind == "times":
                node = _Node("times", self._repetition(), (node,))
            nodes.append(node)
        return nodes[0] if len(nodes) == 1 else _Node("sequence", "", tuple(nodes))

    def _repetition(self) -> str:
        mark = self._tokens[self._at].text
        low, comma, high = mark.strip("{}").partition(",")
        if mark == "{}" or (comma and high and int(low or 0) > int(high)):
            self._fail(f"{mark} is no repetition")
        self._at += 1
        return mark.replace("{,", "{0,")

    def _item(self) -> _Node:
        token = self._tokens[self._at]
        self._at += 1
        match token.kind:
            case "name":
                self.used.setdefault(token.text, token.line)
                return _Node("rule", token.text)
            case "text":
                return _Node("text", _ESCAPE.sub(partial(_escaped, token.line), token.text[1:-1]))
            case "set":
                return _Node("set", _character_set(token))
        if token.text == ".":
            return _Node("set", written(DOT))
        if token.text != "(":
            self._fail(f"{token.text!r} is not expected")
        self._level += 1
        if self._level > MAX_NESTING:
            self._fail(f"more than {MAX_NESTING} levels of parentheses are not possible")
        node = self._choice()
        if self._peek() != ")":
            self._fail("a `)` is missing")
        self._at += 1
        self._level -= 1
        return node


def _character_set(token: _Token) -> str:
    try:
        text = re.sub(r"\\U([0-9A-Fa-f]{8})", _code_point, token.text)
        return normal_regex(text, whole=True)
    except RegexError as error:
        raise GrammarError(
            f"cannot be read in line {token.line}: the character set {token.text} {error}"
        ) from None


def _escaped(line: int, match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits:
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise GrammarError(f"cannot be read in line {line}: {match[0]} is no character")
        return chr(code)
    return _ESCAPES.get(match[4], match[4])


def _code_point(match: re.Match[str]) -> str:
    return f"\\u{{{int(match[1], 16):x}}}"


def _recursive(rules: dict[str, _Node], root: str, lines: dict[str, int]) -> bool:
    """Whether a rule that the answer needs contains itself. lines: where names stand."""
    done: set[str] = set()
    path: dict[str, None] = {}
    waiting: list[tuple[str, bool]] = [(root, False)]
    found = False
    while waiting:
        name, leave = waiting.pop()
        if leave:
            path.pop(name)
            done.add(name)
            continue
        if name in done or name in path:
            continue
        if name not in rules:
            raise GrammarError(f"cannot be read in line {lines[name]}: there is no rule `{name}`")
        path[name] = None
        waiting.append((name, True))
        for inner in _names(rules[name]):
            found = found or inner in path
            waiting.append((inner, False))
    return found


def _check_ends(rules: dict[str, _Node], root: str) -> None:
    """Refuse rules that always lead back to themselves: an answer that gets there has no end."""
    ending: set[str] = set()
    for _ in rules:
        more = {name for name in rules.keys() - ending if _ends(rules[name], ending)}
        if not more:
            break
        ending |= more
    reached = [root]
    for name in reached:  # grows on the way
        reached += sorted(_names(rules[name]) - set(reached))
    endless = [name for name in reached if name not in ending]
    if not endless:
        return
    way: list[str] = []
    name = endless[0]
    while name not in way:
        way.append(name)
        name = min(_names(rules[name]) - ending)
    raise GrammarError(f"never ends: the rule `{name}` always leads back to itself")


def _ends(node: _Node, ending: set[str]) -> bool:
    """Whether some text completes a node, if the rules in `ending` can be completed."""
    if node.kind == "rule":
        return node.text in ending
    if node.kind == "choice":
        return any(_ends(entry, ending) for entry in node.nodes)
    if node.kind == "times" and (node.text in "*?" or node.text.startswith(("{0", "{,"))):
        return True
    return all(_ends(entry, ending) for entry in node.nodes)


def _names(node: _Node) -> set[str]:
    if node.kind == "rule":
        return {node.text}
    return set().union(*map(_names, node.nodes))


def _checked(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise GrammarError("is too large")
    return text


def _expression(rules: dict[str, _Node], node: _Node, known: dict[str, str]) -> str:
    """The regular expression of a node whose rules do not contain themselves."""
    match node.kind:
        case "rule":
            if node.text not in known:
                known[node.text] = f"(?:{_expression(rules, rules[node.text], known)})"
            return known[node.text]
        case "text":
            return literal_regex(node.text)
        case "set":
            return node.text
    inner = [_checked(_expression(rules, entry, known)) for entry in node.nodes]
    if node.kind == "choice":
        return f"(?:{'|'.join(inner)})"
    if node.kind == "times":
        return f"(?:{inner[0]}){node.text}"
    return _checked("".join(inner))


def _lark(rules: dict[str, _Node], root: str) -> str:
    """Lark rules over single characters."""
    numbers = {name: f"rule_{i}" for i, name in enumerate(rules)}
    lines = [f"start: {numbers[root]}"]
    for name, node in rules.items():
        lines.append(f"{numbers[name]}: {_lark_of(node, numbers.__getitem__)}")
    return _checked("\n".join(lines))


def _lark_of(node: _Node, number: Callable[[str], str]) -> str:
    match node.kind:
        case "rule":
            return number(node.text)
        case "text":
            return " ".join(f"/{literal_regex(char)}/" for char in node.text) or '""'
        case "set":
            return f"/{node.text}/"
    inner = [_lark_of(entry, number) for entry in node.nodes]
    if node.kind == "choice":
        return f"({' | '.join(inner)})"
    if node.kind == "times":
        return f"({inner[0]}){node.text}"
    return " ".join(inner) or '""'
