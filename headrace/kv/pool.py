"""Who holds which block and which slot: free stacks and reference counts, without torch.

Contract: a block is *used* (somebody references it), *pinned* (nobody does, but an IO still reads
it) or *free*; free + used + pinned = total. Allocation never raises for lack of space, it returns a
`Shortage` and changes nothing. Misuse (double release, sharing a free block, foreign ids) raises
InternalError before anything changed. Number 0 is reserved for padding rows and never handed out.
Called by `kv/manager`; IO pins through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, InternalError

IdArray = npt.NDArray[np.int64]
Ids = IdArray | Sequence[int]

SLOTS_PER_SEQUENCE = 1.2


@dataclass(frozen=True, slots=True)
class Shortage:
    """Not enough free `resource`: `needed` were asked for at once, `available` are free now."""

    resource: Literal["blocks", "slots"]
    needed: int
    available: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts without the reserved number 0; free + used + pinned = total."""

    total: int
    free: int
    used: int
    pinned: int = 0


class BlockPool:
    """Reference-counted ids 1 .. num_blocks - 1. Every call costs O(1) per id."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` includes the reserved block 0. Raises ConfigError below 2."""
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (block 0 is reserved), got {num_blocks}.",
                param="num_blocks",
            )
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._pins = np.zeros(num_blocks, dtype=np.int32)
        # A stack: blocks that were used last come back first, so memory that was never touched
        # stays untouched. Ascending ids at the start only to make traces readable.
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int64)
        self._free_count = num_blocks - 1
        self._used_count = 0
        self._mark = np.zeros(num_blocks, dtype=np.int64)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self._free_count

    def allocate(self, count: int) -> IdArray | Shortage:
        """`count` free blocks with one reference each, or a Shortage with nothing changed."""
        if count < 0:
            raise InternalError(f"allocate({count}): the count is negative.")
        if count > self._free_count:
            return Shortage("blocks", count, self._free_count)
        rest = self._free_count - count
        ids = self._free[rest : self._free_count][::-1].copy()
        self._free_count = rest
        self._references[ids] = 1
        self._used_count += count
        return ids

    def share(self, ids: Ids) -> None:
        """Add one reference to each block; all must be in use."""
        array = self._checked("share", ids)
        self._require("share", array, self._references[array] > 0, "not in use")
        self._references[array] += 1

    def release(self, ids: Ids) -> None:
        """Drop one reference of each block, given in token order.

        What becomes free is handed out again tail first, so the head, which other requests are
        likelier to have in common, survives longest.
        """
        array = self._checked("release", ids)
        counts = self._references[array] - 1
        self._require("release", array, counts >= 0, "not in use (released twice?)")
        self._references[array] = counts
        idle = array[counts == 0]
        self._used_count -= idle.size
        self._push_free(idle[self._pins[idle] == 0])

    def pin(self, ids: Ids) -> None:
        """Keep blocks from being handed out while an IO is in flight, even once released."""
        array = self._checked("pin", ids)
        alive = (self._references[array] > 0) | (self._pins[array] > 0)
        self._require("pin", array, alive, "free")
        self._pins[array] += 1

    def unpin(self, ids: Ids) -> None:
        """Undo one `pin`; blocks that nobody references become free."""
        array = self._checked("unpin", ids)
        counts = self._pins[array] - 1
        self._require("unpin", array, counts >= 0, "not pinned")
        self._pins[array] = counts
        self._push_free(array[(counts == 0) & (self._references[array] == 0)])

    def references(self, block_id: int) -> int:
        """How many holders a block has."""
        return int(self._references[block_id])

    def stats(self) -> PoolStats:
        """Counts of now, O(1)."""
        total = self.num_blocks - 1
        pinned = total - self._free_count - self._used_count
        return PoolStats(total, self._free_count, self._used_count, pinned)

    def check(self) -> None:
        """Compare counters, stack and counts, O(total); raises InternalError if they differ."""
        idle = (self._references == 0) & (self._pins == 0)
        stack = np.sort(self._free[: self._free_count])
        if not np.array_equal(stack, np.flatnonzero(idle[1:]) + 1):
            raise InternalError("The free stack and the reference counts of blocks disagree.")
        if int((self._references > 0).sum()) != self._used_count:
            raise InternalError("The count of used blocks is wrong.")
        if self._references[0] or self._pins[0] or (self._references < 0).any():
            raise InternalError("Block 0 is held, or a reference count is negative.")

    def _push_free(self, ids: IdArray) -> None:
        self._free[self._free_count : self._free_count + ids.size] = ids
        self._free_count += ids.size

    def _checked(self, operation: str, ids: Ids) -> IdArray:
        """`ids` as an array of distinct ids that this pool may hand out."""
        array = np.asarray(ids, dtype=np.int64)
        inside = (array >= 1) & (array < self.num_blocks)
        self._require(operation, array, inside, f"outside 1..{self.num_blocks - 1}")
        # Each id keeps the index written last: an id that occurs twice disagrees once. Counts
        # below are updated by fancy indexing, which would count such an id only once.
        order = np.arange(array.size)
        self._mark[array] = order
        self._require(operation, array, self._mark[array] == order, "given twice")
        return array

    @staticmethod
    def _require(operation: str, ids: IdArray, good: npt.NDArray[np.bool_], otherwise: str) -> None:
        if not good.all():
            bad = ids[~good][:8].tolist()
            raise InternalError(f"{operation}: blocks {bad} are {otherwise}.")


class SlotPool:
    """Ring and state slots 1 .. num_slots - 1, one holder each."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots` includes the reserved slot 0. Raises ConfigError below 2."""
        if num_slots < 2:
            raise ConfigError(
                f"num_slots must be at least 2 (slot 0 is reserved), got {num_slots}.",
                param="num_slots",
            )
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._used: set[int] = set()

    @property
    def available(self) -> int:
        """Slots that `allocate` could hand out now."""
        return len(self._free)

    def allocate(self) -> int | Shortage:
        """A free slot, or a Shortage. Its content is whatever the last holder left."""
        if not self._free:
            return Shortage("slots", 1, 0)
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Raises InternalError if nobody holds it."""
        if slot not in self._used:
            raise InternalError(f"release: slot {slot} is not in use (released twice?).")
        self._used.remove(slot)
        self._free.append(slot)

    def stats(self) -> PoolStats:
        """Counts of now, O(1)."""
        return PoolStats(self.num_slots - 1, len(self._free), len(self._used))

    def check(self) -> None:
        """Raise InternalError unless every slot but 0 is either free or used, once."""
        if sorted([*self._free, *self._used]) != list(range(1, self.num_slots)):
            raise InternalError("Free and used slots do not add up.")


def slots_for(max_num_seqs: int) -> int:
    """Slots of an engine with `max_num_seqs` running sequences, with slot 0.

    A fifth more than sequences, so that a new one can start while a finished one is still part of
    a step in flight.
    """
    return int(max_num_seqs * SLOTS_PER_SEQUENCE) + 1
