"""Ids of tool calls: `call_{index}_` + optional `ET_` + 20 random characters + 4 check digits.

Contract: the form is the official one, because clients send the ids back: `ET_` says that the model
called without having reasoned, which the conversion of a later turn reads. The check digits are
XXH3-64 of what precedes them, without underscores, modulo 10000. Used by the writers of events.
"""

from __future__ import annotations

import os
import string

import xxhash

_ALPHABET = (string.ascii_letters + string.digits).encode()
# A character for every byte.
_CHARACTERS = (_ALPHABET * 5)[:256]


def new_call_id(index: int, *, empty_thinking: bool) -> str:
    """A fresh id of the call with this index in its answer."""
    marker = "ET_" if empty_thinking else ""
    # From the system: ids must not repeat in forked or seeded processes.
    characters = os.urandom(20).translate(_CHARACTERS).decode()
    head = f"call_{index:02}_{marker}{characters}"
    return f"{head}{check_number(head):04}"


def check_number(head: str) -> int:
    """The check number of an id, given all of it but the last four digits."""
    return xxhash.xxh3_64_intdigest(head.replace("_", "").encode()) % 10_000
