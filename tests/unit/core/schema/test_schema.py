"""JSON schemas in normal form: paths of what is refused, what is kept, modes, limits."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.schema.schema import check_schema_form
from headrace.core.schema.tables import ANNOTATIONS, ENFORCED, LIMITS, REFUSED, Mode
from headrace.errors import InvalidRequest
from tests.unit.recipe.grammars import accepts, matcher_of


def refused(schema: Any, mode: Mode = Mode.PLAIN) -> tuple[str, str]:
    """Path behind `S` and text of the error."""
    with pytest.raises(InvalidRequest) as caught:
        check_schema_form(schema, "S", mode)
    assert caught.value.param is not None and caught.value.param.startswith("S")
    assert caught.value.message.startswith(caught.value.param)
    return caught.value.param[1:], caught.value.message


def texts(schema: Any, *candidates: str, mode: Mode = Mode.PLAIN, close: bool = False) -> list[str]:
    form = check_schema_form(schema, "S", mode, close=close)
    matcher = matcher_of(GrammarSpec(GrammarKind.JSON_SCHEMA, form.text()))
    return [text for text in candidates if accepts(matcher, text)]


DEEP: Any = {"type": "integer"}
for _ in range(LIMITS.depth + 1):
    DEEP = {"type": "array", "items": DEEP}

REFUSALS: list[tuple[Any, str, str]] = [
    # schema, path, part of the text
    (False, "", "allows no answer"),
    ([], "", "object or a boolean"),
    ({"properties": {"a": {"pattern": "(?=x)"}}}, ".properties.a.pattern", "look-ahead"),
    ({"properties": {"a b": {"pattern": r"(x)\1"}}}, ".properties['a b'].pattern", "backreference"),
    ({"items": {"not": {}}}, ".items.not", "`not` is not supported"),
    ({"anyOf": [{}, {"uniqueItems": True}]}, ".anyOf[1].uniqueItems", "not supported"),
    ({"x-guidance": {"lenient": True}}, ".x-guidance", "grammar engine"),
    ({"type": "decimal"}, ".type", "unknown type"),
    ({"type": []}, ".type", "at least one"),
    ({"enum": []}, ".enum", "at least one value"),
    ({"type": "integer", "enum": ["a"]}, ".enum", "none of the values"),
    ({"type": "integer", "const": 1.5}, ".const", "the type"),
    ({"enum": [1], "const": 2}, ".const", "none of the values"),
    ({"enum": [1, 2], "minimum": 3}, "", "none of the listed values"),
    ({"minimum": 2, "maximum": 1}, ".minimum", "within the bounds"),
    ({"minimum": 1, "exclusiveMaximum": 1}, ".minimum", "within the bounds"),
    ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, ".minimum", "within the bounds"),
    ({"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7}, ".minimum", "within"),
    ({"minimum": "1"}, ".minimum", "must be a number"),
    ({"minimum": 2**60}, ".minimum", "2^53"),
    ({"exclusiveMinimum": True}, ".exclusiveMinimum", "must be a number"),
    ({"multipleOf": 0}, ".multipleOf", "greater than 0"),
    ({"multipleOf": 65_537}, ".multipleOf", "not supported"),
    ({"multipleOf": 99_999_999}, ".multipleOf", "not supported"),
    ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, ".multipleOf", "together"),
    ({"minLength": 2, "maxLength": 1}, ".minLength", "greater than"),
    ({"minLength": -1}, ".minLength", "at least 0"),
    ({"maxLength": 10**6}, ".maxLength", "at most"),
    ({"minItems": 2, "maxItems": 1}, ".minItems", "greater than"),
    ({"type": "array", "items": False, "minItems": 1}, ".minItems", "0 items"),
    ({"type": "object", "required": ["a"], "properties": {"a": False}}, ".required", "not allowed"),
    (
        {"type": "object", "required": ["b"], "properties": {}, "additionalProperties": False},
        ".required",
        "'b' is required and not allowed",
    ),
    ({"minProperties": 2, "maxProperties": 1}, ".minProperties", "greater than"),
    ({"type": "object", "minProperties": 2}, ".minProperties", "not supported here"),
    (
        {"properties": {"a": {}}, "additionalProperties": False, "minProperties": 2},
        ".minProperties",
        "only 1 properties",
    ),
    ({"maxProperties": 0, "required": ["a"]}, ".maxProperties", "1 properties are required"),
    ({"properties": {"a": {}}, "maxProperties": 1}, ".maxProperties", "optional properties"),
    ({"patternProperties": {"^a": {}, "b$": {}}}, ".patternProperties", "more than one"),
    (
        {"patternProperties": {"^a": {}}, "allOf": [{"patternProperties": {"b$": {}}}]},
        "",
        "several `patternProperties`",
    ),
    ({"exclusiveMinimum": 2, "maximum": 2.000000000000001}, ".exclusiveMinimum", "too close"),
    ({"minimum": 10**8, "multipleOf": 1e-8}, ".minimum", "too large"),
    ({"anyOf": []}, ".anyOf", "at least one"),
    ({"anyOf": [False, False]}, ".anyOf", "none of the alternatives"),
    ({"allOf": [{}, False]}, ".allOf", "allows nothing"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "", "no type in common"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf", "branches 0 and 1"),
    ({"format": "idn-email"}, ".format", "not supported"),
    ({"$ref": "#/$defs/x"}, ".$ref", "leads nowhere"),
    ({"$ref": "other.json"}, ".$ref", "outside"),
    ({"$ref": "#"}, ".$ref", "back to itself"),
    ({"properties": {"a": {"$ref": "#/properties/a"}}}, ".properties.a.$ref", "back to itself"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        ".$defs.a.$ref",
        "",
    ),
    (
        {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#"}}},
        ".properties.next.$ref",
        "endless",
    ),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, ".items.$ref", "endless"),
    ({"$schema": "http://example.org/mine"}, ".$schema", "dialect"),
    (DEEP, "", "nested deeper"),
    ({"enum": list(range(LIMITS.enum_values + 1))}, ".enum", "more than 5000"),
    ({"enum": ["x" * 200_000, "y" * 200_000, "z" * 200_000]}, "", "bytes"),
    ({"properties": {f"p{i}": {} for i in range(1001)}}, ".properties", "more than 1000"),
    ({"anyOf": [{"anyOf": [{}] * 1000}] * 11}, "", "more than 10000 nodes"),
    (
        {"allOf": [{"anyOf": [{"const": i}, {"type": "string"}]} for i in range(12)]},
        "",
        "combinations",
    ),
]


@pytest.mark.parametrize(("schema", "path", "text"), REFUSALS)
def test_what_cannot_be_enforced_is_refused_with_its_path(
    schema: Any, path: str, text: str
) -> None:
    where, message = refused(schema)
    assert where == path
    assert text in message
    # Without promises nothing is refused but what is too large or no schema.
    if not isinstance(schema, (bool, list)) and not any(
        part in text for part in ("bytes", "nodes", "dialect", "outside", "nowhere")
    ):
        check_schema_form(schema, "S", Mode.LOOSE)


def test_every_refused_keyword_is_refused_by_name() -> None:
    assert not (ENFORCED & ANNOTATIONS or ENFORCED & set(REFUSED) or ANNOTATIONS & set(REFUSED))
    for keyword in REFUSED:
        schema = {"if": {}, "then": {}, "contains": {}, keyword: {"type": "null"}}
        where, message = refused({keyword: schema[keyword], **schema})
        assert f"`{keyword}`" in message and keyword in where


def test_unknown_keywords_are_refused_by_strict_schemas_only() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minimumLength": 3}}}
    where, message = refused(schema, Mode.STRICT)
    assert where == ".properties.a.minimumLength"
    assert "unknown keyword" in message
    assert texts(schema, '{"a":""}') == ['{"a":""}']
    assert refused({"type": "string", "format": "decimal"}, Mode.STRICT)[0] == ".format"
    assert texts({"type": "string", "format": "decimal"}, '"x"') == ['"x"']
    # Formats of other types mean nothing.
    assert texts({"type": "integer", "format": "int32"}, "1", mode=Mode.STRICT) == ["1"]


def test_annotations_are_dropped() -> None:
    schema: dict[str, Any] = dict.fromkeys(ANNOTATIONS - {"$schema", "$defs", "$id"}, "x")
    schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "http://me/"}
    assert check_schema_form(schema, "S", Mode.STRICT).text() == "{}"


def test_strict_objects_are_closed() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
    candidates = ('{"a":1}', '{"a":1,"b":2}', '{"a":1,"c":2}')
    assert texts(schema, *candidates) == list(candidates)
    assert texts(schema, *candidates, mode=Mode.STRICT) == list(candidates[:2])
    assert texts(schema, *candidates, close=True) == [candidates[1]]


def test_one_of_becomes_any_of_where_branches_exclude_each_other() -> None:
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
    schema = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}]}
    schema["$defs"] = {"cat": cat, "dog": dog}  # type: ignore[assignment]
    assert texts(schema, '{"kind":"cat"}', '{"kind":"cow"}', "null") == ['{"kind":"cat"}', "null"]
    del dog["required"]
    assert texts({"oneOf": [cat, dog]}, "{}", '{"kind":"dog"}') == ["{}", '{"kind":"dog"}']
    del cat["required"]
    assert refused({"oneOf": [cat, dog]})[0] == ".oneOf"
    assert refused({"oneOf": [{"minimum": 1}, {"maximum": 3}]})[0] == ".oneOf"
    number = {
        "oneOf": [{"type": "number", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}]
    }
    assert texts(number, "3", "4") == ["3", "4"]


def test_recursion_that_ends_is_fine() -> None:
    tree = {
        "type": "object",
        "properties": {
            "value": {"type": "integer"},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    good = '{"value": 1, "next": {"value": 2, "next": null}}'
    assert texts(tree, good, '{"value": 1}') == [good]


def test_a_long_chain_of_references_is_refused_before_a_library_sees_it() -> None:
    """llguidance 1.9.1 ends the process on a chain of 3,000 references."""
    chain: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(400)}
    chain["400"] = {"type": "integer"}
    assert "follow one another" in refused({"$ref": "#/$defs/0", "$defs": chain})[1]
    many = {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(600)}
    many["600"] = {"type": "integer"}  # type: ignore[dict-item]
    assert "more than 500 places" in refused({"$ref": "#/$defs/0", "$defs": many})[1]


def test_hostile_schemas_are_read_in_bounded_time() -> None:
    doubling: dict[str, Any] = {
        str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 1}"}]}
        for i in range(60)
    }
    doubling["60"] = {"type": "integer", "multipleOf": 3}
    branches = [{"oneOf": [{"type": "object", "properties": {"a": {}}}] * 30} for _ in range(30)]
    start = time.perf_counter()
    for schema in ({"$ref": "#/$defs/0", "$defs": doubling}, {"oneOf": branches}):
        with suppress(InvalidRequest):
            check_schema_form(schema, "S")
    assert time.perf_counter() - start < 10


def test_references_into_a_part_take_what_they_need_along() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "null"}},
        "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/y"}}, "y": {"type": "integer"}},
    }
    form = check_schema_form(schema, "S")
    assert isinstance(form.root, dict)
    part = json.loads(form.text(form.root["properties"]["a"]))
    assert sorted(part["$defs"]) == ["0", "1"]
    assert "$defs" not in json.loads(form.text(form.root["properties"]["b"]))


def test_older_drafts_are_read_as_they_were() -> None:
    legacy = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": {"type": "integer"}},
        "items": [{"$ref": "#/definitions/n", "minimum": 5}],
        "additionalItems": False,
        "type": "array",
    }
    assert texts(legacy, "[1]", "[1,2]", '["a"]') == ["[1]"]


def test_bounds_are_exact() -> None:
    """Over a grid of bounds: what is accepted lies within, and what lies within is accepted."""
    values = [-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 10, 10.5]
    checked = 0
    for low in values:
        for high in values:
            for least in ("minimum", "exclusiveMinimum"):
                for most in ("maximum", "exclusiveMaximum"):
                    schema = {"type": "number", least: low, most: high}
                    try:
                        form = check_schema_form(schema, "S")
                    except InvalidRequest:
                        continue
                    matcher = matcher_of(GrammarSpec(GrammarKind.JSON_SCHEMA, form.text()))
                    checked += 1
                    for value in values:
                        inside = (low < value or (low == value and least == "minimum")) and (
                            value < high or (value == high and most == "maximum")
                        )
                        texts_of_value = {repr(value), f"{value:.1f}"}
                        if value == 0:
                            texts_of_value |= {"-0", "-0.0"}
                        accepted = [accepts(matcher, text) for text in texts_of_value]
                        assert any(accepted) if inside else not any(accepted), (schema, value)
    assert checked > 150
