"""Whether a JSON text is valid under a schema: its numbers as written, without the range of floats.

JSON numbers have no range (RFC 8259, 6): 1e871463 is one, and larger than any `minimum`. Read with
`Decimal`, the validator compares them exactly; where they are finite as 64-bit floats too, that
reading, which most programs have, must be valid as well.
"""

from __future__ import annotations

import json
import math
import re
from decimal import MAX_EMAX, Decimal
from typing import Any

_EXPONENT = re.compile(r"[eE]([+-]?)0*(\d+)$")
# `Decimal` takes exponents up to MAX_EMAX, here less the digits that a mantissa may have. What
# stands beyond is as far from every number of a schema, and as whole or as small, as this.
_FAR = MAX_EMAX // 10


def exact_value(text: str | bytes) -> Any:
    """A JSON text as Python reads it, but fractions and exponents as `Decimal`."""
    return json.loads(text, parse_float=_decimal)


def is_valid(validator: Any, text: str | bytes) -> bool:
    """Whether a validator of jsonschema-rs takes the text: exactly, and as floats if they fit."""
    if not validator.is_valid(exact_value(text)):
        return False
    value = json.loads(text)
    return not _is_finite(value) or bool(validator.is_valid(value))


def _decimal(text: str) -> Decimal:
    found = _EXPONENT.search(text)
    if found is not None and (len(found[2]) > 18 or int(found[2]) > _FAR):
        text = f"{text[: found.start()]}e{found[1]}{_FAR}"
    return Decimal(text)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, inner))
