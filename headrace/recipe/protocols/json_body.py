"""JSON body -> typed request, by the reading rules that all protocols share (spec recipe 1.1).

Contract: any input gives a value or InvalidBody, nothing else. The typed decoder reads the bytes
directly; what is wrong with fields that it skips (nesting, text, numbers) is only found by an exact
reading. Values whose type is free (tool schemas) are `msgspec.Raw` fields, read by `read_json`.
Called by every protocol module.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from headrace.errors import InvalidBody
from headrace.recipe import json_text

Wire = TypeVar("Wire")

U8, U32, U64 = 2**8 - 1, 2**32 - 1, 2**64 - 1

_PATH = re.compile(r"^(?P<what>.*?) - at `\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_PLAIN_VALUE = msgspec.json.Decoder()


def decode_body(
    body: bytes | str | dict[str, Any], wire: type[Wire], *, exact: bool = True, path: str = ""
) -> Wire:
    """The typed request; of a repeated key the last one wins, null means absent.

    exact: also refuse what is wrong with fields that `wire` does not have. path: where in the
    request it stands, if it is a part of one.
    """
    data = body if isinstance(body, bytes) else _to_bytes(body)
    try:
        if exact:
            _check_all(data)
        return msgspec.json.decode(data, type=wire)
    except msgspec.ValidationError as error:
        return _decode_again(data, wire, error, path)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _unreadable(data, error) from error


def read_json(raw: bytes | msgspec.Raw) -> Any:
    """The value of a piece of JSON; InvalidBody when the official reader would refuse it."""
    try:
        return json_text.read_json(bytes(raw).decode())
    except ValueError as error:
        raise InvalidBody(f"invalid JSON request: {error}") from error


def convert_value(value: Any, wire: type[Wire], path: str) -> Wire:
    """An already read value as a typed one; InvalidBody names the field below `path`."""
    try:
        return msgspec.convert(value, wire)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), path)
        raise InvalidBody(f"invalid request body: {message}", param=param) from error


def check_unsigned(value: int | None, limit: int, name: str) -> None:
    """InvalidBody unless 0 <= value <= limit (U8, U32 or U64)."""
    if value is not None and not 0 <= value <= limit:
        if value.bit_length() > 1023:
            raise InvalidBody("invalid JSON request: number out of range", param=name)
        if value > U64:
            shown = f"invalid type: floating point `{float(value)!r}`"
        else:
            shown = f"invalid value: integer `{value}`"
        bits = limit.bit_length()
        raise InvalidBody(f"invalid request body: {shown}, expected u{bits}", param=name)


def _to_bytes(body: str | dict[str, Any]) -> bytes:
    try:
        if not isinstance(body, str):
            body = json.dumps(body, ensure_ascii=False, allow_nan=False)
        return body.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidBody(f"invalid JSON request: {error}") from error


def _check_all(data: bytes) -> None:
    """Every text, number and level of the body, whether it is used or not."""
    level: list[Any] = [[_PLAIN_VALUE.decode(data)]]
    if data.count(b"{") + data.count(b"[") <= json_text.MAX_DEPTH:
        return
    for _ in range(json_text.MAX_DEPTH + 1):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise InvalidBody("invalid JSON request: recursion limit exceeded")


def _decode_again(data: bytes, wire: type[Wire], error: msgspec.ValidationError, path: str) -> Wire:
    """Again with one value per key: of a repeated key the first may have had a wrong type."""
    try:
        value = json_text.read_json(data.decode())
    except ValueError as again:
        raise _unreadable(data, again) from error
    try:
        single = json.dumps(value, ensure_ascii=False).encode()
        return msgspec.json.decode(single, type=wire)
    except msgspec.ValidationError as again:
        message, param = _explain(str(again), path)
        raise InvalidBody(f"invalid request body: {message}", param=param) from error
    except (ValueError, RecursionError) as again:
        raise InvalidBody(f"invalid JSON request: {again}") from error


def _unreadable(data: bytes, error: Exception) -> InvalidBody:
    field, text = _faulty_field(data) or (None, str(error))
    return InvalidBody(f"invalid JSON request: {text}", param=field)


def _faulty_field(data: bytes) -> tuple[str, str] | None:
    """The field with the first value that JSON cannot carry, and what is wrong where in it.

    None when something else is wrong with the body.
    """
    try:
        # The standard library lets them pass, the texts of msgspec about them mislead.
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    reason = _fault(fields) if isinstance(fields, dict) else None
    steps: list[str] = []
    while reason is not None and isinstance(fields, (dict, list)):
        named = isinstance(fields, dict)
        for name, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
            if _fault({name: value}) is not None:
                shown = str(name).encode("utf-8", "replace").decode()
                steps.append((f".{shown}" if steps else shown) if named else f"[{shown}]")
                fields = value if _fault(value) is not None else None  # else it is the name
                break
        else:
            break
    if reason is None or not steps:
        return None
    place = "" if len(steps) == 1 else f" at {''.join(steps)}"
    return steps[0], f"{steps[0]}: {reason}{place}"


def _fault(value: Any) -> str | None:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "text with a lone surrogate"
    except ValueError:
        return "number out of range"
    return None


def _explain(text: str, start: str) -> tuple[str, str | None]:
    """Text of msgspec about what stands at `start` -> (message, dotted name of the field)."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, "")
    path = (start + path).lstrip(".")
    missing = _MISSING.match(what)
    if missing:
        name = missing["name"]
        return f"missing field `{name}`", f"{path}.{name}" if path else name
    what = what.replace("`", "").replace(" | null", "")
    return (f"{path}: {what}" if path else what), path or None
