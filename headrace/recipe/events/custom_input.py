"""The raw input of custom tools, read from the arguments of their calls while these are streamed.

Contract: the arguments `{"input": "..."}` give the text they carry, piece by piece; arguments of
any other form pass unchanged. Used by the writers of Chat Completions and Responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_WHITESPACE = " \t\n\f\r"
_PREFIX = '{"input":"'
_SPACE_BEFORE = frozenset((0, 1, 8, 9))  # places of _PREFIX that whitespace may precede
_PLAIN = re.compile(r'[^"\\]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_SIMPLE = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}


class CustomInput:
    """Reads the arguments of one call; invalid escapes are kept as they are written."""

    __slots__ = ("_at", "_held", "_read")

    def __init__(self) -> None:
        self._held: list[str] = []
        self._at = 0
        self._read: Callable[[str], str] = self._prefix

    def feed(self, text: str) -> str:
        """What these arguments add to the input."""
        return self._read(text)

    def finish(self) -> str:
        """What was held back: an unfinished prefix or escape."""
        rest = "".join(self._held)
        self._held.clear()
        return rest

    def _prefix(self, text: str) -> str:
        place, at = 0, self._at
        while place < len(text):
            character = text[place]
            if character == _PREFIX[at]:
                at += 1
                place += 1
                if at == len(_PREFIX):
                    self._held.clear()
                    self._read = self._string
                    return self._string(text[place:])
            elif at in _SPACE_BEFORE and character in _WHITESPACE:
                place = len(text) - len(text[place:].lstrip(_WHITESPACE))
            else:
                self._read = _unchanged
                return self.finish() + text
        self._at = at
        self._held.append(text)
        return ""

    def _string(self, text: str) -> str:
        if self._held:
            text = self._held.pop() + text
        parts: list[str] = []
        place, end = 0, len(text)
        while place < end:
            # The pattern matches the empty text too: there always is a match.
            stop = _PLAIN.match(text, place).end()  # type: ignore[union-attr]
            parts.append(text[place:stop])
            if stop == end:
                break
            if text[stop] == '"':
                self._read = _nothing
                break
            place, piece = _escape(text, stop)
            if place < 0:
                self._held.append(text[stop:])
                break
            parts.append(piece)
        return "".join(parts)


def _unchanged(text: str) -> str:
    return text


def _nothing(_: str) -> str:
    return ""


def _escape(text: str, start: int) -> tuple[int, str]:
    """(end, what it stands for) of the escape at `start`; (-1, "") when it is incomplete."""
    if start + 1 >= len(text):
        return -1, ""
    kind = text[start + 1]
    if kind in _SIMPLE:
        return start + 2, _SIMPLE[kind]
    if kind != "u":
        return start + 2, text[start : start + 2]
    end, code = _code_unit(text, start + 2)
    if code < 0:
        return (-1, "") if end < 0 else (end, text[start:end])
    if not 0xD800 <= code < 0xE000:
        return end, chr(code)
    if code >= 0xDC00:
        return end, text[start:end]
    for expected in "\\u":
        if end >= len(text):
            return -1, ""
        end += 1
        if text[end - 1] != expected:
            return end, text[start:end]
    end, low = _code_unit(text, end)
    if end < 0:
        return -1, ""
    if not 0xDC00 <= low < 0xE000:
        return end, text[start:end]
    return end, chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00)


def _code_unit(text: str, start: int) -> tuple[int, int]:
    """(end, value) of four hex digits; value -1: not hex up to `end`; end -1: incomplete."""
    for place in range(start, start + 4):
        if place >= len(text):
            return -1, -1
        if text[place] not in _HEX:
            return place + 1, -1
    return start + 4, int(text[start : start + 4], 16)
