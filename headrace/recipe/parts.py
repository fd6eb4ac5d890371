"""Text of an answer that is kept in parts, some of them as ids.

Contract: most text of a stream goes out without ever being a string here, and most streams are
never asked for it again; so it stays ids until `joined` is called. Used by the parsers, by
`lane.py` and by the writers of events.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.recipe.json_text import escaped


class IdText:
    """Text of ids. texts: text of every id by its number. value: it stands inside a JSON string."""

    __slots__ = ("_ids", "_texts", "_value")

    def __init__(self, ids: Sequence[int], texts: Sequence[str | None], value: bool) -> None:
        self._ids = ids
        self._texts = texts
        self._value = value

    def __str__(self) -> str:
        text = "".join(map(self._texts.__getitem__, self._ids))  # type: ignore[arg-type]
        return escaped(text) if self._value else text


Part = str | IdText


def joined(parts: Sequence[Part]) -> str:
    """The whole text."""
    return "".join(map(str, parts))
