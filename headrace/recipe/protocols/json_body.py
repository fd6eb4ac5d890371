"""JSON body -> Python values -> typed request, with errors that name the field.

Contract: any bytes give a value or InvalidRequest; nothing else is raised. Shared by all protocols.
"""

from __future__ import annotations

import json
import re
from typing import TypeVar

import msgspec

from headrace.errors import InvalidRequest

Wire = TypeVar("Wire", bound=msgspec.Struct)

_PATH = re.compile(r"^(?P<what>.*?) - at `\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)


def decode_body(body: bytes) -> dict[str, object]:
    """The top-level object of a body; of a repeated key the last one wins."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        # Of the untyped decoder these are numbers that no float can hold.
        text = str(error).partition(" - at ")[0].rstrip(".")
        name = _first_bad_field(body)
        where = "" if name is None else f"{name}: "
        raise InvalidRequest(f"invalid JSON request: {where}{text}.", param=name) from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        name = _field_with_lone_surrogate(body)
        if name is not None:
            raise InvalidRequest(
                f"invalid JSON request: {name}: a text holds half of a surrogate pair "
                "(\\ud800 to \\udfff), which is not a character.",
                param=name,
            ) from error
        raise InvalidRequest(f"invalid JSON request: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(
            f"invalid request body: expected a JSON object, got {json_type(fields)}."
        )
    return fields


def convert_body(fields: dict[str, object], wire: type[Wire]) -> Wire:
    """Check types strictly (no text for numbers, no 10.0 for integers)."""
    try:
        return msgspec.convert(fields, wire)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error))
        raise InvalidRequest(f"invalid request body: {message}", param=param) from error
    except RecursionError as error:
        raise InvalidRequest(f"invalid request body: {error}") from error


def json_type(value: object) -> str:
    """Name of a JSON value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _first_bad_field(body: bytes) -> str | None:
    """The first top-level field whose value cannot be decoded, though the syntax is right."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return None
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except msgspec.MsgspecError:
            return name
    return None


def _field_with_lone_surrogate(body: bytes) -> str | None:
    """The first top-level field that holds one, if that is all that is wrong with the body."""
    try:
        # The standard library lets them pass, msgspec's texts about them mislead.
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return str(name).encode("utf-8", "replace").decode()
    return None


def _explain(text: str) -> tuple[str, str | None]:
    """msgspec's text -> (message, dotted name of the field)."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, "")
    path = path.lstrip(".")
    inner = _MISSING.match(what) or _UNKNOWN.match(what)
    if inner:
        path = f"{path}.{inner['name']}" if path else inner["name"]
        problem = "is missing" if _MISSING.match(what) else "is not a known field"
        return f"{path} {problem}.", path
    what = what.replace("`", "").replace(" | null", "")
    return (f"{path}: {what}." if path else f"{what}."), path or None
