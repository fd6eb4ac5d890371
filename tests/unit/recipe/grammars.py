"""Grammars as the engine's library reads them, for tests: what is accepted, and random answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import llguidance

import headrace
from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.recipe.codec import Codec
from headrace.recipe.grammar.calls import json_rule

TINY = Path(headrace.__file__).parent / "assets" / "tiny"


@lru_cache(maxsize=1)
def tiny_codec() -> Codec:
    return Codec.from_directory(TINY)


class _Tokens:
    """A vocabulary; every token of the added vocabulary is a control token."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos

    def __call__(self, text: bytes | str) -> list[int]:
        return []


@lru_cache(maxsize=1)
def tiny_vocabulary() -> llguidance.LLTokenizer:
    codec = tiny_codec()
    tokenizer = codec.tokenizer
    tokens = [tokenizer.token_bytes(i) or b"\xff" for i in range(tokenizer.vocab_size)]
    special = sorted(tokenizer.added.values())
    wrapper = llguidance.TokenizerWrapper(
        _Tokens(tokens, special, tokenizer.added[codec.special.eos])
    )
    return llguidance.LLTokenizer(wrapper, n_vocab=len(tokens))


@lru_cache(maxsize=1)
def byte_vocabulary() -> llguidance.LLTokenizer:
    """Bytes 0-255, then the end."""
    tokens = [bytes([i]) for i in range(256)] + [b"<end>"]
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(tokens, [256], 256)))


def compiled(
    spec: GrammarSpec, vocabulary: llguidance.LLTokenizer | None = None
) -> llguidance.LLMatcher:
    """A matcher at the point from which the grammar holds; it may be in error."""
    if spec.kind is GrammarKind.JSON_OBJECT:
        text = "start: %json " + json_rule('{"type":"object"}')
    elif spec.kind is GrammarKind.JSON_SCHEMA:
        text = f"start: %json {json_rule(spec.text)}"
    elif spec.kind is GrammarKind.REGEX:
        text = f"start: TEXT\nTEXT: /{spec.text}/"
    else:
        text = spec.text
    # As in the engine: masks hold all that is allowed, not only one spelling of what is certain.
    text += '\n%llguidance {"no_forcing": true}\n'
    return llguidance.LLMatcher(vocabulary or byte_vocabulary(), text, log_level=0)


def matcher_of(
    spec: GrammarSpec, vocabulary: llguidance.LLTokenizer | None = None
) -> llguidance.LLMatcher:
    """The same; AssertionError when it is no grammar."""
    matcher = compiled(spec, vocabulary)
    assert not matcher.is_error(), (matcher.get_error(), spec.text[:2000])
    return matcher


def accepts(matcher: llguidance.LLMatcher, tokens: Sequence[int] | str) -> bool:
    """Whether the tokens (of a text: its bytes) are a whole answer. The matcher stays as it is."""
    ids = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(ids) == len(ids) and bool(copy.is_accepting())


def random_answer(
    matcher: llguidance.LLMatcher,
    draw: random.Random,
    end: int,
    *,
    prefer: frozenset[int] = frozenset(),
    limit: int = 400,
) -> list[int] | None:
    """Tokens of an answer that the grammar allows, without its end; None when it grew too long.

    prefer: tokens that are taken in every third place where they are allowed.
    """
    copy = matcher.deep_copy()
    out: list[int] = []
    for _ in range(limit):
        mask = int.from_bytes(copy.compute_bitmask(), "little")
        assert mask, "the grammar is at a dead end"
        if mask >> end & 1 and (mask == 1 << end or draw.random() < 0.5):
            return out
        liked = [token for token in prefer if mask >> token & 1]
        token = draw.choice(liked) if liked and draw.random() < 0.35 else None
        while token is None or token == end:
            # A random bit that is set.
            start = draw.randrange(mask.bit_length())
            rest = mask >> start
            token = start + (rest & -rest).bit_length() - 1
        out.append(token)
        assert copy.consume_token(token), (copy.get_error(), token, out)
    return None
