"""Which block holds the rows of which content key: the prefix index of one device.

Contract: a key names the content of one full block and all before it (`core/hashing`), so a key is
bound to at most one block and a block to at most one key; the first one bound wins. The index says
nothing about who uses a block: `kv/pool` does, which forgets a key before it hands the block out
for new content. Changes are numbered without gaps and handed to one listener, the seam for host
tiers, stores and a directory. Called by `kv/pool` and `kv/manager`; imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

import numpy as np

from headrace.errors import InternalError
from headrace.kv.lru import IdArray


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """`keys[i]` is from now on readable in `blocks[i]`. sequence: 1, 2, ... over all events."""

    sequence: int
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """`keys[i]` is no longer readable in `blocks[i]`.

    The rows are still intact while the listener runs: whoever wants them orders its copy here, to
    be done before the next step writes.
    """

    sequence: int
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


PrefixEvent: TypeAlias = BlocksStored | BlocksRemoved
Listener: TypeAlias = Callable[[PrefixEvent], None]


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """bound_blocks: keys known now. The others count since the start, in blocks.

    hits: blocks that admissions reused. misses: blocks that admissions took afresh. stored: keys
    bound. removed: keys forgotten (evicted or given up). duplicates: blocks that were computed
    though another block had the key already.
    """

    bound_blocks: int = 0
    hits: int = 0
    misses: int = 0
    stored: int = 0
    removed: int = 0
    duplicates: int = 0


class PrefixIndex:
    """Two-way map between keys and blocks. Costs a dictionary look-up per key."""

    def __init__(self, num_blocks: int, listener: Listener | None = None) -> None:
        """`num_blocks` includes the reserved block 0, which is never bound."""
        self._block_of: dict[bytes, int] = {}
        self._key_of = np.full(num_blocks, None, dtype=np.object_)
        self._listener = listener
        self._events = 0
        self._hits = self._misses = self._stored = self._removed = self._duplicates = 0

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of

    def match(self, keys: Sequence[bytes]) -> int:
        """Length of the longest chain present: keys[:n] are bound, keys[n] is not."""
        if not keys or keys[0] not in self._block_of:
            return 0
        return sum(1 for _ in takewhile(self._block_of.__contains__, keys))

    def blocks(self, keys: Sequence[bytes]) -> IdArray:
        """Blocks of keys that are all bound, int64 [keys]. Raises InternalError otherwise."""
        try:
            return np.fromiter(map(self._block_of.__getitem__, keys), np.int64, len(keys))
        except KeyError as missing:
            raise InternalError(f"No block is bound to key {missing.args[0].hex()}.") from None

    def bind(self, ids: IdArray, keys: Sequence[bytes]) -> IdArray:
        """Bind `ids[i]`, which has no key, to `keys[i]`; returns the blocks that got theirs.

        A key that another block has already stays there.
        """
        numbers = ids.tolist()
        holders = list(map(self._block_of.setdefault, keys, numbers))
        if holders != numbers:
            won = [i for i, number in enumerate(numbers) if holders[i] == number]
            self._duplicates += len(numbers) - len(won)
            ids, keys = ids[won], [keys[i] for i in won]
        self._key_of[ids] = keys
        self._stored += len(keys)
        if keys and self._listener is not None:
            self._emit(BlocksStored, keys, ids)
        return ids

    def without_key(self, ids: IdArray, keys: Sequence[bytes]) -> tuple[IdArray, list[bytes]]:
        """The pairs whose block has no key yet. Raises InternalError if one has another key."""
        rest = []
        for i, (present, key) in enumerate(zip(self._key_of[ids].tolist(), keys, strict=True)):
            if present is None:
                rest.append(i)
            elif present != key:
                raise InternalError(f"bind: block {ids[i]} is bound to another key.")
        return ids[rest], [keys[i] for i in rest]

    def forget(self, ids: IdArray) -> None:
        """Drop the keys of `ids`, all of which must be bound."""
        keys = self._key_of[ids].tolist()
        self._key_of[ids] = None
        deque(map(self._block_of.__delitem__, keys), maxlen=0)
        self._removed += len(keys)
        if self._listener is not None:
            self._emit(BlocksRemoved, keys, ids)

    def count(self, *, hits: int, misses: int) -> None:
        """Add blocks of an admission to the statistics."""
        self._hits += hits
        self._misses += misses

    def stats(self) -> PrefixStats:
        """Counts of now, O(1)."""
        return PrefixStats(
            bound_blocks=len(self._block_of),
            hits=self._hits,
            misses=self._misses,
            stored=self._stored,
            removed=self._removed,
            duplicates=self._duplicates,
        )

    def check(self, bound: list[int]) -> None:
        """Compare both directions with the blocks that the pool calls bound, O(total).

        Raises InternalError if they differ.
        """
        if [block for block, key in enumerate(self._key_of) if key is not None] != bound:
            raise InternalError("The prefix index has keys of other blocks than are bound.")
        if len(bound) != len(self._block_of) or any(
            self._block_of.get(self._key_of[block]) != block for block in bound
        ):
            raise InternalError("A block is not the one that its key leads to.")

    def _emit(
        self,
        kind: type[BlocksStored] | type[BlocksRemoved],
        keys: Sequence[bytes],
        ids: IdArray,
    ) -> None:
        self._events += 1
        if self._listener is not None:
            self._listener(kind(self._events, tuple(keys), tuple(ids.tolist())))
