"""Bounded memory of encoded text regions, so that a re-sent conversation costs only its new part.

Contract: control tokens are hard borders, so the ids of a region depend on its text alone and may
be kept by text. Never holds more than its byte bound; what was not used lately goes first.
Thread-safe: readers take no lock, unless they find what is still packed. Used by
`recipe/tokenizer.py`.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Sequence

Ids = Sequence[int]

# A dict entry, its hash and the key's place in the table.
_ENTRY_BYTES = 100


class _Generation:
    """Regions that were used lately, those used once still packed, and the bytes of all."""

    __slots__ = ("bytes", "ids", "packed")

    def __init__(self) -> None:
        self.ids: dict[str, tuple[int, ...]] = {}
        self.packed: dict[str, array[int]] = {}
        self.bytes = 0


class SegmentCache:
    """Least-recently-used by generations: the young one is filled, then becomes the old one.

    An entry that is found in the old generation moves to the young one; when the young one is full,
    the old one is dropped whole. So a hit costs one look-up and no bookkeeping. Most regions are
    never seen again: ids are added packed, and become a tuple when they are found first.
    max_bytes: of texts and ids together; 0 keeps nothing. numbers: the integers by value, so that
    ids of all regions share their objects; empty where there are too many.
    """

    __slots__ = ("_lock", "_numbers", "_old", "_young", "max_bytes")

    def __init__(self, max_bytes: int, numbers: Sequence[int] = ()) -> None:
        self.max_bytes = max_bytes
        self._numbers = numbers
        self._lock = threading.Lock()
        self._young = _Generation()
        self._old = _Generation()

    def __len__(self) -> int:
        young, old = self._young, self._old
        return len(young.ids.keys() | young.packed.keys() | old.ids.keys() | old.packed.keys())

    @property
    def size_bytes(self) -> int:
        """Bytes held now, at most `max_bytes`."""
        return self._young.bytes + self._old.bytes

    def find(self, texts: Sequence[str]) -> list[Ids | None]:
        """The ids of each text, None where it is not known."""
        found: list[Ids | None] = list(map(self._young.ids.get, texts))
        if None in found:
            places = [place for place, ids in enumerate(found) if ids is None]
            with self._lock:
                for place in places:
                    found[place] = self._find_rest(texts[place])
        return found

    def add(self, entries: Sequence[tuple[str, array[int]]]) -> None:
        """Keep these; one that is larger than half the bound is not kept."""
        with self._lock:
            for text, packed in entries:
                if text not in self._young.ids and text not in self._young.packed:
                    generation = self._room(_size(text, packed))
                    if generation is not None:
                        generation.packed[text] = packed

    def _find_rest(self, text: str) -> tuple[int, ...] | None:
        young, old = self._young, self._old
        ids = young.ids.get(text)
        if ids is not None:
            return ids
        packed = young.packed.pop(text, None)
        if packed is not None:
            young.bytes -= _size(text, packed)
        else:
            ids, packed = old.ids.get(text), old.packed.get(text)
        if ids is None:
            if packed is None:
                return None
            numbers = self._numbers
            ids = tuple(map(numbers.__getitem__, packed)) if numbers else tuple(packed)
        generation = self._room(_size(text, ids))
        if generation is not None:
            generation.ids[text] = ids
        return ids

    def _room(self, size: int) -> _Generation | None:
        """The generation that takes something of this size, which is counted already."""
        half = self.max_bytes // 2
        if size > half:
            return None
        if self._young.bytes + size > half:
            self._old, self._young = self._young, _Generation()
        self._young.bytes += size
        return self._young


def _size(text: str, ids: object) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_BYTES
