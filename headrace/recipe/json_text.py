"""JSON as prompts write it, and as tool call arguments are read.

Three text forms (spec/recipe.md 2.4), byte-identical to the official codec: `python_json` (V4.1),
`spaced_json` (V4, arguments made from objects) and `compact_json` (output constraints). `read_json`
and `parse_arguments` read text under the official rules. Pure functions; called by the renderers
and the protocols for every tool and every call of a request, so the work is left to C encoders.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from itertools import accumulate
from json.encoder import encode_basestring
from typing import Any

import msgspec

# The official reader counts containers and refuses the 128th level.
MAX_DEPTH = 127
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1

_DECODE = msgspec.json.Decoder().decode
_SPACED = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
_COMPACT = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
# In valid JSON these never have to go back, so that they need not remember where they were.
_NOT_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"|[^][{}"]++', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: one level up or down
# Integers with so many digits are no floats. Only a text in which every 100th character is a digit
# several times in a row can hold one; the search of all of it is too slow for every text.
_HUGE_DIGITS = 309
_HUGE, _FEW_DIGITS = re.compile(r"[0-9]{309}"), re.compile(r"[0-9]{3}")
# A whole string, so that nothing inside of it is taken for a number, or a float in question.
_STRING_OR_SMALL = re.compile(r'"(?:[^"\\]++|\\.)*+"|-?[0-9.]++e-0[5-9]', re.DOTALL)


def python_json(value: Any) -> str:
    """Exactly what `json.dumps(value, ensure_ascii=False)` writes."""
    kind = type(value)
    if kind is str:
        return encode_basestring(value)
    if kind is int:
        return str(value)
    return _SPACED(value)


def escaped(text: str) -> str:
    """The text as it stands inside a JSON string."""
    return encode_basestring(text)[1:-1]


def spaced_json(value: Any) -> str:
    """Like `python_json`, but 1e-05 is written 0.00001 and 1e-07 is written 1e-7."""
    return _official_floats(python_json(value))


def compact_json(value: Any) -> str:
    """Like `spaced_json` without any space between the parts."""
    return _official_floats(_COMPACT(value))


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError when the official codec would refuse it.

    Integers outside of i64 and u64 become floats, `-0` is a float, the last duplicate of a key wins
    in the place of the first, lone surrogates and more than `MAX_DEPTH` levels are refused.
    """
    try:
        value = _DECODE(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(text)
    return value if _is_exact(value, text) else _READ_EXACT(text)


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a tool call, or None when the text is not a JSON object."""
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if type(value) is dict else None


def _check_depth(text: str) -> None:
    """Raise ValueError when valid JSON has too many levels, also in a value that does not stay."""
    brackets = _NOT_BRACKET.sub("", text).encode().translate(_STEPS)
    # All brackets may stand in strings.
    if max(accumulate(array("b", brackets)), default=0) > MAX_DEPTH:
        raise ValueError("JSON is nested too deeply")


def _is_exact(value: Any, text: str) -> bool:
    """Whether the fast reader gave the official value: its integers have no limits and no -0."""
    if len(text) >= _HUGE_DIGITS and _FEW_DIGITS.search(text[::100]) and _HUGE.search(text):
        return False  # perhaps a number that does not stay, but has to be refused all the same
    nodes = [value]
    for node in nodes:  # grows on the way
        kind = type(node)
        if kind is str:
            continue
        if kind is dict:
            nodes += node.values()
        elif kind is list:
            nodes += node
        elif kind is int and not (_INT_MIN <= node <= _INT_MAX and (node or "-0" not in text)):
            return False
    return True


def _integer(text: str) -> int | float:
    if text == "-0":
        return -0.0
    number = int(text)
    if _INT_MIN <= number <= _INT_MAX:
        return number
    try:
        return float(number)
    except OverflowError as error:
        raise ValueError("number out of range") from error


# The slow reader, for texts whose syntax the fast one has accepted.
_READ_EXACT: Callable[[str], Any] = json.JSONDecoder(parse_int=_integer).decode


def _official_floats(text: str) -> str:
    # The first look is much cheaper than the search, and nearly always enough.
    return _STRING_OR_SMALL.sub(_official_float, text) if "e-0" in text else text


def _official_float(match: re.Match[str]) -> str:
    text = match[0]
    if text[0] == '"':
        return text
    mantissa, _, exponent = text.partition("e-0")
    if exponent != "5":
        return f"{mantissa}e-{exponent}"
    sign = "-" if mantissa[0] == "-" else ""
    return f"{sign}0.0000{mantissa.lstrip('-').replace('.', '')}"
