"""Manager by example: admission with hits, growth, forks, rollback, shortages, misuse."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ConfigError, InternalError
from headrace.kv import BlockPool, KVManager, Shortage

BLOCK = 128


def make(blocks: int = 9, rows: int = 6, max_blocks: int = 8, block_tokens: int = BLOCK):
    return KVManager(BlockPool(blocks), rows, max_blocks, block_tokens)


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def table(manager: KVManager, row: int) -> list[int]:
    """Blocks of a row; behind them the row of the array is empty."""
    count = manager.num_blocks[row]
    assert not manager.block_tables[row, count:].any()
    return manager.block_tables[row, :count].tolist()


def grow(manager: KVManager, lengths: dict[int, int]) -> Shortage | None:
    return manager.grow(np.array(list(lengths)), np.array(list(lengths.values())))


def test_admit_grow_release():
    manager = make()
    assert manager.admit(1, 129) is None
    assert manager.block_tables.dtype == np.int32
    assert len(table(manager, 1)) == 2
    assert grow(manager, {1: 256}) is None
    assert len(table(manager, 1)) == 2
    assert grow(manager, {1: 257}) is None
    assert len(table(manager, 1)) == 3
    assert grow(manager, {1: 10}) is None
    assert len(table(manager, 1)) == 3
    manager.release(1)
    assert table(manager, 1) == []
    assert not manager.held.any()
    assert manager.stats().rows == 0
    assert manager.stats().blocks.free == manager.available_blocks == 8
    manager.check()


def test_many_rows_grow_at_once_by_different_amounts():
    manager = make(blocks=40, rows=6)
    for row, tokens in ((1, 1), (2, 128), (3, 200), (5, 0)):
        assert manager.admit(row, tokens) is None
    before = {row: table(manager, row) for row in range(6)}
    assert grow(manager, {3: 256, 1: 600, 5: 1, 2: 129}) is None
    for row, blocks in ((1, 5), (2, 2), (3, 2), (5, 1)):
        assert table(manager, row)[: len(before[row])] == before[row]
        assert len(table(manager, row)) == blocks
    manager.check()


def test_a_hit_shares_blocks_and_a_release_keeps_them():
    manager = make()
    assert manager.admit(1, 300) is None
    first = table(manager, 1)
    manager.bind(1, 0, keys(1, 2))
    assert manager.match(keys(1, 2, 9)) == 2
    assert manager.admit(2, 400, 2, keys(1, 2, 3)) is None
    assert table(manager, 2)[:2] == first[:2]
    assert len(table(manager, 2)) == 4
    manager.release(1)
    manager.release(2)
    assert manager.stats().blocks.cached == 2
    assert manager.match(keys(1, 2)) == 2
    assert manager.admit(1, 256, 2, keys(1, 2)) is None
    assert table(manager, 1) == first[:2]
    prefix = manager.stats().prefix
    assert (prefix.hits, prefix.misses, prefix.stored, prefix.removed) == (4, 5, 2, 0)
    manager.check()


def test_content_that_must_not_be_used_again():
    manager = make()
    manager.admit(1, 300)
    manager.bind(1, 0, keys(1, 2))
    manager.admit(2, 200, 1, keys(1))
    manager.release(1, keep_cached=False)
    assert manager.match(keys(1, 2)) == 1  # row 2 still holds the first block
    manager.release(2, keep_cached=False)
    assert manager.match(keys(1, 2)) == 0
    assert manager.stats().blocks.cached == 0
    manager.check()


def test_blocks_are_bound_for_many_rows_at_once():
    manager = make()
    manager.admit(1, 200)
    manager.admit(3, 400)
    manager.bind_each(np.array([3, 1]), np.array([2, 0]), keys(7, 8))
    manager.release(1)
    manager.release(3)
    assert (manager.match(keys(7)), manager.match(keys(8))) == (1, 1)
    assert manager.stats().blocks.cached == 2
    with pytest.raises(InternalError, match="no such block"):
        manager.bind_each(np.array([1]), np.array([0]), keys(9))
    manager.check()


def test_shortages_change_nothing():
    manager = make(blocks=4, rows=5)
    assert manager.admit(1, 4 * BLOCK) == Shortage(4, 3)
    assert not manager.held[1]
    assert manager.admit(1, 2 * BLOCK, spare_blocks=2) == Shortage(4, 3)
    assert manager.admit(1, 300) is None
    assert grow(manager, {1: 513}) == Shortage(2, 0)
    assert len(table(manager, 1)) == 3
    assert manager.fork(1, 2, 300) == Shortage(1, 0)
    assert not manager.held[2]
    assert manager.admit(3, 0) is None
    assert grow(manager, {3: 1, 1: 400}) == Shortage(2, 0)
    manager.check()


def test_a_hit_on_cached_blocks_counts_against_the_room():
    """Cached blocks are free, but not for the request that hits them."""
    manager = make(blocks=5)
    manager.admit(1, 256)
    manager.bind(1, 0, keys(1, 2))
    manager.release(1)
    assert manager.available_blocks == 4
    assert manager.admit(1, 5 * BLOCK, 2, keys(1, 2)) == Shortage(3, 2)
    assert manager.match(keys(1, 2)) == 2
    assert manager.admit(1, 4 * BLOCK, 2, keys(1, 2), spare_blocks=1) == Shortage(3, 2)
    assert manager.admit(1, 4 * BLOCK, 2, keys(1, 2)) is None
    assert manager.available_blocks == 0
    manager.check()


def test_rollback_releases_only_whole_blocks_behind_the_cut():
    manager = make()
    manager.admit(1, 300)
    blocks = table(manager, 1)
    manager.rollback(1, 257)
    assert table(manager, 1) == blocks
    manager.rollback(1, 256)
    assert table(manager, 1) == blocks[:2]
    manager.rollback(1, 1)
    assert table(manager, 1) == blocks[:1]
    manager.rollback(1, 0)
    assert manager.stats().blocks.used == 0
    assert manager.held[1]
    with pytest.raises(InternalError, match="rollback"):
        manager.rollback(1, 1)


def test_a_block_that_is_cut_loses_its_key():
    manager = make()
    manager.admit(1, 300)
    manager.bind(1, 0, keys(1, 2))
    manager.rollback(1, 200)
    assert manager.match(keys(1, 2)) == 1
    manager.release(1)
    assert manager.match(keys(1, 2)) == 1
    manager.check()


def test_rollback_into_a_shared_block_is_refused():
    manager = make()
    manager.admit(1, 300)
    assert manager.fork(1, 2, 256) == ()
    before = table(manager, 1)
    with pytest.raises(InternalError, match="shared block"):
        manager.rollback(1, 200)
    assert table(manager, 1) == before
    manager.rollback(1, 256)
    manager.release(2)
    manager.rollback(1, 200)
    manager.check()


def test_fork_shares_complete_blocks_and_copies_the_rest():
    manager = make()
    manager.admit(1, 300)
    copies = manager.fork(1, 2, 300)
    parent, child = table(manager, 1), table(manager, 2)
    assert child[:2] == parent[:2]
    assert child[2] not in parent
    assert copies == ((parent[2], child[2]),)
    manager.check()
    manager.release(1)
    assert manager.stats().blocks.used == 3
    manager.release(2)
    assert manager.stats().blocks.used == 0


def test_the_block_a_row_writes_next_is_its_own():
    """Whatever is shared or has a key lies before the tokens that are written next."""
    manager = make(blocks=20)
    manager.admit(1, 2 * BLOCK)
    manager.bind(1, 0, keys(1, 2))
    manager.admit(2, 2 * BLOCK + 1, 2, keys(1, 2))
    manager.fork(2, 3, 2 * BLOCK + 1)
    tails = [table(manager, row)[2] for row in (2, 3)]
    assert len({*tails, *table(manager, 1)}) == 4
    assert manager.stats().blocks.used == 4


def test_dt7_positions_beyond_32_bits():
    manager = make(blocks=5002, rows=3, max_blocks=6000, block_tokens=1 << 20)
    assert manager.admit(1, 1) is None
    assert grow(manager, {1: 4097 << 20}) is None
    assert grow(manager, {1: (4097 << 20) + 1}) is None
    assert len(table(manager, 1)) == 4098
    assert grow(manager, {1: 4098 << 20}) is None
    assert len(table(manager, 1)) == 4098
    assert len(manager.fork(1, 2, (4097 << 20) + 5)) == 1
    manager.rollback(2, 4096 << 20)
    assert len(table(manager, 2)) == 4096
    manager.check()


def test_misuse_is_refused():
    manager = make()
    manager.admit(1, 1)
    for call in (
        lambda: manager.admit(1, 1),
        lambda: manager.admit(0, 1),
        lambda: manager.admit(6, 1),
        lambda: manager.admit(2, 9 * BLOCK),
        lambda: manager.admit(2, 300, 1, []),
        lambda: manager.admit(2, 100, 2, keys(1, 2)),
        lambda: manager.admit(2, 300, 1, keys(1)),
        lambda: manager.fork(1, 1, 1),
        lambda: manager.fork(1, 2, 129),
        lambda: manager.fork(2, 3, 0),
        lambda: grow(manager, {2: 1}),
        lambda: grow(manager, {1: 8 * BLOCK + 1}),
        lambda: manager.bind(1, 0, keys(1, 2)),
        lambda: manager.bind(2, 0, []),
        lambda: manager.release(2),
        lambda: manager.release(0),
        lambda: manager.rollback(2, 0),
    ):
        with pytest.raises(InternalError):
            call()
    assert manager.stats().rows == 1
    assert manager.stats().blocks.used == 1
    manager.check()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 0, 1), (2, 1, 0)])
def test_sizes_that_hold_nothing_are_refused(sizes):
    with pytest.raises(ConfigError):
        KVManager(BlockPool(3), *sizes)


def test_check_finds_damage():
    def damaged(change):
        manager = make()
        manager.admit(1, 200)
        manager.admit(2, 200)
        manager.check()
        change(manager)
        with pytest.raises(InternalError):
            manager.check()

    def put(name, place, value):
        return lambda manager: getattr(manager, name).__setitem__(place, value)

    damaged(put("held", 0, True))
    damaged(put("held", 1, False))
    damaged(put("num_blocks", 1, 1))
    damaged(put("block_tables", (1, 0), 0))
    damaged(put("block_tables", (3, 0), 1))
    damaged(put("block_tables", (1, 0), 2))
    damaged(put("block_tables", (1, 0), 3))
