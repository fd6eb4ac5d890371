"""Which blocks each running request holds: one block table per row, without torch.

Contract: a row (1 .. num_rows - 1) is the number of a running request everywhere: in the engine's
tables, here, and as its ring and state slot. Every call is all or nothing: one that finds too few
blocks returns a `Shortage` and leaves everything as it was; one that contradicts the state (a row
that holds nothing, growth past the table) raises InternalError. A block that several rows hold, or
that has a key, is complete and never written again: a fork gets a copy of the parent's unfinished
block, and blocks are bound to keys only after their rows were computed. Called by the scheduler;
the copies that it orders are done by `KVCache.copy_blocks` before the next step writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError, InternalError
from headrace.kv.layout import BLOCK_TOKENS
from headrace.kv.lru import IdArray
from headrace.kv.pool import BlockPool, PoolStats, Shortage
from headrace.kv.prefix import PrefixStats


@dataclass(frozen=True, slots=True)
class KVStats:
    """rows: requests that hold memory now."""

    rows: int
    blocks: PoolStats
    prefix: PrefixStats


class KVManager:
    """Block tables of all running requests over one BlockPool.

    block_tables: int32 [num_rows, max_blocks], block ids in token order, 0 behind the last one.
    num_blocks: int32 [num_rows]. held: bool [num_rows]. All three are read by callers as they are
    and written here only.
    """

    def __init__(
        self, pool: BlockPool, num_rows: int, max_blocks: int, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        """num_rows counts the reserved row 0. max_blocks: most blocks of one request.

        The pool may have other users; this object accounts for what it took itself. Raises
        ConfigError for sizes that hold nothing.
        """
        if num_rows < 2 or max_blocks < 1 or block_tokens < 1:
            raise ConfigError(
                f"num_rows {num_rows}, max_blocks {max_blocks} and block_tokens {block_tokens} "
                "must be at least 2, 1 and 1."
            )
        self._pool = pool
        self._block_tokens = block_tokens
        self.block_tables = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self.held = np.zeros(num_rows, dtype=np.bool_)
        self._capacity_tokens = np.zeros(num_rows, dtype=np.int64)

    # --- questions ---------------------------------------------------------------------------

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self._block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens: the ceiling of tokens / block_tokens."""
        return -(-tokens // self._block_tokens)

    @property
    def available_blocks(self) -> int:
        """Blocks that could be handed out now, cached ones included."""
        return self._pool.available

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt with these keys are in the cache now."""
        return self._pool.index.match(keys)

    # --- rows in and out ---------------------------------------------------------------------

    def admit(
        self,
        row: int,
        tokens: int,
        hit_blocks: int = 0,
        keys: Sequence[bytes] = (),
        spare_blocks: int = 0,
    ) -> Shortage | None:
        """Give a free row the blocks of `tokens` tokens; None is success.

        The first `hit_blocks` are those of keys[:hit_blocks], which `match` has found in this
        step; the rest are fresh. spare_blocks: how many must stay available behind it (a Shortage
        counts them as needed). Raises InternalError if the row is held, the hit is longer than the
        request, or a key of the hit is not there.
        """
        self._require_free(row)
        count = self.blocks_for(tokens)
        if not 0 <= hit_blocks <= min(count, len(keys)) or count > self.block_tables.shape[1]:
            raise InternalError(
                f"admit: {hit_blocks} of {count} blocks hit with {len(keys)} keys; a row holds "
                f"{self.block_tables.shape[1]} blocks."
            )
        fresh_count = count - hit_blocks
        available = self._pool.available
        hits = self._pool.index.blocks(keys[:hit_blocks]) if hit_blocks else None
        if hits is not None:
            available -= self._pool.cached_among(hits)
        if fresh_count + spare_blocks > available:
            return Shortage(fresh_count + spare_blocks, available)
        if hits is not None:
            self._pool.share(hits)
            self.block_tables[row, :hit_blocks] = hits
        if fresh_count:
            self.block_tables[row, hit_blocks:count] = self._pool.take(fresh_count)
        self._pool.index.count(hits=hit_blocks, misses=fresh_count)
        self._hold(row, count)
        return None

    def release(self, row: int, keep_cached: bool = True) -> None:
        """Give back all blocks of a row; full ones with a key stay cached.

        keep_cached=False: the content is not to be used again (a request that computed NaN);
        blocks that no other row holds lose their keys.
        """
        self._require_held(row)
        count = int(self.num_blocks[row])
        ids = self.block_tables[row, :count].astype(np.int64)
        self._pool.release(ids)
        if not keep_cached:
            self._pool.unbind_cached(ids)
        self.block_tables[row, :count] = 0
        self.num_blocks[row] = 0
        self._capacity_tokens[row] = 0
        self.held[row] = False

    # --- growth ------------------------------------------------------------------------------

    def grow(self, rows: IdArray, lengths: IdArray) -> Shortage | None:
        """Make the tables of `rows` (distinct) cover `lengths` tokens each; None is success.

        rows, lengths: int64 [n]. Rows that cover as much already are left alone. All or nothing:
        a Shortage counts the blocks that all rows together lack.
        """
        short = lengths > self._capacity_tokens.take(rows)
        if not np.count_nonzero(short):
            return None
        rows, lengths = rows[short], lengths[short]
        have = self.num_blocks[rows]
        missing = -(-lengths // self._block_tokens) - have
        total = int(missing.sum())
        if not self.held[rows].all() or (have + missing).max() > self.block_tables.shape[1]:
            raise InternalError(f"grow: of rows {rows[:8].tolist()} one is free, or too long.")
        ids = self._pool.allocate(total)
        if isinstance(ids, Shortage):
            return ids
        if total == rows.size:  # one block each: every decode step
            self.block_tables[rows, have] = ids
        else:
            first = np.cumsum(missing) - missing
            columns = np.arange(total) + np.repeat(have - first, missing)
            self.block_tables[np.repeat(rows, missing), columns] = ids
        blocks = have + missing
        self.num_blocks[rows] = blocks
        self._capacity_tokens[rows] = blocks * self._block_tokens
        return None

    def bind(self, row: int, first_block: int, keys: Sequence[bytes]) -> None:
        """Say that blocks `first_block`, ... of a row hold the computed content of `keys`.

        Blocks that are bound to these keys already (hits, shared ones) may be among them.
        """
        self._require_held(row)
        end = first_block + len(keys)
        if not 0 <= first_block <= end <= self.num_blocks[row]:
            raise InternalError(f"bind: row {row} has no blocks {first_block}..{end - 1}.")
        self._pool.bind(self.block_tables[row, first_block:end], keys)

    def bind_each(self, rows: IdArray, blocks: IdArray, keys: Sequence[bytes]) -> None:
        """`bind` of block blocks[i] of rows[i] to keys[i], for many rows at once.

        rows, blocks: int64 [n]; no block twice. All or nothing.
        """
        if not self.held[rows].all() or (blocks >= self.num_blocks[rows]).any():
            raise InternalError(f"bind: one of rows {rows[:8].tolist()} has no such block.")
        self._pool.bind(self.block_tables[rows, blocks], keys)

    def rollback(self, row: int, to_tokens: int) -> None:
        """Forget tokens at and after `to_tokens`; blocks wholly behind it are released.

        Rows need no clearing: compressed entries >= to_tokens // ratio are invisible and ring and
        state rows are overwritten. A block that is cut loses its key. Raises InternalError if the
        cut lies ahead of the table, or inside a block that others hold too, for the next write
        would change what they read.
        """
        self._require_held(row)
        count, keep = int(self.num_blocks[row]), self.blocks_for(to_tokens)
        if not 0 <= keep <= count:
            raise InternalError(f"rollback of row {row} to {to_tokens} tokens: {count} blocks.")
        if to_tokens % self._block_tokens:
            cut = int(self.block_tables[row, keep - 1])
            if self._pool.references(cut) > 1:
                raise InternalError(f"rollback of row {row} to {to_tokens} cuts a shared block.")
            self._pool.unbind([cut])
        self._pool.release(self.block_tables[row, keep:count])
        self.block_tables[row, keep:count] = 0
        self._hold(row, keep)

    def fork(
        self, parent_row: int, child_row: int, at_tokens: int
    ) -> tuple[tuple[int, int], ...] | Shortage:
        """Start a free row with the first `at_tokens` tokens of another.

        Complete blocks are shared; the result is the copy of the unfinished one, if there is one:
        ((source block, target block),). The caller copies the slot (parent_row to child_row) too;
        it holds windows of the parent's present, so `at_tokens` may lie at most `backtrack` tokens
        behind what the parent has computed. Raises InternalError if it lies ahead of the parent.
        """
        self._require_held(parent_row)
        self._require_free(child_row)
        complete, rest = divmod(at_tokens, self._block_tokens)
        if not 0 <= at_tokens <= self._capacity_tokens[parent_row]:
            raise InternalError(f"fork of row {parent_row} at {at_tokens} tokens lies ahead of it.")
        tail = self._pool.allocate(1 if rest else 0)
        if isinstance(tail, Shortage):
            return tail
        shared = self.block_tables[parent_row, :complete]
        self._pool.share(shared)
        self.block_tables[child_row, :complete] = shared
        copies: tuple[tuple[int, int], ...] = ()
        if rest:
            self.block_tables[child_row, complete] = tail[0]
            copies = ((int(self.block_tables[parent_row, complete]), int(tail[0])),)
        self._hold(child_row, complete + len(copies))
        return copies

    # --- accounting --------------------------------------------------------------------------

    def stats(self) -> KVStats:
        """Counts of now."""
        return KVStats(
            int(np.count_nonzero(self.held)), self._pool.stats(), self._pool.index.stats()
        )

    def check(self) -> None:
        """Verify every invariant of this object and its pool, O(total); raises InternalError."""
        self._pool.check()
        if self.held[0] or self.num_blocks[~self.held].any():
            raise InternalError("Row 0, or a row that is free, holds blocks.")
        capacity = self.num_blocks.astype(np.int64) * self._block_tokens
        if not np.array_equal(self._capacity_tokens, capacity):
            raise InternalError("The capacity of a row is not that of its blocks.")
        inside = np.arange(self.block_tables.shape[1]) < self.num_blocks[:, None]
        if ((self.block_tables > 0) != inside).any():
            raise InternalError("A table has block 0 inside, or a block behind its end.")
        for row in np.flatnonzero(self.held).tolist():
            table = self.block_tables[row, : self.num_blocks[row]]
            if np.unique(table).size != table.size:
                raise InternalError(f"Row {row} holds a block twice.")
        blocks, holders = np.unique(self.block_tables[inside], return_counts=True)
        for block, count in zip(blocks.tolist(), holders.tolist(), strict=True):
            if self._pool.references(block) < count:
                raise InternalError(f"Block {block} has more holders than references.")

    # --- inside ------------------------------------------------------------------------------

    def _hold(self, row: int, blocks: int) -> None:
        self.held[row] = True
        self.num_blocks[row] = blocks
        self._capacity_tokens[row] = blocks * self._block_tokens

    def _require_held(self, row: int) -> None:
        if not 0 < row < self.held.size or not self.held[row]:
            raise InternalError(f"Row {row} holds no cache memory.")

    def _require_free(self, row: int) -> None:
        if not 0 < row < self.held.size or self.held[row]:
            raise InternalError(f"Row {row} is no free row.")
