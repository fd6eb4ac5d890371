"""Numbers of other libraries -> Python's own.

Contract: `plain` changes only what is a number without being int, float or bool (NumPy scalars);
all else is returned as it is, to be refused by whoever checks it. Used by `core/sampling.py` and
`LLM`, so that neither the wire nor the scheduler ever meets another library's number.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable


def plain(value: object) -> object:
    """`value` as int or float if it is a number."""
    if isinstance(value, (bool, str)) or value is None or type(value) in (int, float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else value
    except OverflowError:
        return value


def is_huge(value: object) -> bool:
    """Whether it is an integer that no float holds; such a number cannot even be printed."""
    return isinstance(value, int) and value.bit_length() > 1023


def shown(value: object) -> str:
    """How an error shows a value that may be anything: at most 80 characters of its `repr`."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def plain_ids(values: object) -> tuple[object, ...] | None:
    """The members of a list, tuple or array, as `plain` gives them; None: it is none of these."""
    if isinstance(values, (str, bytes, bytearray, dict, set, frozenset)):
        return None
    if not isinstance(values, Iterable):
        return None
    try:
        members = tuple(values)
    except TypeError:  # an array without dimensions
        return None
    if all(kind is int for kind in set(map(type, members))):
        return members
    return tuple(map(plain, members))
