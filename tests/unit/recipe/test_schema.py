"""Schemas: the texts of the validator, and the normal form of strict ones."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from headrace.errors import InvalidRequest
from headrace.recipe.protocols.schema import check_schema, has_definitions, normalise_strict

TEXT = {"type": "string"}
UNFIT = "Invalid tool parameters schema : "


def strict(schema: Any, top: Literal["tool", "response"] = "tool") -> str:
    return json.dumps(normalise_strict(schema, top=top))


def fails(schema: Any, top: Literal["tool", "response"] = "tool") -> str:
    with pytest.raises(InvalidRequest) as caught:
        normalise_strict(schema, top=top)
    return caught.value.message


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({}, None),
        (True, None),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/k"}}, "$defs": {"k": TEXT}},
            None,
        ),
        (5, '5 is not of types "boolean", "object"'),
        ({"type": "strin"}, '"strin" is not valid under any of the schemas listed in the'),
        ({"pattern": "["}, '"[" is not a "regex"'),
        ({"$ref": "#/nope"}, "Pointer '/nope' does not exist"),
        ({"$ref": "https://x.y/z.json"}, "Resource 'https://x.y/z.json' is not present"),
        ({"$schema": "https://nope/x"}, "Unknown meta-schema: 'https://nope/x'"),
        ({"enum": ["x" * 70_000], "type": 5}, "5 is not valid under any"),
    ],
)
def test_problems_of_schemas(schema: Any, problem: str | None) -> None:
    for _ in range(2):  # the second time it is remembered
        found = check_schema(schema)
        assert found is None if problem is None else (found or "").startswith(problem)


def test_keywords_that_stay_and_their_order() -> None:
    schema = {
        "$def": {"k": of(a=TEXT)},
        "title": "dropped",
        "description": "d",
        "required": ["s", "n", "i", "l", "b", "u", "o", "r"],
        "additionalProperties": False,
        "properties": {
            "s": {
                "enum": ["x"],
                "format": "uuid",
                "pattern": "p",
                "type": "string",
                "maxLength": 1,
            },
            "n": {"multipleOf": 2, "minimum": 1.5, "const": 1, "type": "number", "enum": [1]},
            "i": {"default": 3, "exclusiveMaximum": 9, "type": "integer", "maximum": None},
            "l": {"items": {"type": "null", "title": "t"}, "type": "array", "minItems": 1},
            "b": {"type": "boolean", "default": True},
            "u": {"type": ["string", "null"], "description": "d", "enum": ["q"]},
            "o": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}], "title": "t"},
            "r": {"$ref": "#/$def/k", "description": "dropped"},
        },
        "type": "object",
    }
    assert strict(schema) == json.dumps(
        {
            "type": "object",
            "properties": {
                "s": {"type": "string", "pattern": "p", "format": "uuid", "enum": ["x"]},
                "n": {"type": "number", "const": 1, "minimum": 1.5, "multipleOf": 2},
                "i": {"type": "integer", "default": 3, "exclusiveMaximum": 9},
                "l": {"type": "array", "items": {"type": "null"}},
                "b": {"type": "boolean"},
                "u": {"type": ["string", "null"], "description": "d"},
                "o": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}]},
                "r": {"$ref": "#/$def/k"},
            },
            "additionalProperties": False,
            "required": ["s", "n", "i", "l", "b", "u", "o", "r"],
            "description": "d",
            "$def": {
                "k": {
                    "type": "object",
                    "properties": {"a": {"type": "string"}},
                    "additionalProperties": False,
                    "required": ["a"],
                }
            },
        }
    )


def test_the_schema_itself_is_not_changed() -> None:
    schema = of(a=of(b=TEXT))
    before = json.dumps(schema)
    strict(schema)
    assert json.dumps(schema) == before


def test_an_empty_object_may_be_at_the_top_of_tools_only() -> None:
    empty = '{"type": "object", "properties": {}, "additionalProperties": false, "required": []}'
    assert strict(None) == strict({"type": "object"}) == empty
    for schema, top in ((of(a=of()), "tool"), (of(), "response")):
        assert fails(schema, top) == "An object with no properties is not allowed."  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (TEXT, "The top level of the function parameters schema must be an object."),
        ({"anyOf": [of(a=TEXT)]}, "The top level of the function parameters schema must be an"),
        ({**of(a=TEXT), "required": ["b"]}, "Required property 'b' not found in object"),
        ({**of(a=TEXT), "required": ["a", "a"]}, "Duplicate required property 'a'"),
        ({**of(a=TEXT), "required": []}, "Required properties must match all properties in the"),
        ({**of(a=TEXT), "additionalProperties": True}, "additionalProperties should not be true"),
        ({**of(a=of()), "required": ["b"]}, "An object with no properties is not allowed."),
        (
            of(a={"type": "object", "$def": {"k": {**of(a=TEXT), "required": ["b"]}}}),
            "An object with no properties is not allowed.",
        ),
        (
            {**of(a=TEXT), "required": ["b"], "$def": {"k": of()}},
            "An object with no properties is not allowed.",
        ),
        (5, UNFIT + "one of `type`, `anyOf`, `$ref` field is required"),
        (of(a={}), UNFIT + "one of `type`, `anyOf`, `$ref` field is required"),
        (of(a={"type": "array"}), UNFIT + "missing field `items`"),
        (
            of(a={"type": "strin"}),
            UNFIT + "unknown variant `strin`, expected one of `object`, `str",
        ),
        (of(a={"type": 5}), UNFIT + "invalid type: integer `5`, expected variant identifier"),
        (of(a={"type": ["object"]}), UNFIT + "field `type`: unknown variant `object`, expected on"),
        (
            of(a={"type": [5]}),
            UNFIT + "field `type`: invalid type: integer `5`, expected string or",
        ),
        (of(a={"anyOf": [{"$ref": "#"}]}), UNFIT + "field `anyOf`: missing field `type`"),
        (of(a={"anyOf": [[]]}), UNFIT + "field `anyOf`: missing field `type`"),
        (of(a={"anyOf": [5]}), UNFIT + "field `anyOf`: invalid type: integer `5`, expected intern"),
        (of(a={"anyOf": 1.5}), UNFIT + "field `anyOf`: invalid type: floating point `1.5`, expect"),
        (of(a={"$ref": None}), UNFIT + "field `$ref`: invalid type: null, expected a string"),
        ({"type": "object", "properties": "x"}, UNFIT + 'invalid type: string "x", expected a map'),
        ({**of(a=TEXT), "required": {}}, UNFIT + "invalid type: map, expected a sequence"),
        (
            {**of(a=TEXT), "additionalProperties": []},
            UNFIT + "invalid type: sequence, expected a b",
        ),
        (
            of(a={**TEXT, "format": "date"}),
            UNFIT + "unknown variant `date`, expected one of `email",
        ),
        (
            of(a={"type": "integer", "minimum": 1e20}),
            UNFIT + "invalid type: floating point `1e+20`",
        ),
        (
            of(a={"type": "integer", "minimum": 2**63}),
            UNFIT + "invalid value: integer `92233720368",
        ),
        (
            of(a={"type": "number", "minimum": True}),
            UNFIT + "invalid type: boolean `true`, expecte",
        ),
    ],
)
def test_texts_of_refusals(schema: Any, message: str) -> None:
    assert fails(schema).startswith(message)


def test_response_schemas_have_texts_of_their_own() -> None:
    assert fails(TEXT, "response") == "The top level of the json schema must be an object."
    assert fails({}, "response").startswith("Invalid json schema: one of `type`")


def test_definitions_that_the_normal_form_loses() -> None:
    assert has_definitions({"$defs": {}}) and has_definitions({"definitions": {}})
    assert not has_definitions(of(a=TEXT)) and not has_definitions(5)
