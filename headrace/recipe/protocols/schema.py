"""JSON schemas in requests: validity, and the normal form of strict ones (spec recipe 6.3).

Contract: `check_schema` says why something is no JSON Schema, `normalise_strict` reduces a strict
schema to the keywords that the official codec keeps or raises with its text. Schemas come with
every request of an agent, so what was checked is remembered by its bytes. Called by `tools.py` and
by the protocol modules for response formats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import msgspec

from headrace.core.schema.refs import check_references
from headrace.core.schema.schema import check_schema_form
from headrace.core.schema.tables import step
from headrace.errors import InvalidGrammar, InvalidRequest
from headrace.recipe.json_text import compact_json

_REMEMBERED_BYTES = 16_384  # longer schemas are checked every time
_SIMPLE_TYPES = ("string", "number", "integer", "boolean", "null")
_FORMATS = ("email", "hostname", "ipv4", "ipv6", "uuid")
_LIMITS = (
    "const",
    "default",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)
_Reader = Callable[[Any], Any]


def check_schema(schema: Any) -> str | None:
    """Why `schema` is no valid JSON Schema (remote references are none), or None."""
    key = msgspec.json.encode(schema)
    if len(key) > _REMEMBERED_BYTES:
        return _problem(schema)
    return _remembered_problem(key)


def normalise_strict(schema: Any, *, top: Literal["tool", "response"]) -> Any:
    """The normal form of a strict schema; None counts as an object without properties."""
    if schema is None and top == "tool":
        schema = {"type": "object"}
    try:
        node = _node(schema)
    except _Unfit as error:
        subject = "tool parameters schema " if top == "tool" else "json schema"
        raise InvalidRequest(f"Invalid {subject}: {error}") from None
    if node.get("type") != "object":
        subject = "function parameters" if top == "tool" else "json"
        raise InvalidRequest(f"The top level of the {subject} schema must be an object.")
    _close_objects(node, may_be_empty=top == "tool")
    return node


def check_response_schema(schema: Any, *, strict: bool, official: bool, param: str) -> Any:
    """The normal form of a strict schema for an answer, else None; InvalidRequest for no schema."""
    normalised = None
    if strict:
        try:
            normalised = normalise_strict(schema, top="response")
        except InvalidRequest as error:
            # clients: strict-schemas. What the official reader cannot take stands as written.
            if official:
                error.param = error.param or param
                raise
        if normalised is not None and (official or not has_definitions(schema)):
            return normalised
        # clients: strict-schemas. Definitions are lost in it: the engine gets the original.
    problem = check_schema(schema)
    if problem is not None and normalised is None:
        if not official:
            raise schema_fault(schema, param)
        raise InvalidRequest(f"Invalid json schema: {problem}", param=param)
    return None if problem is None else normalised


def has_definitions(schema: Any) -> bool:
    """Whether references may point into parts that the normal form does not keep."""
    return isinstance(schema, dict) and ("$defs" in schema or "definitions" in schema)


@lru_cache(maxsize=512)
def _remembered_problem(schema: bytes) -> str | None:
    return _problem(msgspec.json.decode(schema))


def _problem(schema: Any) -> str | None:
    problem, _ = _problem_and_place(schema)
    return problem


def _problem_and_place(schema: Any) -> tuple[str | None, list[str | int]]:
    """What is wrong with a schema, and the steps to where it is."""
    import jsonschema_rs  # heavy, and only requests with schemas need it

    if isinstance(schema, str):
        # The library would read it as the text of a schema.
        return f'{compact_json(schema)} is not of types "boolean", "object"', []
    try:
        jsonschema_rs.validator_for(schema, offline=True)
    except jsonschema_rs.ValidationError as error:
        return str(error.message), list(error.instance_path)
    except (ValueError, TypeError, RecursionError) as error:
        return str(error), []
    return None, []


def schema_fault(schema: Any, path: str) -> InvalidRequest:
    """clients: schema-places. What is wrong with an invalid schema, and where in it.

    path: the field that holds it.
    """
    problem, steps = _problem_and_place(schema)
    place = path + "".join(f"[{s}]" if isinstance(s, int) else step(s) for s in steps)
    try:
        check_references(schema, path)
        check_schema_form(schema, path)
    except InvalidRequest as error:
        if steps and not (error.param or "").startswith(place):
            error = InvalidGrammar(f"{place}: {problem}.", param=place)  # ours is another one
        return error
    return InvalidGrammar(f"{place}: {problem}.", param=place)


# --- reading: which keywords a node may have, and their types ------------------------------------


class _Unfit(Exception):
    """A strict schema has a keyword of the wrong type; the text is that of the official reader."""


def _node(value: Any) -> dict[str, Any]:
    """One schema: kind by kind as the official reader tries them; other keywords are dropped."""
    if isinstance(value, dict):
        if isinstance(value.get("type"), list):
            return _untyped(value, "type", _list_of(_one_of(_SIMPLE_TYPES)))
        if "type" in value:
            return _typed(value)
        if "anyOf" in value:
            return _untyped(value, "anyOf", _list_of(_typed))
        if "$ref" in value:
            return {"$ref": _inside("$ref", _text, value["$ref"])}
    raise _Unfit("one of `type`, `anyOf`, `$ref` field is required")


def _untyped(value: dict[str, Any], keyword: str, read: _Reader) -> dict[str, Any]:
    node = {keyword: _inside(keyword, read, value[keyword])}
    description = value.get("description")
    if description is not None:
        node["description"] = _inside("description", _text, description)
    return node


def _inside(keyword: str, read: _Reader, value: Any) -> Any:
    try:
        return read(value)
    except _Unfit as error:
        raise _Unfit(f"field `{keyword}`: {error}") from None


def _typed(value: Any) -> dict[str, Any]:
    """A schema whose `type` is one name."""
    if not isinstance(value, dict):
        if value == []:
            raise _Unfit("missing field `type`")
        raise _wrong_type(value, "internally tagged enum JsonSchemaType")
    if "type" not in value:
        raise _Unfit("missing field `type`")
    name = value["type"]
    if not isinstance(name, str):
        raise _wrong_type(name, "variant identifier")
    fields = _FIELDS.get(name)
    if fields is None:
        raise _unknown(name, tuple(_FIELDS))
    read = {
        keyword: fields[keyword](entry)
        for keyword, entry in value.items()
        if keyword in fields and (entry is not None or keyword == "items")
    }
    if name == "array" and "items" not in read:
        raise _Unfit("missing field `items`")
    # The order in which the official codec writes the keywords.
    return {"type": name, **{keyword: read[keyword] for keyword in fields if keyword in read}}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong_type(value, "a string")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(value, "a boolean")
    return value


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_type(value, "a JSON number")
    return value


def _i64(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(value, "i64")
    if not -(2**63) <= value < 2**63:
        raise _Unfit(f"invalid value: integer `{value}`, expected i64")
    return value


def _nodes(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong_type(value, "a map")
    return {name: _node(entry) for name, entry in value.items()}


def _list_of(read: _Reader) -> _Reader:
    def read_list(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong_type(value, "a sequence")
        return [read(entry) for entry in value]

    return read_list


def _one_of(names: tuple[str, ...]) -> _Reader:
    def read_name(value: Any) -> str:
        if isinstance(value, dict) and len(value) == 1 and None in value.values():
            # The official reader also takes {"name": null}.
            value = next(iter(value))
        if not isinstance(value, str):
            raise _wrong_type(value, "string or map")
        if value not in names:
            raise _unknown(value, names)
        return value

    return read_name


_FIELDS: dict[str, dict[str, _Reader]] = {
    "object": {
        "properties": _nodes,
        "additionalProperties": _flag,
        "required": _list_of(_text),
        "description": _text,
        "$def": _nodes,
    },
    "string": {
        "description": _text,
        "pattern": _text,
        "format": _one_of(_FORMATS),
        "enum": _list_of(_text),
    },
    "number": {"description": _text, **dict.fromkeys(_LIMITS, _number)},
    "integer": {"description": _text, **dict.fromkeys(_LIMITS, _i64)},
    "boolean": {"description": _text},
    "array": {"items": _node, "description": _text},
    "null": {"description": _text},
}


def _unknown(name: str, known: tuple[str, ...]) -> _Unfit:
    listed = ", ".join(f"`{entry}`" for entry in known)
    return _Unfit(f"unknown variant `{name}`, expected one of {listed}")


def _wrong_type(value: Any, expected: str) -> _Unfit:
    return _Unfit(f"invalid type: {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{compact_json(value)}`"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            for character, escape in (("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"), ("\0", "\\0")):
                escaped = escaped.replace(character, escape)
            return f'string "{escaped}"'
        case list():
            return "sequence"
    return "map"


# --- objects are closed: every property required, no others ---------------------------------------


def _close_objects(node: dict[str, Any], *, may_be_empty: bool = False) -> None:
    """Check and close all objects of a read schema, inner ones first."""
    type_ = node.get("type")
    if type_ == "array":
        _close_objects(node["items"])
    elif "anyOf" in node:
        for entry in node["anyOf"]:
            _close_objects(entry)
    elif type_ == "object":
        properties, definitions = node.get("properties", {}), node.get("$def")
        for entry in properties.values():
            _close_objects(entry)
        if not properties and not may_be_empty:
            raise InvalidRequest("An object with no properties is not allowed.")
        for entry in (definitions or {}).values():
            _close_objects(entry)
        _check_required(node.get("required"), properties)
        if node.get("additionalProperties"):
            raise InvalidRequest("additionalProperties should not be true")
        closed = {
            "type": type_,
            "properties": properties,
            "additionalProperties": False,
            "required": list(properties),
        }
        closed |= {name: node[name] for name in ("description", "$def") if name in node}
        # The order of the keys is part of the prompt.
        node.clear()
        node.update(closed)


def _check_required(required: list[str] | None, properties: dict[str, Any]) -> None:
    if required is None:
        return
    seen: set[str] = set()
    for name in required:
        if name not in properties:
            raise InvalidRequest(f"Required property '{name}' not found in object")
        if name in seen:
            raise InvalidRequest(f"Duplicate required property '{name}'")
        seen.add(name)
    if len(seen) != len(properties):
        raise InvalidRequest("Required properties must match all properties in the object")
