"""JSON body -> Python values -> typed request, with errors that name the field.

Contract: any bytes give a value or InvalidRequest; nothing else is raised. Shared by all protocols.
"""

from __future__ import annotations

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
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
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
