"""Which parts of a JSON schema leave no trace in a grammar's state once they are written.

Contract: `shape_of(schema)` describes a schema as far as it is *plain*: at every place one type,
and nothing but what `Shape` lists. A place that is not plain (a union, a keyword not known here) is
OPAQUE: `engine/grammar/json_positions.py` then remembers its text byte by byte. So a keyword that
is missing below costs speed, never correctness. Assumes of the grammar: members come in the order
of `properties`, others after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

# fmt: off
_ANNOTATIONS = frozenset((
    "$schema", "$defs", "definitions", "$comment", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "x-guidance",
))
# fmt: on
_OBJECT = frozenset(["properties", "required", "additionalProperties"])
_ARRAY = frozenset(["items", "prefixItems", "minItems", "maxItems"])
_LENGTHS = frozenset(("minLength", "maxLength"))
# They change what a $ref below them means.
_BASES = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")


class Kind(Enum):
    """What is known of a place."""

    OPAQUE = auto()
    OBJECT = auto()
    ARRAY = auto()
    STRING = auto()  # any string
    MEASURED = auto()  # any string within limits of its length
    NUMBER = auto()  # any number or integer
    SCALAR = auto()  # a constrained or fixed number, string or literal


@dataclass(slots=True, eq=False)
class Shape:
    """One place of a schema.

    members: of an OBJECT, by the bytes between the quotes of the name. others: its additional
    members, None: there are none. first: shapes of the first items of an ARRAY. items: of the
    following ones, None: there are none. counted: items beyond so many make no difference; -1: all
    of them do.
    """

    kind: Kind
    members: Mapping[bytes, Shape] | None = None
    others: Shape | None = None
    first: tuple[Shape, ...] = ()
    items: Shape | None = None
    counted: int = -1


OPAQUE = Shape(Kind.OPAQUE)


def shape_of(schema: str) -> Shape:
    """Shape of a JSON schema that a library has compiled."""
    root = json.loads(schema)
    if not isinstance(root, dict) or _has_key(root, _BASES):
        return OPAQUE
    return _Reader(root).shape(root)


class _Reader:
    """Shapes of one schema; each place is read once, so recursive schemas end."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._shapes: dict[int, Shape] = {}

    def shape(self, schema: Any) -> Shape:
        schema = self._resolved(schema)
        if schema is None:
            return OPAQUE
        known = self._shapes.get(id(schema))
        if known is None:
            known = self._shapes[id(schema)] = Shape(Kind.OPAQUE)
            self._fill(known, schema, set(schema) - _ANNOTATIONS - {"type"})
        return known

    def _resolved(self, schema: Any) -> dict[str, Any] | None:
        """The schema behind a chain of local references; None: it is not that simple."""
        for _ in range(16):
            if not isinstance(schema, dict):
                return None
            if "$ref" not in schema:
                return schema
            if set(schema) - _ANNOTATIONS != {"$ref"}:
                return None
            schema = self._target(schema["$ref"])
        return None

    def _target(self, pointer: Any) -> Any:
        if not isinstance(pointer, str) or not pointer.startswith("#") or "%" in pointer:
            return None
        if pointer == "#":
            return self._root
        target: Any = self._root
        for part in pointer.removeprefix("#/").split("/"):
            if not isinstance(target, dict):
                return None
            target = target.get(part.replace("~1", "/").replace("~0", "~"))
        return target

    def _fill(self, shape: Shape, schema: dict[str, Any], keywords: set[str]) -> None:
        kind = schema.get("type")
        if kind == "object" and keywords <= _OBJECT:
            self._fill_object(shape, schema)
        elif kind == "array" and keywords <= _ARRAY:
            self._fill_array(shape, schema)
        elif kind == "string" and not keywords:
            shape.kind = Kind.STRING
        elif kind == "string" and keywords <= _LENGTHS:
            shape.kind = Kind.MEASURED
        elif kind in ("number", "integer") and not keywords:
            shape.kind = Kind.NUMBER
        elif kind in ("string", "number", "integer", "boolean", "null") or (
            kind is None and keywords in ({"enum"}, {"const"})
        ):
            # Other keywords may constrain it, but one complete scalar is like another.
            fixed = schema.get("enum", [schema.get("const")])
            plain = not keywords & {"anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef"}
            if plain and not any(isinstance(value, (dict, list)) for value in fixed):
                shape.kind = Kind.SCALAR

    def _fill_object(self, shape: Shape, schema: dict[str, Any]) -> None:
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict) or not set(schema.get("required", ())) <= set(
            properties
        ):
            return
        if any(json.dumps(name, ensure_ascii=False) != f'"{name}"' for name in properties):
            return  # a name with several spellings
        shape.kind = Kind.OBJECT
        shape.members = {name.encode(): self.shape(value) for name, value in properties.items()}
        shape.others = None if others is False else self.shape(others)

    def _fill_array(self, shape: Shape, schema: dict[str, Any]) -> None:
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(first, list):
            return
        shape.kind = Kind.ARRAY
        shape.first = tuple(map(self.shape, first))
        shape.items = None if items is False else self.shape(items)
        least = schema.get("minItems", 0)
        if "maxItems" not in schema and items is not False and isinstance(least, int):
            shape.counted = max(1, least, len(first))


def _has_key(value: Any, names: tuple[str, ...]) -> bool:
    if isinstance(value, list):
        return any(_has_key(item, names) for item in value)
    if not isinstance(value, dict):
        return False
    return any(name in value for name in names) or any(
        _has_key(item, names) for item in value.values()
    )
