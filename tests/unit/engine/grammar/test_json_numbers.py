"""Exponents of numbers in JSON stay finite; strings may say what they like."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.grammar import GrammarKind
from headrace.engine.grammar.json_numbers import START, NumberLimit, NumberStates, after
from tests.unit.engine.grammar.grammars import backend, ids_of, table

TEXTS = [b"1", b"12", b"123", b"e", b"E+", b"-", b'"', b",1e100", b'"1e100', b"e99", b"e100", b"\\"]


def allowed(text: str) -> list[bytes]:
    mask = NumberLimit(TEXTS).mask(after(START, text.encode()))
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [data for data, bit in zip(TEXTS, bits, strict=False) if bit]


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ("", {b",1e100", b"e100"}),
        ("[1", {b",1e100", b"e100"}),
        ("[1.5e", {b"123", b",1e100", b"e100"}),
        ("[1.5E-", {b"123", b",1e100", b"e100"}),
        ("[1e1", {b"12", b"123", b",1e100", b"e100"}),
        ("[1e12", {b"1", b"12", b"123", b",1e100", b"e100"}),
        ("[1e12,", {b",1e100", b"e100"}),
        ('{"a 1e12', {b'"1e100'}),
        ('{"a\\"1e12', {b'"1e100'}),
        ("[true", {b"123", b",1e100", b"e100"}),
    ],
)
def test_tokens_that_make_an_exponent_too_long(text: str, forbidden: set[bytes]) -> None:
    assert set(TEXTS) - set(allowed(text)) == forbidden


def test_states_are_taken_back() -> None:
    limit = NumberLimit(TEXTS)
    states, words = NumberStates(limit), np.full(1, -1, dtype=np.int32)
    states.accept([TEXTS.index(b"1"), TEXTS.index(b"e"), TEXTS.index(b"12")])
    states.rollback(2)
    states.restrict(words)
    assert words[0] == limit.mask(after(START, b"1"))[0]


@pytest.mark.parametrize(
    ("schema", "begin"),
    [
        ('{"type":"number"}', "7e12"),
        ("{}", "7e-12"),
        ("{}", "[7e-12"),
        ('{"items":{"type":"number"}}', "[0.5E+12"),
    ],
)
def test_a_schema_allows_two_digits(schema: str, begin: str) -> None:
    matcher = backend().compile(GrammarKind.JSON_SCHEMA, schema).matcher()
    texts, words = table().texts, np.zeros(table().num_words, dtype=np.int32)
    for character in begin:
        matcher.fill_mask(words)
        token = texts.index(character.encode())
        assert token in ids_of(words), begin
        matcher.accept([token])
    matcher.fill_mask(words)
    assert not any(texts[token][:1].isdigit() for token in ids_of(words))
    assert ids_of(words)
