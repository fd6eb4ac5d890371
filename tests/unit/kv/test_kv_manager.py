"""Pool and manager by example: what a shortage, a fork, a rollback and a misuse do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.errors import ConfigError, InternalError
from headrace.kv import Admission, BlockPool, Fork, KVManager, Shortage, SlotPool, slots_for


def make(blocks: int = 9, slots: int = 4, block_tokens: int = 128) -> KVManager:
    return KVManager(BlockPool(blocks), SlotPool(slots), block_tokens)


def test_policies_import_no_torch():
    code = "import sys, headrace.kv; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("sequences", "slots"), [(1, 2), (5, 7), (256, 308)])
def test_slots_for(sequences, slots):
    assert slots_for(sequences) == slots


@pytest.mark.parametrize("pool", [BlockPool, SlotPool])
def test_pools_need_room_besides_the_reserved_number(pool):
    with pytest.raises(ConfigError, match="at least 2"):
        pool(1)


def test_tail_is_handed_out_again_before_head():
    pool = BlockPool(10)
    ids = pool.allocate(4)
    pool.allocate(5)
    pool.release(ids)
    assert pool.allocate(4).tolist() == ids[::-1].tolist()


def test_pinned_block_waits_for_its_io():
    pool = BlockPool(3)
    ids = pool.allocate(2)
    pool.pin(ids[:1])
    pool.release(ids)
    assert (pool.stats().free, pool.stats().pinned) == (1, 1)
    assert pool.allocate(2) == Shortage("blocks", 2, 1)
    pool.unpin(ids[:1])
    pool.check()
    assert pool.available == 2


@pytest.mark.parametrize(
    ("operation", "ids", "words"),
    [
        ("release", [3], "released twice"),
        ("release", [1, 1], "given twice"),
        ("release", [0], "outside"),
        ("release", [1, 9], "outside"),
        ("release", [-1], "outside"),
        ("share", [1, 3], "not in use"),
        ("pin", [3], "free"),
        ("unpin", [1], "not pinned"),
    ],
)
def test_misuse_of_the_pool_raises_and_changes_nothing(operation, ids, words):
    pool = BlockPool(5)
    assert pool.allocate(2).tolist() == [1, 2]
    before = pool.stats()
    with pytest.raises(InternalError, match=words):
        getattr(pool, operation)(ids)
    assert pool.stats() == before
    assert [pool.references(block) for block in range(5)] == [0, 1, 1, 0, 0]
    pool.check()


def test_negative_count_and_double_slot_release():
    with pytest.raises(InternalError, match="negative"):
        BlockPool(5).allocate(-1)
    slots = SlotPool(3)
    slots.release(slots.allocate())
    with pytest.raises(InternalError, match="released twice"):
        slots.release(1)


def test_check_finds_damage():
    pool = BlockPool(5)
    pool.allocate(2)
    pool._references[4] = 1
    with pytest.raises(InternalError, match="disagree"):
        pool.check()
    manager = make()
    manager.admit("a", 1)
    manager.admit("b", 1)
    manager._holdings["b"].table[0] = manager.block_table("a")[0]
    with pytest.raises(InternalError, match="more holders"):
        manager.check()


def test_admit_grow_release():
    manager = make()
    assert manager.admit("a", 129) == Admission(slot=1)
    assert len(manager.block_table("a")) == 2
    assert manager.grow("a", 256) is None
    assert len(manager.block_table("a")) == 2
    assert manager.grow("a", 257) is None
    assert len(manager.block_table("a")) == 3
    assert manager.grow("a", 10) is None
    assert manager.tokens("a") == 257
    assert manager.block_table("a").dtype == "int64"
    manager.release("a")
    assert "a" not in manager
    assert manager.stats().requests == 0
    assert manager.stats().blocks.free == 8
    assert manager.stats().slots.free == 3


def test_table_grows_over_many_blocks_in_order():
    manager = make(blocks=100, block_tokens=1)
    manager.admit("a", 1)
    expected = manager.block_table("a").tolist()
    for tokens in range(2, 100):
        assert manager.grow("a", tokens) is None
        expected.append(int(manager.block_table("a")[-1]))
        assert manager.block_table("a").tolist() == expected
    assert sorted(expected) == list(range(1, 100))


def test_shortages_change_nothing():
    manager = make(blocks=4, slots=3)
    assert manager.admit("big", 4 * 128) == Shortage("blocks", 4, 3)
    assert "big" not in manager
    assert manager.stats().slots.free == 2
    manager.admit("a", 300)
    assert manager.grow("a", 513) == Shortage("blocks", 2, 0)
    assert manager.tokens("a") == 300
    assert len(manager.block_table("a")) == 3
    assert manager.fork("a", "b", 300) == Shortage("blocks", 1, 0)
    assert manager.stats().slots.free == 1
    manager.admit("c", 0)
    assert manager.admit("d", 1) == Shortage("slots", 1, 0)
    assert manager.fork("a", "d", 256) == Shortage("slots", 1, 0)
    manager.check()


def test_rollback_releases_only_whole_blocks_behind_the_cut():
    manager = make()
    manager.admit("a", 300)
    table = manager.block_table("a").tolist()
    manager.rollback("a", 257)
    assert manager.block_table("a").tolist() == table
    manager.rollback("a", 256)
    assert manager.block_table("a").tolist() == table[:2]
    manager.rollback("a", 1)
    assert manager.block_table("a").tolist() == table[:1]
    manager.rollback("a", 0)
    assert manager.stats().blocks.used == 0
    with pytest.raises(InternalError, match="rollback"):
        manager.rollback("a", 1)


def test_fork_shares_complete_blocks_and_copies_the_rest():
    manager = make()
    manager.admit("a", 300)
    fork = manager.fork("a", "b", 300)
    assert isinstance(fork, Fork)
    parent, child = manager.block_table("a"), manager.block_table("b")
    assert child[:2].tolist() == parent[:2].tolist()
    assert fork.block_copies == ((int(parent[2]), int(child[2])),)
    assert fork.slot_copies == ((manager.slot("a"), manager.slot("b")),)
    assert fork.slot == manager.slot("b") != manager.slot("a")
    manager.check()
    manager.release("a")
    assert manager.stats().blocks.used == 3
    manager.release("b")
    assert manager.stats().blocks.used == 0


def test_fork_at_a_block_border_copies_no_block():
    manager = make()
    manager.admit("a", 300)
    fork = manager.fork("a", "b", 256)
    assert fork.block_copies == ()
    assert manager.stats().blocks.used == 3


def test_rollback_into_a_shared_block_is_refused():
    manager = make()
    manager.admit("a", 300)
    manager.fork("a", "b", 256)
    with pytest.raises(InternalError, match="shared block"):
        manager.rollback("a", 200)
    assert manager.tokens("a") == 300
    manager.rollback("a", 256)
    manager.release("b")
    manager.rollback("a", 200)
    manager.check()


def test_unknown_and_repeated_keys_are_refused():
    manager = make()
    manager.admit("a", 1)
    for call in (
        lambda: manager.admit("a", 1),
        lambda: manager.fork("a", "a", 1),
        lambda: manager.fork("a", "b", 2),
        lambda: manager.grow("x", 1),
        lambda: manager.release("x"),
        lambda: manager.block_table("x"),
    ):
        with pytest.raises(InternalError):
            call()
    assert manager.stats().requests == 1
    manager.check()
