"""Which cache memory each request holds: one slot and one block table, without torch.

Contract: every call is all or nothing. A call that finds too little memory returns a `Shortage` and
leaves everything as it was; a call that contradicts the state (unknown key, growth of a stranger)
raises InternalError. A block that several requests hold is complete and never written again: a
fork gets a copy of the parent's unfinished block. Called by the scheduler; the copies it orders are
done by `KVCache.copy_blocks` / `copy_slots` before the next step writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from headrace.errors import InternalError
from headrace.kv.layout import BLOCK_TOKENS
from headrace.kv.pool import BlockPool, IdArray, PoolStats, Shortage, SlotPool

_FIRST_TABLE_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted request got: its slot; its blocks are in `block_table(key)`."""

    slot: int


@dataclass(frozen=True, slots=True)
class Fork:
    """What a forked request got, and the (source, target) copies due before the next write."""

    slot: int
    block_copies: tuple[tuple[int, int], ...]
    slot_copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class KVStats:
    """Requests that hold memory, and the two pools."""

    requests: int
    blocks: PoolStats
    slots: PoolStats


@dataclass(slots=True)
class _Holding:
    """Memory of one request: `table[:blocks]` covers `tokens` tokens."""

    slot: int
    tokens: int
    blocks: int
    table: IdArray

    def append(self, ids: IdArray) -> None:
        """Add blocks at the tail; the array doubles when it is full."""
        total = self.blocks + ids.size
        if total > self.table.size:
            grown = np.zeros(max(total, 2 * self.table.size), dtype=np.int64)
            grown[: self.blocks] = self.table[: self.blocks]
            self.table = grown
        self.table[self.blocks : total] = ids
        self.blocks = total


class KVManager:
    """Block tables and slots of all running requests over one BlockPool and one SlotPool."""

    def __init__(self, pool: BlockPool, slots: SlotPool, block_tokens: int = BLOCK_TOKENS) -> None:
        """The pools may have other users; this object accounts for what it took itself."""
        self._pool = pool
        self._slots = slots
        self._block_tokens = block_tokens
        self._holdings: dict[Hashable, _Holding] = {}

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens: the ceiling of tokens / block_tokens."""
        return -(-tokens // self._block_tokens)

    def admit(self, key: Hashable, tokens: int) -> Admission | Shortage:
        """Take a slot and the blocks of the first `tokens` tokens for a new request."""
        self._require_new(key)
        slot = self._slots.allocate()
        if isinstance(slot, Shortage):
            return slot
        ids = self._pool.allocate(self.blocks_for(tokens))
        if isinstance(ids, Shortage):
            self._slots.release(slot)
            return ids
        self._hold(key, slot, tokens, ids)
        return Admission(slot)

    def grow(self, key: Hashable, to_tokens: int) -> Shortage | None:
        """Make a request's table cover `to_tokens` tokens; None is success.

        Nothing changes where it covers as many already. Arrays from `block_table` stay valid but
        are not extended: fetch the table again.
        """
        holding = self._holding(key)
        if to_tokens <= holding.tokens:
            return None
        missing = self.blocks_for(to_tokens) - holding.blocks
        if missing:
            ids = self._pool.allocate(missing)
            if isinstance(ids, Shortage):
                return ids
            holding.append(ids)
        holding.tokens = to_tokens
        return None

    def rollback(self, key: Hashable, to_tokens: int) -> None:
        """Forget tokens at and after `to_tokens`; blocks wholly behind it are released.

        Rows need no clearing: compressed entries >= to_tokens // ratio are invisible and ring and
        state rows are overwritten. Raises InternalError if the cut lies ahead of the request, or
        inside a block that others hold too, for the next write would change what they read.
        """
        holding = self._holding(key)
        if not 0 <= to_tokens <= holding.tokens:
            raise InternalError(
                f"rollback of {key!r} to {to_tokens} tokens, it holds {holding.tokens}."
            )
        keep = self.blocks_for(to_tokens)
        if (
            to_tokens < holding.tokens
            and to_tokens % self._block_tokens
            and self._pool.references(int(holding.table[keep - 1])) > 1
        ):
            raise InternalError(f"rollback of {key!r} to {to_tokens} cuts a shared block.")
        self._pool.release(holding.table[keep : holding.blocks])
        holding.blocks = keep
        holding.tokens = to_tokens

    def fork(self, parent: Hashable, child: Hashable, at_tokens: int) -> Fork | Shortage:
        """Start `child` with the first `at_tokens` tokens of `parent`.

        Complete blocks are shared, an unfinished one is copied, and so is the slot. The slot holds
        windows of the parent's present, so `at_tokens` may lie at most `backtrack` tokens behind
        what the parent has computed. Raises InternalError if it lies ahead of the parent.
        """
        source = self._holding(parent)
        self._require_new(child)
        if not 0 <= at_tokens <= source.tokens:
            raise InternalError(
                f"fork of {parent!r} at {at_tokens} tokens, it holds {source.tokens}."
            )
        slot = self._slots.allocate()
        if isinstance(slot, Shortage):
            return slot
        complete, rest = divmod(at_tokens, self._block_tokens)
        tail = self._pool.allocate(1 if rest else 0)
        if isinstance(tail, Shortage):
            self._slots.release(slot)
            return tail
        shared = source.table[:complete]
        self._pool.share(shared)
        self._hold(child, slot, at_tokens, np.concatenate((shared, tail)))
        copies = ((int(source.table[complete]), int(tail[0])),) if rest else ()
        return Fork(slot, copies, ((source.slot, slot),))

    def release(self, key: Hashable) -> None:
        """Give back everything a request holds."""
        holding = self._holding(key)
        del self._holdings[key]
        self._pool.release(holding.table[: holding.blocks])
        self._slots.release(holding.slot)

    def block_table(self, key: Hashable) -> IdArray:
        """Block ids of a request in token order, int64 [blocks]; do not write to it.

        A view: after the next call that changes this request, fetch it again.
        """
        holding = self._holding(key)
        return holding.table[: holding.blocks]

    def slot(self, key: Hashable) -> int:
        """Ring and state slot of a request."""
        return self._holding(key).slot

    def tokens(self, key: Hashable) -> int:
        """Tokens that a request's table covers."""
        return self._holding(key).tokens

    def __contains__(self, key: Hashable) -> bool:
        """Whether a request holds memory."""
        return key in self._holdings

    def stats(self) -> KVStats:
        """Counts of now, O(1)."""
        return KVStats(len(self._holdings), self._pool.stats(), self._slots.stats())

    def check(self) -> None:
        """Verify every invariant of this object and its pools, O(total); raises InternalError."""
        self._pool.check()
        self._slots.check()
        slots = [holding.slot for holding in self._holdings.values()]
        if len(set(slots)) != len(slots) or 0 in slots:
            raise InternalError("Two requests hold one slot, or one holds slot 0.")
        holders: Counter[int] = Counter()
        for key, holding in self._holdings.items():
            table = holding.table[: holding.blocks].tolist()
            if holding.blocks != self.blocks_for(holding.tokens):
                raise InternalError(f"{key!r}: {holding.blocks} blocks, {holding.tokens} tokens.")
            if len(set(table)) != len(table) or 0 in table:
                raise InternalError(f"{key!r} holds a block twice, or block 0.")
            holders.update(table)
        for block, count in holders.items():
            if self._pool.references(block) < count:
                raise InternalError(f"Block {block} has more holders than references.")
        for key, holding in self._holdings.items():
            tail = holding.tokens // self._block_tokens
            if holding.tokens % self._block_tokens and holders[int(holding.table[tail])] > 1:
                raise InternalError(f"{key!r} shares the block it writes next.")

    def _hold(self, key: Hashable, slot: int, tokens: int, ids: IdArray) -> None:
        holding = _Holding(slot, tokens, 0, np.zeros(_FIRST_TABLE_BLOCKS, dtype=np.int64))
        holding.append(ids)
        self._holdings[key] = holding

    def _holding(self, key: Hashable) -> _Holding:
        try:
            return self._holdings[key]
        except KeyError:
            raise InternalError(f"Request {key!r} holds no cache memory.") from None

    def _require_new(self, key: Hashable) -> None:
        if key in self._holdings:
            raise InternalError(f"Request {key!r} holds cache memory already.")
