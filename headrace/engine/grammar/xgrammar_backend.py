"""Grammars by xgrammar (extra `xgrammar`): slow to compile, quick masks, can be written to disk.

Contract: a `GrammarBackend` for all kinds but `lark`, whose dialect is llguidance's. JSON is
compiled strictly: no members beside those of the schema unless it asks for them. Compiling holds
one thread and cannot be interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import xgrammar

from headrace.core.grammar import MAX_JSON_SPACES, GrammarKind
from headrace.engine.grammar.backend import MaskWords, MatcherBroken, TokenTable
from headrace.engine.grammar.text import choices_of, schema_of
from headrace.errors import InvalidGrammar

MAX_SCHEMA_DEPTH = 60


class XgrammarBackend:
    """xgrammar over one vocabulary."""

    def __init__(self, table: TokenTable) -> None:
        self.name = f"xgrammar {version('xgrammar')}"
        control = set(table.control_ids)
        # Empty: never part of a text.
        texts = [b"" if i in control else text for i, text in enumerate(table.texts)]
        self._info = xgrammar.TokenizerInfo(
            texts, vocab_size=len(texts), stop_token_ids=[table.eos_id]
        )
        # Our own cache is in front; one thread, because several grammars are compiled at once.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, kind: GrammarKind, text: str) -> XgrammarGrammar:
        """See `GrammarBackend.compile`."""
        if kind is GrammarKind.LARK:
            raise InvalidGrammar(
                "The xgrammar backend takes no lark grammars; start the engine with "
                "grammar_backend llguidance.",
                param="grammar",
            )
        try:
            return XgrammarGrammar(self._compiled(kind, text))
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().rpartition("\n")[2].strip().rstrip(".")
            raise InvalidGrammar(
                f"The {kind} grammar cannot be compiled: {reason}.", param="grammar"
            ) from error

    def serialise(self, grammar: Any) -> bytes | None:
        """See `GrammarBackend.serialise`."""
        data: str = grammar.compiled.serialize_json()
        return data.encode()

    def deserialise(self, data: bytes) -> XgrammarGrammar:
        """See `GrammarBackend.deserialise`."""
        try:
            return XgrammarGrammar(
                xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"no compiled grammar of this version: {error}") from error

    def _compiled(self, kind: GrammarKind, text: str) -> Any:
        if kind is GrammarKind.REGEX:
            return self._compiler.compile_regex(text)
        if kind is GrammarKind.CHOICE:
            literals = " | ".join(json.dumps(choice) for choice in choices_of(text))
            return self._compiler.compile_grammar(f"root ::= {literals}")
        schema = schema_of(kind, text, MAX_SCHEMA_DEPTH)
        strict = kind is GrammarKind.JSON_SCHEMA
        return self._compiler.compile_json_schema(
            json.dumps(schema), strict_mode=strict, max_whitespace_cnt=MAX_JSON_SPACES
        )


class XgrammarGrammar:
    """A compiled grammar of xgrammar."""

    # Its order of members is not the one that `json_schema_shape` assumes.
    json_schema: str | None = None

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def matcher(self) -> XgrammarMatcher:
        """A matcher at the start."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(self.compiled))


class XgrammarMatcher:
    """One answer; see `BackendMatcher`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, tokens: Sequence[int]) -> None:
        """See `BackendMatcher.accept`."""
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise MatcherBroken(f"token {token} was refused although the mask allowed it")

    def rollback(self, count: int) -> None:
        """See `BackendMatcher.rollback`."""
        self._matcher.rollback(count)

    def fill_mask(self, words: MaskWords) -> None:
        """See `BackendMatcher.fill_mask`."""
        # False: everything is allowed, and nothing was written.
        if not self._matcher.fill_next_token_bitmask(words[None]):
            words[:] = -1
