"""The type of every whole-number flag: cyclopts' own int would round 1.5 without a word.

Contract: annotate such a flag of a command with `Integer` (or `Integer | None`), never with int.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

_SHOWN_CHARACTERS = 40


def whole_number(_: object, tokens: Sequence[Token]) -> int:
    """Converter of cyclopts: decimal digits with an optional sign. Raises ValueError."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        shown = text[:_SHOWN_CHARACTERS]
        raise ValueError(f"must be a whole number, got {shown!r}") from None


Integer = Annotated[int, Parameter(converter=whole_number)]
