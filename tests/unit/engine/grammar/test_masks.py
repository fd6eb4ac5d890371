"""Masks are exactly what the library allows: token by token, and from every joined state."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.engine.grammar import json_positions
from headrace.engine.grammar.json_schema_shape import Kind, shape_of
from headrace.engine.grammar.matcher import Matcher
from headrace.engine.grammar.states import NOT_FORCED, StateGraph, only, single_token
from tests.bench_records import write_record
from tests.unit.engine.grammar.grammars import (
    EOS,
    GRAMMARS,
    VOCAB,
    Schemas,
    Walker,
    backend,
    graph_of,
    ids_of,
    schema,
    table,
    text_of,
    tokenizer,
)


@pytest.mark.parametrize("spec", GRAMMARS, ids=lambda spec: f"{spec.kind}-{spec.text[:24]}")
def test_a_mask_has_every_token_that_the_library_takes_and_no_other(spec: GrammarSpec) -> None:
    grammar = backend().compile(spec.kind, spec.text)
    graph = StateGraph(grammar, table(), 10**8)
    for seed in range(3):
        matcher, walker, tokens = Matcher(spec, graph), Walker(seed), list[int]()
        for _ in range(12):
            mask = matcher.mask()
            assert mask is not None
            allowed = ids_of(mask)
            assert allowed == _taken(grammar, tokens)
            token = walker.pick(allowed)
            assert matcher.accept(token)
            if token == EOS:
                break
            tokens.append(token)


# Numbers of JSON have no range: no place in them is any other than the one before.
NUMBERS = (
    (schema({"type": "number"}), "7e12"),
    (schema({"type": "number"}), "-0.25E+1000000"),
    (schema({}), "[7e-1234"),
    (schema({"type": "array", "items": {"type": "number"}}), "[0.5e99999, 1e871463"),
    (schema({"type": "object", "properties": {"n": {"type": "number"}}}), '{"n":1e999'),
    (schema({"type": ["number", "string"]}), "3E308"),
    (schema({"anyOf": [{"type": "number"}, {"type": "null"}]}), "3E309"),
    (schema({"type": "number", "minimum": 2}), "7" * 400),
    (schema({"type": "integer"}), "-" + "9" * 400),
    (schema({"type": "number"}), "0." + "0" * 400 + "1"),
    (GrammarSpec(GrammarKind.JSON_OBJECT), '{"e": [1e1, 2E-234'),
    (GrammarSpec(GrammarKind.LARK, 'start: "n" %json {"type": "number"}'), "n1e12"),
    (schema({"type": "string"}), '"1e12'),
)


@pytest.mark.parametrize(("spec", "text"), NUMBERS, ids=lambda value: str(value)[-20:])
def test_numbers_may_go_on_for_ever(spec: GrammarSpec, text: str) -> None:
    grammar = backend().compile(spec.kind, spec.text)
    matcher, tokens = Matcher(spec, graph_of(spec)), list[int]()
    digit = table().texts.index(b"7")
    for byte in text.encode():
        token = table().texts.index(bytes((byte,)))
        assert matcher.accept(token), text_of(tokens)
        tokens.append(token)
    for _ in range(5):
        mask = matcher.mask()
        assert mask is not None
        assert ids_of(mask) == _taken(grammar, tokens)
        assert matcher.accept(digit)
        tokens.append(digit)


def _taken(grammar: object, tokens: list[int]) -> list[int]:
    """Tokens that the library itself takes next, asked one by one, past our code."""
    fresh = grammar._template.deep_copy()  # type: ignore[attr-defined]
    assert fresh.consume_tokens(tokens)
    taken = [i for i in range(VOCAB) if i != EOS and fresh.deep_copy().try_consume_tokens([i]) == 1]
    return sorted([*taken, EOS] if fresh.is_accepting() else taken)


def compare_masks(schemas: int, seed: int, walks: int = 6, steps: int = 60) -> tuple[int, int]:
    """Walk through random schemas with one graph each; every mask must be a fresh matcher's.

    Masks compared, and how many of them were computed for the graph.
    """
    compared = computed = 0
    words = np.zeros(table().num_words, dtype=np.int32)
    for number, value in enumerate(islice(Schemas(seed), schemas)):
        spec = schema(value)
        grammar = backend().compile(spec.kind, spec.text)
        graph = StateGraph(grammar, table(), 10**8)
        for walk in range(walks):
            matcher, fresh = Matcher(spec, graph), grammar.matcher()
            walker, tokens = Walker(1000 * number + walk), list[int]()
            for _ in range(steps):
                fresh.fill_mask(words)
                mask = matcher.mask()
                assert mask is not None
                assert np.array_equal(mask, words), (value, text_of(tokens))
                compared += 1
                token = walker.pick(ids_of(words))
                assert matcher.accept(token)
                if token == EOS:
                    break
                tokens.append(token)
                fresh.accept([token])
        computed += graph.computed
    return compared, computed


def test_joined_states_have_the_masks_of_their_own_text() -> None:
    compared, computed = compare_masks(schemas=150, seed=1)
    assert compared > 8000
    assert computed < compared  # some were looked up


@pytest.mark.sweep
def test_joined_states_have_the_masks_of_their_own_text_sweep() -> None:
    compared, computed = compare_masks(schemas=5000, seed=2)
    write_record("grammar_schemas.jsonl", "masks", schemas=5000, masks=compared, computed=computed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"items":[{"s":"hello"', '{"items":[{"s":"x"'),
        ('{"items":[{"s":"hel', '{"items":[{"s":"another \\n te'),
        ('{"items":[{"s":"a","m":"ab', '{"items":[{"s":"b","m":"éz'),
        ('{"items":[{"s":"a","m":"","n":-12.5e3,', '{"items":[{"s":"b","m":"q","n":7,'),
        ('{"items":[{"s":"","m":"","n":34.', '{"items":[{"s":"","m":"","n":9.'),
        ('{"items":[{"s":"","m":"","n":34.5e6', '{"items":[{"s":"","m":"","n":9.7e1234'),
        (
            '{"items":[{"s":"","m":"","n":1,"u":[1,{"z":"]"}]}',
            '{"items":[{"s":"","m":"","n":1,"u":null}',
        ),
    ],
)
def test_texts_that_go_on_alike_are_one_position(one: str, other: str) -> None:
    assert _position(one) == _position(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"items":[', '{"items":[{"s":"a"}'),
        ('{"items":[{"s":"a\\', '{"items":[{"s":"a'),
        ('{"items":[{"s":"a\\u0', '{"items":[{"s":"a'),
        ('{"items":[{"s":"a\\u00', '{"items":[{"s":"a\\u001'),
        ('{"items":[{"s":"a","m":"ab', '{"items":[{"s":"a","m":"abc'),
        ('{"items":[{"s":"a","m":"\\n', '{"items":[{"s":"a","m":"n'),
        ('{"items":[{"s":"","m":"","n":0', '{"items":[{"s":"","m":"","n":1'),
        ('{"items":[{"s":"","m":"","n":1,"u":[', '{"items":[{"s":"","m":"","n":1,"u":{'),
        ('{"items":[{"s":"","m":"","e":"a', '{"items":[{"s":"","m":"","e":"b'),
        ('{"items":[{"s":"a"},{"s":"a"}', '{"items":[{"s":"a"}'),
        ('{"items":[{"s":"é'[:-1] + "\udcc3", '{"items":[{"s":"'),
    ],
)
def test_texts_that_go_on_differently_are_two_positions(one: str, other: str) -> None:
    assert _position(one) != _position(other)


def _position(text: str) -> object:
    shape = shape_of(
        json.dumps(
            {
                "type": "object",
                "properties": {
                    "items": {
                        "type": "array",
                        "maxItems": 3,
                        "items": {
                            "type": "object",
                            "properties": {
                                "s": {"type": "string"},
                                "m": {"type": "string", "maxLength": 9},
                                "n": {"type": "number"},
                                "e": {"enum": ["a1", "b1"]},
                                "u": {"type": ["array", "object", "null"]},
                            },
                        },
                    }
                },
            }
        )
    )
    position = json_positions.advance(
        json_positions.start(shape), text.encode("utf-8", "surrogateescape")
    )
    assert position is not None
    return _without_identity(position)


def _without_identity(value: object) -> str:
    # Shapes are told apart by identity; here two readings of one schema are compared.
    return str(value)


def test_what_is_not_plain_is_opaque() -> None:
    assert shape_of('{"anyOf": [{"type": "string"}]}').kind is Kind.OPAQUE
    assert shape_of('{"type": "object", "patternProperties": {}}').kind is Kind.OPAQUE
    assert shape_of('{"type": "string", "pattern": "a"}').kind is Kind.SCALAR
    assert shape_of('{"$id": "x", "type": "string"}').kind is Kind.OPAQUE
    assert shape_of('{"$ref": "#"}').kind is Kind.OPAQUE
    assert shape_of('{"type": "object", "required": ["a"]}').kind is Kind.OPAQUE


def test_a_graph_that_outgrows_its_limit_starts_anew_and_stays_right() -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "([a-z]{1,9} ){1,40}")
    small, large = graph_of(spec, limit_bytes=3000), graph_of(spec)
    walker = Walker(3)
    for _ in range(5):
        one, other = Matcher(spec, small), Matcher(spec, large)
        for _ in range(40):
            mask = one.mask()
            assert mask is not None
            assert np.array_equal(mask, other.mask())
            token = walker.pick(ids_of(mask))
            assert one.accept(token)
            assert other.accept(token)
        assert small.size_bytes < 3000 + 1000 < large.size_bytes


def test_nothing_is_kept_without_memory() -> None:
    spec = schema({"type": "string"})
    graph = graph_of(spec, limit_bytes=0)
    for _ in range(2):
        matcher = Matcher(spec, graph)
        for token in tokenizer().encode('"abc"'):
            assert matcher.accept(token)
    assert graph.computed == 1 + 2 * len(tokenizer().encode('"abc"'))


def test_the_only_token_of_a_mask() -> None:
    for token in (0, 1, 31, 32, 63, 510, 511):
        assert single_token(only(token, 16)) == token
        assert ids_of(only(token, 16)) == [token]
    assert single_token(only(3, 16) | only(31, 16)) == NOT_FORCED
    assert single_token(only(3, 16) | only(40, 16)) == NOT_FORCED
    assert single_token(np.zeros(16, dtype=np.int32)) == NOT_FORCED
