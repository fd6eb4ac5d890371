"""Grammars by llguidance: compiled in about a millisecond, masks computed when they are needed.

Contract: a `GrammarBackend`. Every kind becomes one Lark text with `no_forcing`, so that a mask
holds every token that the grammar allows, not only the canonical spelling of what comes next, and
depends on the bytes before alone. The library's limits bound the memory and the time of one mask;
they cannot be exceeded silently: a matcher at a limit raises MatcherFailed. Nothing can be
serialised; compiling again is as fast as reading a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, get_version

from headrace.core.grammar import MAX_JSON_SPACES, GrammarKind
from headrace.engine.grammar.backend import MaskWords, MatcherBroken, MatcherFailed, TokenTable
from headrace.engine.grammar.lark_rules import check_depth, check_ends, read_rules
from headrace.engine.grammar.text import choices_of, schema_of
from headrace.errors import InvalidGrammar

# Without it the library allows only one spelling of text that is certain, and a draft or a model
# that spells it otherwise would be refused. At the end: lines of errors stay those of the user.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_WHITE_SPACE = rf"[ \n\r\t]{{1,{MAX_JSON_SPACES}}}"
# Alternatives that are open at once, and rules looked at for one mask: what the schema reader takes
# at most fits (into the library's own 2,000 it does not); some 50 ms for one mask.
MAX_ROW_ITEMS = 100_000
MAX_STEP_ITEMS = 1_000_000
# About 2 kB each; deterministic automata of hostile expressions would fill the memory.
MAX_LEXER_STATES = 50_000
# Below the recursion limit of the library's JSON reader.
MAX_SCHEMA_DEPTH = 100
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (?:(?:at )?(?:\d+\(\d+\)|EOF): )*")
# What it says of a token that its own mask did not have.
_NOT_ALLOWED = "doesn't satisfy the grammar"
# Terminals of one line, each with the comment in front of it: (comment, definition, name).
_TERMINAL = re.compile(r"(?:^(//[^\n]*)\n)?^(([A-Z][A-Z0-9_]*): [^\n]*)$", re.MULTILINE)
# What the library says where a terminal has no text.
_NOTHING = "NoExtensionBias"
_CIRCULAR = re.compile(r'at (\d+)\(\d+\): circular reference in token "(\w+)"')


class LlguidanceBackend:
    """llguidance over one vocabulary; building it takes about a second for 129,280 tokens."""

    def __init__(self, table: TokenTable) -> None:
        self.name = f"llguidance {get_version()}"
        wrapper = TokenizerWrapper(_Tokens(table))
        self._tokenizer = LLTokenizer(
            wrapper,
            n_vocab=len(table.texts),
            eos_token=table.eos_id,
            slices=LLTokenizer.json_slices(),
        )
        self._table = table
        self._limits = LLParserLimits(
            max_items_in_row=MAX_ROW_ITEMS,
            step_max_items=MAX_STEP_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, kind: GrammarKind, text: str) -> LlguidanceGrammar:
        """See `GrammarBackend.compile`."""
        json_schema = rules = None
        if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
            schema = schema_of(kind, text, MAX_SCHEMA_DEPTH)
            # Whoever writes a schema must not change the options of the library by it.
            schema["x-guidance"] = {"lenient": False, "whitespace_pattern": _WHITE_SPACE}
            json_schema = json.dumps(schema)
            lark = f"start: %json {json_schema}"
        elif kind is GrammarKind.REGEX:
            lark = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        elif kind is GrammarKind.CHOICE:
            lark = "start: " + " | ".join(map(_literal, choices_of(text)))
        else:
            rules = read_rules(text)
            _check_specials(rules.specials, self._table)
            check_depth(rules)
            lark = text
        template = LLMatcher(self._tokenizer, lark + _OPTIONS, log_level=0, limits=self._limits)
        if template.is_error():
            raise InvalidGrammar(_reason(kind, template.get_error()), param="grammar")
        if rules is not None:
            check_ends(rules)
            self._check_texts(text)
        return LlguidanceGrammar(template, json_schema)

    def _check_texts(self, text: str) -> None:
        """Raise InvalidGrammar where terminals that cut several expressions have no text at all.

        The library notices only when it gets there, in the middle of an answer.
        """
        lines = _TERMINAL.findall(text)
        known = "\n".join(definition for _, definition, _ in lines)
        for comment, definition, name in lines:
            if " & " not in definition:
                continue
            lark = f"start: {name}\n{known}{_OPTIONS}"
            matcher = LLMatcher(self._tokenizer, lark, log_level=0, limits=self._limits)
            if matcher.is_error():
                continue  # it needs more than terminals of one line
            words = np.zeros(-(-self._tokenizer.vocab_size // 32), dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error() and _NOTHING in matcher.get_error():
                where = comment.removeprefix("// ").strip().strip('"') or name
                raise InvalidGrammar(
                    f"{where}: no text meets a pattern together with another one, a format or a "
                    "length beside it.",
                    param="grammar",
                )

    def serialise(self, grammar: Any) -> bytes | None:
        """None: llguidance has no format for compiled grammars."""
        return None

    def deserialise(self, data: bytes) -> LlguidanceGrammar:
        """Never called with anything that `serialise` wrote."""
        raise ValueError("llguidance has no format for compiled grammars")


class LlguidanceGrammar:
    """A matcher that stays at the start, to be copied."""

    def __init__(self, template: LLMatcher, json_schema: str | None) -> None:
        self._template = template
        self.json_schema = json_schema

    def matcher(self) -> LlguidanceMatcher:
        """A copy at the start."""
        return LlguidanceMatcher(self._template.deep_copy())


class LlguidanceMatcher:
    """One answer; see `BackendMatcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, tokens: Sequence[int]) -> None:
        """See `BackendMatcher.accept`."""
        if not self._matcher.consume_tokens(list(tokens)):
            reason = _first_line(self._matcher.get_error())
            raise (MatcherBroken if _NOT_ALLOWED in reason else MatcherFailed)(reason)

    def rollback(self, count: int) -> None:
        """See `BackendMatcher.rollback`."""
        if not self._matcher.rollback(count):
            raise MatcherFailed(_first_line(self._matcher.get_error()))

    def fill_mask(self, words: MaskWords) -> None:
        """See `BackendMatcher.fill_mask`."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        # At a limit the library allows EOS alone, which would pass for a complete answer.
        if self._matcher.is_error():
            raise MatcherFailed(_first_line(self._matcher.get_error()))


class _Tokens:
    """A vocabulary in the form that llguidance reads."""

    def __init__(self, table: TokenTable) -> None:
        self.eos_token_id = table.eos_id
        self.bos_token_id = None
        self.tokens = table.texts
        self.special_token_ids = table.control_ids

    def __call__(self, text: str) -> list[int]:
        # Only asked to spell forced text, which `no_forcing` switches off.
        return []


def _literal(choice: str) -> str:
    return json.dumps(choice, ensure_ascii=False)


def _check_specials(specials: Sequence[str], table: TokenTable) -> None:
    """Raise InvalidGrammar where a token of a Lark text is, or may be, EOS, which ends answers."""
    end = table.texts[table.eos_id].decode(errors="replace")
    for special in specials:
        if special == end or _holds(special, table.eos_id):
            raise InvalidGrammar(
                f"The grammar names token {table.eos_id}, the end of the text, which ends an "
                f"answer wherever it may come: leave it out of {special}.",
                param="grammar",
            )


def _holds(special: str, token: int) -> bool:
    """Whether <[ids]>, <[^ids]> or <[*]> holds a token."""
    ids = special[2:-2] if special.startswith("<[") and special.endswith("]>") else ""
    negated = ids.startswith("^")
    ranges = [part.partition("-") for part in ids.lstrip("^").replace(" ", "").split(",") if part]
    held = any(
        first == "*" or (first.isdigit() and int(first) <= token <= int(last or first))
        for first, _, last in ranges
        if not last or last.isdigit()
    )
    return bool(ranges) and held != negated


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0].strip()
    return "no text meets the expressions that come next" if line == _NOTHING else line


def _reason(kind: GrammarKind, error: str) -> str:
    reason = _first_line(error)
    if reason.startswith("panic"):
        return f"The {kind} grammar cannot be compiled: it is too large for the library."
    if "Unable to determine if regex is empty" in reason:
        return (
            f"The {kind} grammar cannot be compiled: it cannot be told whether any text meets a "
            "pattern together with another one, a format or a length; simplify one of them."
        )
    if "Unsatisfiable schema" in reason and "Regex is empty" in reason:
        return (
            f"The {kind} grammar cannot be compiled: no text meets a pattern together with "
            "another one, a format or a length beside it."
        )
    circular = _CIRCULAR.search(reason)
    if circular is not None:
        return (
            f"The lark grammar cannot be compiled: line {circular[1]}: the terminal "
            f"`{circular[2]}` contains itself; only rules, whose names are in lower case, can."
        )
    # Lines and columns are of a text that the user has never seen, but for Lark.
    place = _PLACE.match(reason) if kind is GrammarKind.LARK else None
    reason = _PLACE.sub("", reason)
    if reason == "lexer error":
        reason = "nothing that a grammar may hold begins here; rules are written `name: ...`"
    if place is not None:
        reason = f"line {place[1]}, column {place[2]}: {reason}"
    if kind is GrammarKind.REGEX:
        marked = re.search(r"^\s*error: (.*)$", error, re.MULTILINE)
        reason = marked[1] if marked else reason
    reason = reason.removeprefix("failed to compile JSON schema: ").rstrip(":. ")
    return f"The {kind} grammar cannot be compiled: {reason}."
