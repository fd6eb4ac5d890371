"""Who holds which block: free blocks, cached blocks and reference counts, without torch.

Contract: a block is *used* (somebody references it), *pinned* (nobody does, but an IO still reads
it) or *free*; free + used + pinned = total. A free block whose key is bound is *cached*: it can be
used again by its key until its memory is needed. Blocks without a key are handed out first, then
cached ones, least recently used first. Allocation never raises for lack of space, it returns a
`Shortage` and changes nothing. Misuse (double release, sharing a free block) raises InternalError
before anything changed. Ids of one call are distinct. Number 0 is reserved for padding rows.
Called by `kv/manager`; IO pins through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, InternalError
from headrace.kv.lru import IdArray, LruQueue
from headrace.kv.prefix import Listener, PrefixIndex

Ids: TypeAlias = npt.NDArray[np.integer[Any]] | Sequence[int]

SLOTS_PER_SEQUENCE = 1.2

# One int64 says all about a block, so that a call looks at one array. 0: free, without a key.
# Negative: free and cached, the number is its place in the queue of `kv/lru`. Positive, in use or
# pinned: bit 0 bound to a key, bits 1 to 31 references, bits 32 and up pins.
_BOUND = 1
_REFERENCE = 2
_PIN = 1 << 32
_REFERENCES = _PIN - _REFERENCE
_HELD_ONCE = np.int64(_REFERENCE)
_CACHED_ONCE = np.int64(_REFERENCE | _BOUND)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Not enough free blocks: `needed` were asked for at once, `available` are free now."""

    needed: int
    available: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts without the reserved number 0; free + used + pinned = total; cached <= free."""

    total: int
    free: int
    used: int
    pinned: int = 0
    cached: int = 0


class BlockPool:
    """Reference-counted ids 1 .. num_blocks - 1 over a prefix index. Every call is O(1) per id."""

    def __init__(self, num_blocks: int, listener: Listener | None = None) -> None:
        """`num_blocks` includes the reserved block 0. Raises ConfigError below 2.

        listener: gets every change of the prefix index, see `kv/prefix`.
        """
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (block 0 is reserved), got {num_blocks}.",
                param="num_blocks",
            )
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks, listener)
        self._state = np.zeros(num_blocks, dtype=np.int64)
        # Free blocks without a key are a stack: what was used last comes back first, so memory
        # that was never touched stays untouched. Ascending at the start to make traces readable.
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int64)
        self._free_count = num_blocks - 1
        self._cached = LruQueue(self._state)
        self._pin_count = 0  # blocks with a pin

    # --- content -----------------------------------------------------------------------------

    def bind(self, ids: Ids, keys: Sequence[bytes]) -> None:
        """Say that `ids[i]`, in use or pinned, now holds the whole content of `keys[i]`.

        If another block has the key already, that one keeps it. Raises InternalError for a free
        block and for one that is bound to another key.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size != len(keys):
            raise InternalError(f"bind: {array.size} blocks, {len(keys)} keys.")
        state = self._state[array]
        if np.count_nonzero(state == _HELD_ONCE) == array.size:  # as ever after a step
            self._state[self.index.bind(array, keys)] = _CACHED_ONCE
            return
        if np.count_nonzero(state < _REFERENCE):
            raise _misuse("bind", array, state < _REFERENCE, "free")
        self._state[self.index.bind(*self.index.without_key(array, keys))] |= _BOUND

    def unbind(self, ids: Ids) -> None:
        """Forget the content of blocks (those without a key are left alone)."""
        array = np.asarray(ids, dtype=np.int64)
        state = self._state[array]
        idle, busy = array[state < 0], array[(state > 0) & (state & _BOUND > 0)]
        if idle.size + busy.size:
            self.index.forget(np.concatenate((idle, busy)))
        self._state[busy] -= _BOUND
        self._state[idle] = 0
        self._cached.left(idle.size)
        self._push_free(idle)

    def unbind_cached(self, ids: IdArray) -> None:
        """`unbind` those of `ids` that nobody holds or pins."""
        self.unbind(ids[self._state[ids] < 0])

    def evict(self, count: int) -> int:
        """Forget up to `count` cached blocks, least recently used first; returns how many."""
        ids = self._evict(min(count, len(self._cached)))
        self._state[ids] = 0
        self._push_free(ids)
        return ids.size

    # --- holders -----------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return self._free_count + len(self._cached)

    def cached_among(self, ids: IdArray) -> int:
        """How many of `ids` are cached: sharing those takes from `available`."""
        return int(np.count_nonzero(self._state[ids] < 0))

    def allocate(self, count: int) -> IdArray | Shortage:
        """`count` free blocks with one reference each, or a Shortage with nothing changed."""
        if count > self.available:
            return Shortage(count, self.available)
        return self.take(count)

    def take(self, count: int) -> IdArray:
        """`allocate` for who knows that they are there. Raises InternalError if not."""
        if not 0 <= count <= self.available:
            raise InternalError(f"{count} blocks wanted, {self.available} are available.")
        rest = self._free_count - count
        if rest >= 0:
            ids = self._free[rest : self._free_count][::-1].copy()
            self._free_count = rest
        else:
            ids = np.concatenate((self._free[: self._free_count][::-1], self._evict(-rest)))
            self._free_count = 0
        self._state[ids] = _REFERENCE
        return ids

    def share(self, ids: Ids) -> None:
        """Add one reference to each block; all must be in use or bound to a key."""
        array = np.asarray(ids, dtype=np.int64)
        state = self._state[array]
        cached = int(np.count_nonzero(state < 0))
        if cached == array.size:
            self._cached.left(cached)
            self._state[array] = _CACHED_ONCE
            return
        unknown = (state & (_BOUND | _REFERENCES) == 0) & (state >= 0)
        if np.count_nonzero(unknown):
            raise _misuse("share", array, unknown, "not in use")
        self._cached.left(cached)
        self._state[array] = np.where(state < 0, _BOUND, state) + _REFERENCE

    def release(self, ids: Ids) -> None:
        """Drop one reference of each block, given in token order.

        Blocks with a key stay cached. Of one release the tail is handed out again before the head,
        which other requests are likelier to have in common.
        """
        array = np.asarray(ids, dtype=np.int64)
        state = self._state[array]
        # The common case: every block is full and unshared, the tail perhaps unfinished.
        full = array.size - int(array.size > 0 and state[-1] == _HELD_ONCE)
        if np.count_nonzero(state == _CACHED_ONCE) == full:
            self._cached.push(array[:full][::-1])
            if full < array.size:
                self._state[array[full]] = 0
                self._push_free(array[full:])
            return
        wrong = (state < 0) | (state & _REFERENCES == 0)
        if np.count_nonzero(wrong):
            raise _misuse("release", array, wrong, "not in use (released twice?)")
        state -= _REFERENCE
        self._state[array] = state
        self._queue(array, state)

    def pin(self, ids: Ids) -> None:
        """Keep blocks from being handed out while an IO is in flight, even once released."""
        array = np.asarray(ids, dtype=np.int64)
        state = self._state[array]
        if np.count_nonzero(state == 0):
            raise _misuse("pin", array, state == 0, "free")
        self._cached.left(int(np.count_nonzero(state < 0)))
        self._pin_count += int(np.count_nonzero(state < _PIN))
        self._state[array] = np.where(state < 0, _BOUND, state) + _PIN

    def unpin(self, ids: Ids) -> None:
        """Undo one `pin`; blocks that nobody references become free, or cached."""
        array = np.asarray(ids, dtype=np.int64)
        state = self._state[array] - _PIN
        if np.count_nonzero(state < 0):
            raise _misuse("unpin", array, state < 0, "not pinned")
        self._pin_count -= int(np.count_nonzero(state < _PIN))
        self._state[array] = state
        self._queue(array, state)

    def references(self, block_id: int) -> int:
        """How many holders a block has."""
        return (max(0, int(self._state[block_id])) & _REFERENCES) // _REFERENCE

    # --- accounting --------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Counts of now, O(1) unless blocks are pinned."""
        total, free = self.num_blocks - 1, self.available
        pinned = 0
        if self._pin_count:
            pinned = int(np.count_nonzero(self._state[self._state >= _PIN] & _REFERENCES == 0))
        return PoolStats(total, free, total - free - pinned, pinned, len(self._cached))

    def check(self) -> None:
        """Compare queues, index and states, O(total); raises InternalError if they differ."""
        state = self._state
        if state[0] or (state == _BOUND).any():
            raise InternalError("Block 0 is held, or a cached block is not in the queue.")
        free = np.flatnonzero(state == 0)[1:]
        if not np.array_equal(np.sort(self._free[: self._free_count]), free):
            raise InternalError("The free stack and the states of blocks disagree.")
        queued = np.sort(self._cached.ids())
        if not np.array_equal(queued, np.flatnonzero(state < 0)) or queued.size != len(
            self._cached
        ):
            raise InternalError("The queue of cached blocks and their states disagree.")
        if int(np.count_nonzero(state >= _PIN)) != self._pin_count:
            raise InternalError("The count of pinned blocks is wrong.")
        self.index.check(np.flatnonzero((state < 0) | (state & _BOUND > 0)).tolist())

    # --- inside ------------------------------------------------------------------------------

    def _evict(self, count: int) -> IdArray:
        ids = self._cached.pop(count)
        if ids.size:
            self.index.forget(ids)
        return ids

    def _queue(self, ids: IdArray, state: IdArray) -> None:
        """Queue those of `ids`, in token order, that nobody references or pins any longer."""
        cached = ids[state == _BOUND]
        self._cached.push(cached[::-1])
        if cached.size < ids.size:
            self._push_free(ids[state == 0])

    def _push_free(self, ids: IdArray) -> None:
        self._free[self._free_count : self._free_count + ids.size] = ids
        self._free_count += ids.size


def _misuse(
    operation: str, ids: IdArray, wrong: npt.NDArray[np.bool_], otherwise: str
) -> InternalError:
    return InternalError(f"{operation}: blocks {ids[wrong][:8].tolist()} are {otherwise}.")


def slots_for(max_num_seqs: int) -> int:
    """Rows (ring and state slots) of an engine with `max_num_seqs` running requests, with row 0.

    A fifth more than requests, so that a new one can start while a finished one is still part of a
    step in flight.
    """
    return int(max_num_seqs * SLOTS_PER_SEQUENCE) + 1
