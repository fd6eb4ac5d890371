"""JSON schemas drawn by hypothesis-jsonschema from a schema of schemas: a second source.

It draws what our own generator does not: any names, any constants, bounds with many digits. The
schema of schemas says keywords and depth; JSON Schema's own would draw hardly anything but unknown
keywords, and the library cannot follow its recursion.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.internal.conjecture.utils import many

# Why it cannot be used here; None: it can.
MISSING: str | None = None
if importlib.util.find_spec("hypothesis_jsonschema") is None:
    MISSING = "hypothesis-jsonschema (extra dev) is not installed"
elif not hasattr(many, "more"):
    MISSING = "hypothesis-jsonschema 0.23.1 needs hypothesis 6.170.8 or older"

_NUMBER = {"type": "number", "minimum": -1e9, "maximum": 1e9}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 6}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PATTERNS = ["a", "^a", "^[a-c]*$", r"^\d{2,4}$", "[^x]", "a|b", "^(ab|cd)+$", r"\s", "^.{2}$"]
_FORMATS = ["date", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "uri", "duration"]


def _object(needed: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
    }


def _leaves() -> list[dict[str, Any]]:
    string, names = {"const": "string"}, {"enum": ["boolean", "null", "object", "array"]}
    number = {"enum": ["number", "integer"]}
    listed = {"type": "array", "minItems": 1, "maxItems": 4}
    return [
        _object(["type"], type=names),
        _object(["type"], type=string, minLength=_COUNT, maxLength=_COUNT),
        _object(["type", "pattern"], type=string, pattern={"enum": _PATTERNS}, maxLength=_COUNT),
        _object(["type", "format"], type=string, format={"enum": _FORMATS}),
        _object(["type"], type=number, multipleOf={"enum": [1, 2, 7, 0.1, 0.5, 2.5]}),
        _object(["type"], type=number, **dict.fromkeys(_BOUNDS, _NUMBER)),
        _object(["enum"], enum=listed),
        _object(["const"], const={}),
    ]


def _schemas(depth: int) -> dict[str, Any]:
    leaves = _leaves()
    if not depth:
        return {"anyOf": leaves}
    inner = _schemas(depth - 1)
    several = {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
    properties = {"type": "object", "additionalProperties": inner, "maxProperties": 3}
    items = _object(
        ["type"], type={"const": "array"}, items=inner, minItems=_COUNT, maxItems=_COUNT
    )
    first = _object(["type"], type={"const": "array"}, prefixItems=several, items={"const": False})
    members = _object(
        ["type", "properties"],
        type={"const": "object"},
        properties=properties,
        additionalProperties={"type": "boolean"},
        required={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 1},
    )
    combined = [_object([name], **{name: several}) for name in ("anyOf", "allOf", "oneOf")]
    return {"anyOf": [members, items, first, *combined, *leaves]}


def drawn(count: int) -> list[dict[str, Any]]:
    """The same `count` schemas each time (about)."""
    found: list[dict[str, Any]] = []
    run_drawn(count, found.append)
    return found


def run_drawn(count: int, use: Callable[[dict[str, Any]], object]) -> None:
    """Call `use` with `count` schemas, always the same ones."""

    @hypothesis.seed(1)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(drawn_schemas())
    def run(schema: dict[str, Any]) -> None:
        use(schema)

    run()


def drawn_schemas(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of at most `depth` levels above the innermost one."""
    from hypothesis_jsonschema import from_schema

    return from_schema(_schemas(depth))
