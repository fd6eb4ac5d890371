"""What becomes of each keyword of JSON Schema: enforced, an annotation, or refused.

Contract: plain tables, read by `schema.py` and by the table in docs/structured-output.md. A keyword
in none of them is unknown: refused by strict schemas, ignored by others (JSON Schema calls unknown
keywords annotations).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How a schema is taken.

    STRICT: unknown keywords are refused, objects are closed. PLAIN: unknown keywords are ignored.
    LOOSE: a description that nobody promised to keep (tools that are not strict): what cannot be
    enforced is left out.
    """

    STRICT = "strict"
    PLAIN = "plain"
    LOOSE = "loose"


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of a schema; the costs behind them are those of compiling, measured."""

    bytes: int = 524_288  # of its normal form
    depth: int = 64  # levels, and references that lead directly to references
    nodes: int = 10_000
    definitions: int = 500  # that are referenced
    properties: int = 1_000  # of one object
    enum_values: int = 5_000  # in all
    alternatives: int = 1_000  # of anyOf, oneOf, allOf together with what it multiplies by


LIMITS = Limits()

ENFORCED = frozenset(
    [
        "type",
        "enum",
        "const",
        "anyOf",
        "allOf",
        "oneOf",
        "$ref",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "uniqueItems",
    ]
)
ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "$comment",
        "$schema",
        "$id",
        "$anchor",
        "$defs",
        "definitions",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "discriminator",
    ]
)
_NO_GRAMMAR = "no grammar expresses it"
_REWRITE = "write the variants as anyOf instead"
REFUSED: dict[str, str] = {
    "not": _NO_GRAMMAR,
    "if": _REWRITE,
    "then": _REWRITE,
    "else": _REWRITE,
    "contains": _NO_GRAMMAR,
    "minContains": _NO_GRAMMAR,
    "maxContains": _NO_GRAMMAR,
    "dependentRequired": _REWRITE,
    "dependentSchemas": _REWRITE,
    "dependencies": _REWRITE,
    "propertyNames": "use patternProperties with additionalProperties = false instead",
    "unevaluatedProperties": "use additionalProperties instead",
    "unevaluatedItems": "use items instead",
    "$dynamicRef": "use $ref instead",
    "$recursiveRef": "use $ref instead",
    "$vocabulary": "the vocabularies are those of draft 2020-12",
    "x-guidance": "it would configure the grammar engine",
}

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
IN_PLACE = ("anyOf", "oneOf", "allOf")
# Before draft 2019-09 what stands beside $ref does not count.
_SCHEMA = "json-schema.org/"
LEGACY_DRAFTS = tuple(f"{_SCHEMA}draft-0{number}/schema" for number in (4, 6, 7))
DRAFTS = (f"{_SCHEMA}draft/2019-09/schema", f"{_SCHEMA}draft/2020-12/schema", *LEGACY_DRAFTS)


def says_nothing(keyword: str, value: object, schema: dict[str, object]) -> bool:
    """Whether a refused keyword has a value (or company) that allows everything."""
    match keyword:
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value == {}
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
    return False


def step(name: str) -> str:
    """One step of a path."""
    plain = name.replace("$", "").replace("-", "").replace("_", "")
    return f".{name}" if plain.isalnum() else f"[{name!r}]"
