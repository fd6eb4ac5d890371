"""Keywords with values of every kind: read, or refused with a path; never another error."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from headrace.core.schema.schema import check_schema_form
from headrace.core.schema.tables import Mode
from headrace.errors import InvalidRequest

KEYWORDS = [
    "$schema",
    "$id",
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveRef",
    "$ref",
    "$defs",
    "definitions",
    "$vocabulary",
    "$comment",
    "id",
    "type",
    "enum",
    "const",
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "required",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "contains",
    "minContains",
    "maxContains",
    "minItems",
    "maxItems",
    "uniqueItems",
    "unevaluatedItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "title",
    "description",
    "default",
    "examples",
    "readOnly",
    "nullable",
    "discriminator",
    "x-guidance",
]
ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e300, "", "string", "date", "#", "#/x", "a" * 300,
    [], [1], ["string"], [{}], [None], [[]], {}, {"a": 1}, {"a": {}}, {"a": [1]}, {"a": None},
]  # fmt: skip
MODES = list(Mode)


def read(schema: Any) -> None:
    for mode in MODES:
        try:
            check_schema_form(schema, "S", mode).text()
        except InvalidRequest as error:
            assert error.param is not None and error.param.startswith("S"), schema


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_odd_values_of_a_keyword(keyword: str) -> None:
    for value in ODD:
        read({keyword: value})
        read({"type": "object", "properties": {"a": {keyword: value}}})
        read({"anyOf": [{keyword: value}, {"type": "string"}]})


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_odd_values_of_two_keywords_in_both_orders(keyword: str) -> None:
    others = [("type", 5), ("type", {}), ("type", ["string", 1]), ("format", {}), ("pattern", [])]
    others += [("enum", {}), ("minimum", "a"), ("properties", []), ("items", 3), ("$ref", "#")]
    for value in (None, 1, "string", [], {}):
        for other in others:
            for pairs in permutations([(keyword, value), other]):
                read(dict(pairs))
