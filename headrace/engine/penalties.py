"""Token counts of one row, for repetition, presence and frequency penalties.

Contract: sparse (only ids that occurred), incremental, and rebuildable from the known tokens at any
time. No torch. Kept by `engine/sampling_state.py`, applied by `engine/edits.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class TokenCounts:
    """Ids that occurred in a sequence and how often each occurs in its output.

    Ids of the prompt are only kept with `with_prompt` (the repetition penalty needs them); their
    count is 0 until they are drawn.
    """

    __slots__ = ("_counts", "_ids", "_place", "_size")

    def __init__(self, prompt: NDArray[Any], output: NDArray[Any], *, with_prompt: bool) -> None:
        """prompt, output: integer ids of any width."""
        known = np.concatenate((prompt, output)) if with_prompt else output
        ids = np.unique(known).astype(np.int64)
        counts = np.zeros(len(ids), dtype=np.int64)
        drawn, often = np.unique(output, return_counts=True)
        counts[np.searchsorted(ids, drawn)] = often
        self._ids = ids
        self._counts = counts
        self._size = len(ids)
        self._place: dict[int, int] = {token: place for place, token in enumerate(ids.tolist())}

    @property
    def ids(self) -> Ids:
        """Distinct ids, int64 [n]."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ids:
        """How often each id occurs in the output, int64 [n]."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count a drawn token."""
        place = self._place.get(token)
        if place is None:
            place = self._size
            if place == len(self._ids):
                # Doubling keeps the cost per token constant.
                room = np.zeros(len(self._ids) + 16, dtype=np.int64)
                self._ids = np.concatenate((self._ids, room))
                self._counts = np.concatenate((self._counts, room))
            self._place[token] = place
            self._ids[place] = token
            self._counts[place] = 0
            self._size += 1
        self._counts[place] += 1

    def with_drafts(self, drafts: Ids) -> tuple[Ids, Ids]:
        """(ids, counts) as they were after drawing `drafts`, int64 [k]; these counts stay."""
        counts = self.counts.copy()
        new: dict[int, int] = {}
        for token in drafts.tolist():
            place = self._place.get(token)
            if place is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[place] += 1
        if not new:
            return self.ids, counts
        return (
            np.concatenate((self.ids, np.fromiter(new, np.int64, len(new)))),
            np.concatenate((counts, np.fromiter(new.values(), np.int64, len(new)))),
        )

    def copy(self) -> TokenCounts:
        """Independent counts with the same content."""
        twin = TokenCounts.__new__(TokenCounts)
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        twin._size, twin._place = self._size, dict(self._place)
        return twin
