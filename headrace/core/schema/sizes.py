"""Keywords of one schema node that limit values: read, compared with each other, contradictions.

Contract: each `check_*` takes a node in the making and its path, changes it to what the grammar
engine enforces exactly, and raises InvalidRequest naming the keyword that contradicts another or
cannot be enforced. Called by `schema.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from math import ceil, floor, inf
from typing import Any, NoReturn

from headrace.core.schema.tables import IN_PLACE
from headrace.errors import InvalidRequest

# Bounds are compared as 64-bit floats, and written out digit by digit.
MAX_BOUND = 2**53
MIN_BOUND = 1e-15
MAX_DECIMALS = 22  # behind the point; the powers of ten up to here are floats
FLOAT_DIGITS = 15  # digits of a decimal that a 64-bit float always keeps
MAX_COUNT = 100_000
# An automaton counts remainders, so that its size is the number of them; measured: 1 to 3 ms.
MAX_REMAINDERS = 1_000
_MULTIPLE_EXPONENTS = range(-9, 10)


def _fail(path: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{path}: {problem}.", param=path)


def number_of(value: Any, path: str) -> int | float:
    """A bound, or a multiple."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail(path, "must be a number")
    if path.endswith(".multipleOf"):
        if value <= 0:
            _fail(path, "must be greater than 0")
        if remainders(value) is None:
            _fail(
                path,
                "is not supported: without trailing zeros it may be at most "
                f"{MAX_REMAINDERS}, with at most 9 digits before or after the point",
            )
    elif abs(value) > MAX_BOUND or 0 < abs(value) < MIN_BOUND:
        _fail(path, f"must be 0 or between {MIN_BOUND} and 2^53 in magnitude to be exact")
    return value


def remainders(value: int | float) -> int | None:
    """How many remainders a multiple has once zeros at the end are dropped; None: too many."""
    number = Decimal(repr(value)).normalize()
    digits = int("".join(map(str, number.as_tuple().digits)))
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int) or exponent not in _MULTIPLE_EXPONENTS or value > 1e9:
        return None
    return digits if digits <= MAX_REMAINDERS else None


def count_of(value: Any, path: str) -> int:
    """A length or a number of entries."""
    whole = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (isinstance(value, int) or whole) or value < 0:
        _fail(path, "must be an integer of at least 0")
    if value > MAX_COUNT:
        _fail(path, f"must be at most {MAX_COUNT}")
    return int(value)


# --- values --------------------------------------------------------------------------------------


def types_of(node: dict[str, Any]) -> frozenset[str]:
    """The types that a node allows; `integer` stands for numbers without a fraction."""
    given = node.get("type")
    if given is None:
        return ALL_TYPES
    names = frozenset([given] if isinstance(given, str) else given)
    return names | {"integer"} if "number" in names else names


ALL_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))


def type_of(value: Any) -> str:
    """The type of a JSON value, `integer` for numbers without a fraction."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case dict():
            return "object"
        case list():
            return "array"
        case float() if not value.is_integer():
            return "number"
    return "integer"


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 is 1.0 and not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check_value(value: Any, path: str) -> None:
    """Numbers of a listed value are written so that every program reads them as themselves."""
    match value:
        case bool() | str() | None:
            return
        case dict():
            for entry in value.values():
                check_value(entry, path)
        case list():
            for entry in value:
                check_value(entry, path)
        case _ if abs(value) > MAX_BOUND or not _is_plain(value):
            _fail(
                path,
                f"only numbers up to 2^53 with at most {FLOAT_DIGITS} digits are supported: not "
                "every program reads others alike",
            )


def _is_plain(value: int | float) -> bool:
    """Whether all readers of JSON make the same float of it; some drop a bit of longer ones."""
    if isinstance(value, int):
        return True
    digits = Decimal(repr(value)).normalize().as_tuple()
    return len(digits.digits) <= FLOAT_DIGITS and int(digits.exponent) >= -MAX_DECIMALS


def check_enum(node: dict[str, Any], path: str) -> None:
    """`enum` and `const` leave something of each other and of `type`."""
    types = types_of(node)
    if "enum" in node:
        if not any(type_of(value) in types for value in node["enum"]):
            _fail(f"{path}.enum", "none of the values has the type that is asked for")
        if "const" in node and not any(same(node["const"], value) for value in node["enum"]):
            _fail(f"{path}.const", "is none of the values of `enum`")
    if "const" in node and type_of(node["const"]) not in types:
        _fail(f"{path}.const", "does not have the type that is asked for")


def check_numbers(node: dict[str, Any], path: str) -> None:
    """Some number lies between the bounds; they become bounds that 64-bit floats keep."""
    low, above = _strictest(node, "minimum", "exclusiveMinimum", max)
    high, below = _strictest(node, "maximum", "exclusiveMaximum", min)
    name = next((n for n in ("minimum", "exclusiveMinimum") if n in node), "minimum")
    if low is not None and high is not None and (low > high or (low == high and (above or below))):
        _fail(f"{path}.{name}", "no number is within the bounds")
    unit = Fraction(repr(node["multipleOf"])) if "multipleOf" in node else None
    types = types_of(node)
    whole = "integer" in types and "number" not in types
    if whole:
        unit = Fraction(1) if unit is None else _common_multiple(unit, Fraction(1))
    if unit is not None and low is not None and high is not None:
        first, last = ceil(low / unit), floor(high / unit)
        first += above and first * unit == low
        last -= below and last * unit == high
        if first > last and types & {"number", "integer"} == types:
            _fail(f"{path}.{name}", "no number within the bounds is allowed")
    _shorten_bounds(node)
    if whole and unit == 1:
        node.pop("multipleOf", None)  # such as 0.5: it says nothing
    if unit is not None and "multipleOf" in node:
        _limit_multiples(node, unit)
    if node.get("minimum", -inf) > node.get("maximum", inf):
        _fail(f"{path}.{name}", "the bounds are too close to each other, or too large, for floats")


def _shorten_bounds(node: dict[str, Any]) -> None:
    """Bounds that are excluded themselves, or have many digits -> the next ones that are not.

    Who reads 2.00000000000000000001 as a 64-bit float has a 2, which may be excluded. A bound that
    is allowed itself has no such neighbours.
    """
    for strict, closed, up in _EXCLUSIVE:
        bounds = [_shortened(node[closed], up=up)] if closed in node else []
        if strict in node:
            bounds.append(_beside(node.pop(strict), up=up))
        if bounds:
            node[closed] = max(bounds) if up else min(bounds)


_EXCLUSIVE = (("exclusiveMinimum", "minimum", True), ("exclusiveMaximum", "maximum", False))


def _beside(bound: int | float, *, up: bool) -> int | float:
    """The next number with 15 digits, which floats and the grammar library keep apart from it."""
    if abs(bound) >= 10**FLOAT_DIGITS // 10:
        return floor(bound) + 1 if up else ceil(bound) - 1
    step = _unit(bound) if bound else Decimal(10) ** -FLOAT_DIGITS
    near = Decimal(repr(bound)).quantize(step, ROUND_FLOOR if up else ROUND_CEILING)
    return float(near + step if up else near - step)


def _shortened(bound: int | float, *, up: bool) -> int | float:
    """The bound, or the next number with so many digits as all readers of JSON read alike."""
    if bound == floor(bound):
        return int(bound)
    if _is_plain(bound):
        return bound
    return float(Decimal(repr(bound)).quantize(_unit(bound), ROUND_CEILING if up else ROUND_FLOOR))


def _unit(bound: int | float) -> Decimal:
    """The last of the digits of a bound that count."""
    exponent = Decimal(repr(bound)).adjusted() + 1 - FLOAT_DIGITS
    return Decimal(10) ** min(0, max(exponent, -MAX_DECIMALS))


def _limit_multiples(node: dict[str, Any], unit: Fraction) -> None:
    """Multiples have at most 15 digits, or a float of them is not a multiple any more."""
    decimals = 0
    while (unit * 10**decimals).denominator > 1:
        decimals += 1
    most = 10 ** (FLOAT_DIGITS - decimals) if decimals else MAX_BOUND
    node["minimum"] = max(node.get("minimum", -most), -most)
    node["maximum"] = min(node.get("maximum", most), most)


def _common_multiple(a: Fraction, b: Fraction) -> Fraction:
    quotient = a / b
    return a * quotient.denominator


def common_multiple(values: Iterable[int | float]) -> Fraction:
    """The smallest number that is a multiple of all."""
    result = Fraction(0)
    for value in values:
        unit = Fraction(repr(value))
        result = _common_multiple(result, unit) if result else unit
    return result


def _strictest(
    node: dict[str, Any], closed: str, strict: str, choose: Any
) -> tuple[Fraction | None, bool]:
    """A bound, and whether it is excluded itself."""
    bounds = [(Fraction(node[n]), n == strict) for n in (closed, strict) if n in node]
    if not bounds:
        return None, False
    value = choose(bound for bound, _ in bounds)
    return value, any(excluded for bound, excluded in bounds if bound == value)


def _check_order(node: dict[str, Any], path: str, low: str, high: str) -> None:
    if low in node and high in node and node[low] > node[high]:
        _fail(f"{path}.{low}", f"is greater than `{high}`")


# What a format says beside `pattern` and `maxLength`, until the node is complete.
FORMAT_PATTERN, FORMAT_LENGTH = "format pattern", "format length"


def check_strings(node: dict[str, Any], path: str) -> None:
    """Lengths; a second expression becomes a condition."""
    if FORMAT_LENGTH in node:
        # One limit of the length: the library can combine a pattern with one, hardly with two.
        most = node.pop(FORMAT_LENGTH)
        node["maxLength"] = min(most, node.get("maxLength", most))
    _check_order(node, path, "minLength", "maxLength")
    if FORMAT_PATTERN in node:
        node["allOf"] = [*node.get("allOf", ()), {"pattern": node.pop(FORMAT_PATTERN)}]


def check_arrays(node: dict[str, Any], path: str) -> None:
    """As many items as are needed may exist."""
    _check_order(node, path, "minItems", "maxItems")
    least = node.get("minItems", 0)
    prefix = node.get("prefixItems", [])
    most = prefix.index(False) if False in prefix else None
    if most is None and node.get("items") is False:
        most = len(prefix)
    if most is not None and least > most and types_of(node) == {"array"}:
        _fail(f"{path}.minItems", f"is greater than the {most} items that are allowed")


# --- objects -------------------------------------------------------------------------------------


def check_objects(node: dict[str, Any], path: str) -> None:
    """Required properties may exist; numbers of properties are enforceable."""
    _check_order(node, path, "minProperties", "maxProperties")
    properties, required = node.get("properties", {}), node.get("required", [])
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if types_of(node) == {"object"}:
        for name in required:
            if properties.get(name, not closed) is False:
                _fail(f"{path}.required", f"the property {name!r} is required and not allowed")
    if "minProperties" in node or "maxProperties" in node:
        _check_property_counts(node, path, closed)


def _check_property_counts(node: dict[str, Any], path: str, closed: bool) -> None:
    """Drop counts that always hold; refuse what is not enforceable.

    Names of additional properties may repeat in a text, so that a grammar can demand one of them
    but not several different ones.
    """
    properties, required = node.get("properties", {}), node.get("required", [])
    least, most = node.get("minProperties", 0), node.get("maxProperties")
    combined = any(keyword in node for keyword in ("$ref", *IN_PLACE))
    if most is not None and most < len(required):
        _fail(f"{path}.maxProperties", f"{len(required)} properties are required")
    if closed and least > len(properties):
        _fail(f"{path}.minProperties", f"only {len(properties)} properties are allowed")
    if least <= len(required):
        node.pop("minProperties", None)
    if closed and most is not None and most >= len(properties):
        del node["maxProperties"]
    complete = set(properties) <= set(required) and not combined
    simple = complete or (closed and not combined)
    if "minProperties" in node and not (simple and least == len(required) + 1):
        _fail(
            f"{path}.minProperties",
            "is not supported here: at most one more than the required properties can be enforced, "
            "and beside optional properties only with additionalProperties = false",
        )
    one_of_all = simple and most == 1 and not required
    if "maxProperties" in node and not (complete or one_of_all):
        _fail(
            f"{path}.maxProperties",
            "is not supported beside optional properties",
        )
