"""Ids whose text can go out at once: their text as it stands inside a JSON string.

Contract: an id maps to its escaped bytes, or to None when the parser has to see it: control tokens,
parts of characters, and texts with a character that may begin a marker. Filled as ids appear and
shared by all streams with the same tokenizer and risks. Used by `lane.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from headrace.recipe.events.event import json_text
from headrace.recipe.json_text import escaped
from headrace.recipe.parser.matcher import Risks
from headrace.recipe.parts import IdText
from headrace.recipe.tokenizer import Tokenizer

# A decoder's sign for an incomplete character: the parser waits when a piece ends with it.
_REPLACEMENT = "\ufffd"
_FREQUENT = 2**14
# Private characters, between texts that are escaped together.
_SEPARATOR = "\ue000\uf8ff\ue000"


class End(NamedTuple):
    """The end of an id's text that may begin a marker: escaped text before it, it escaped, it."""

    before: bytes
    escaped: bytes
    text: str


class PieceTable(dict[int, bytes | None]):
    """id -> escaped text or None.

    ends: those of the ids that may be the last of a piece whose end may begin a marker; None where
    the id alone does not tell. value: the
    texts are parts of a JSON string that is itself sent inside of a JSON string.
    """

    def __init__(self, tokenizer: Tokenizer, risks: Risks, value: bool) -> None:
        super().__init__()
        self._texts = tokenizer.whole_texts
        self._escaped = _escaped_texts(tokenizer, value)
        self._value = value
        self._at_end = tuple(risks.at_end)
        self._lines = any(lines for _, lines in self._at_end)
        # All beginnings of what may begin a marker at the end.
        self._beginnings = tuple(
            {start[:size] for start, _ in self._at_end for size in range(1, len(start) + 1)}
        )
        self._risky_ends = (*self._beginnings, "\n") if self._lines else self._beginnings
        anywhere = re.escape("".join(sorted(risks.anywhere)))
        self._find_anywhere = re.compile(f"[{anywhere}]" if anywhere else "(?!)")
        self.ends: dict[int, End | None] = {}
        if not risks.anywhere:
            # The table of most streams. Frequent tokens have low numbers.
            for token_id in range(_FREQUENT):
                self[token_id]

    def __missing__(self, token_id: int) -> bytes | None:
        value = self._escaped[token_id] if 0 <= token_id < len(self._escaped) else None
        if value is not None:
            # What has an escaped text has a text.
            text: str = self._texts[token_id]  # type: ignore[assignment]
            if self._find_anywhere.search(text) is not None:
                value = None
            elif text.endswith(self._risky_ends) or any(text in start for start, _ in self._at_end):
                self.ends[token_id] = self._end(text)
        self[token_id] = value
        return value

    def _end(self, text: str) -> End | None:
        size = self.risky_end(text)
        # Without any: what began in an earlier id may end with all of this one.
        return (
            End(self.escape(text[:-size]), self.escape(text[-size:]), text[-size:])
            if size > 0
            else None
        )

    def escape(self, text: str) -> bytes:
        """The text as it stands in an event."""
        return json_text(escaped(text) if self._value else text)[1:-1]

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of ids that this table has text of: none of them is None here."""
        return "".join(map(self._texts.__getitem__, token_ids))  # type: ignore[arg-type]

    def part(self, token_ids: Sequence[int]) -> IdText:
        """The same for the complete response."""
        return IdText(token_ids, self._texts, self._value)

    def risky_end(self, text: str) -> int:
        """How many characters at the end may begin a marker; -1 when that is not simple."""
        if text.endswith("\n"):
            if not self._lines:
                return 0
            before = text.rstrip("\n")
            # A newline that breaks a beginning off does not count itself.
            return -1 if before.endswith(self._beginnings) else len(text) - len(before)
        longest = 0
        if text.endswith(self._beginnings):
            for start, lines in self._at_end:
                size = _overlap(text, start)
                if size and lines:
                    before = text[: len(text) - size].rstrip("\n")
                    if before.endswith(self._beginnings) and len(before) + size < len(text):
                        return -1
                    size = len(text) - len(before)
                longest = max(longest, size)
        return longest


def _overlap(text: str, start: str) -> int:
    """Length of the longest beginning of `start` that the text ends with."""
    return next((size for size in range(len(start), 0, -1) if text.endswith(start[:size])), 0)


@lru_cache(maxsize=4)
def _escaped_texts(tokenizer: Tokenizer, value: bool) -> list[bytes | None]:
    """The escaped text of every id that may stand in a table; made at once, which is far faster."""
    texts = [text or "" for text in tokenizer.whole_texts]
    joined = _SEPARATOR.join(texts)
    whole = json_text(escaped(joined) if value else joined)[1:-1]
    result: list[bytes | None] = list(whole.split(_SEPARATOR.encode()))
    if len(result) != len(texts):  # a text has the separator in it
        result = [json_text(escaped(text) if value else text)[1:-1] for text in texts]
    for token_id, text in enumerate(texts):
        if not text or _REPLACEMENT in text:
            result[token_id] = None
    for token_id in tokenizer.added.values():
        result[token_id] = None
    return result


@lru_cache(maxsize=32)
def piece_table(tokenizer: Tokenizer, risks: Risks, value: bool) -> PieceTable:
    """The table of these risks."""
    return PieceTable(tokenizer, risks, value)
