"""A queue of block ids in the order in which they were last used, over arrays.

Contract: ids are pushed at the young end, popped at the old end and may leave anywhere; all three
take many ids at once and cost O(1) per id (amortised). The queue shares the state array of its
pool: for an id in the queue, the state is a mark, -1 - (its place); whoever writes another state
takes the id out, and says so by `left`. The entry stays behind and is skipped: it is valid while
the state of its id is the mark of its own place. Called by `kv/pool` only.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IdArray: TypeAlias = npt.NDArray[np.int64]

_SPARE_ENTRIES = 64


class LruQueue:
    """Ids with a negative state, oldest first."""

    def __init__(self, state: IdArray) -> None:
        """state: int64 [ids], shared with the owner; negative numbers belong to the queue."""
        # Twice the ids: compaction leaves half of it free, so it is paid for by as many pushes.
        capacity = 2 * state.size + _SPARE_ENTRIES
        self._entries = np.zeros(capacity, dtype=np.int64)
        self._marks = -1 - np.arange(capacity, dtype=np.int64)
        self._state = state
        self._head = 0
        self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, ids: IdArray) -> None:
        """Append ids that are not in the queue, oldest first, and mark them."""
        end = self._tail + ids.size
        if end > self._entries.size:
            self._compact()
            end = self._tail + ids.size
        self._entries[self._tail : end] = ids
        self._state[ids] = self._marks[self._tail : end]
        self._tail = end
        self._count += ids.size

    def left(self, count: int) -> None:
        """`count` ids got, or are about to get, another state."""
        self._count -= count

    def pop(self, count: int) -> IdArray:
        """The `count` oldest ids, oldest first; the caller gives them another state.

        The queue must hold as many.
        """
        self._count -= count
        if self._tail - self._head == self._count + count:  # no stale entries
            ids = self._entries[self._head : self._head + count].copy()
            self._head += count
            return ids
        return self._pop_valid(count)

    def ids(self) -> IdArray:
        """All ids, oldest first."""
        entries = self._entries[self._head : self._tail]
        ids: IdArray = entries[self._state[entries] == self._marks[self._head : self._tail]]
        return ids

    def _pop_valid(self, count: int) -> IdArray:
        head, found, width, parts = self._head, 0, max(count, _SPARE_ENTRIES), []
        while found < count:
            end = min(head + width, self._tail)
            entries = self._entries[head:end]
            valid = np.flatnonzero(self._state[entries] == self._marks[head:end])
            if found + valid.size >= count:
                valid = valid[: count - found]
                end = head + int(valid[-1]) + 1
            found += valid.size
            parts.append(entries[valid])
            head = end
            width *= 2  # long stale stretches: few, large steps
        self._head = head
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _compact(self) -> None:
        """Move the valid entries to the front of the buffer."""
        ids = self.ids()
        self._entries[: ids.size] = ids
        self._state[ids] = self._marks[: ids.size]
        self._head, self._tail = 0, ids.size
