"""Pool and prefix index by example: what a shortage, a hit, an eviction and a misuse do."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from headrace.errors import ConfigError, InternalError
from headrace.kv import BlockPool, BlocksRemoved, BlocksStored, PoolStats, Shortage, slots_for
from headrace.kv.lru import LruQueue


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def cache(pool: BlockPool, *numbers: int) -> list[int]:
    """Compute blocks with these keys, release them; returns the blocks."""
    ids = pool.allocate(len(numbers))
    pool.bind(ids, keys(*numbers))
    pool.release(ids)
    return ids.tolist()


def test_policies_import_no_torch():
    code = "import sys, headrace.kv, headrace.kv.resume; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("sequences", "slots"), [(1, 2), (5, 7), (256, 308)])
def test_slots_for(sequences, slots):
    assert slots_for(sequences) == slots


def test_a_pool_needs_room_besides_the_reserved_number():
    with pytest.raises(ConfigError, match="at least 2"):
        BlockPool(1)


def test_tail_is_handed_out_again_before_head():
    pool = BlockPool(10)
    ids = pool.allocate(4)
    pool.allocate(5)
    pool.release(ids)
    assert pool.allocate(4).tolist() == ids[::-1].tolist()


def test_cached_blocks_are_free_and_found_by_key():
    pool = BlockPool(10)
    ids = cache(pool, 1, 2, 3)
    assert pool.stats() == PoolStats(total=9, free=9, used=0, pinned=0, cached=3)
    assert pool.index.match(keys(1, 2, 3, 4)) == 3
    assert pool.index.match(keys(2, 3)) == 2
    assert pool.index.match(keys(4, 1)) == pool.index.match([]) == 0
    found = pool.index.blocks(keys(1, 2))
    assert found.tolist() == ids[:2]
    pool.share(found)
    assert pool.stats() == PoolStats(total=9, free=7, used=2, pinned=0, cached=1)
    pool.check()


def test_blocks_without_a_key_are_handed_out_before_cached_ones():
    pool = BlockPool(10)
    cached = cache(pool, 1, 2, 3)
    fresh = pool.allocate(6)
    assert not set(cached) & set(fresh.tolist())
    assert pool.index.match(keys(1, 2, 3)) == 3
    assert pool.index.stats().removed == 0


def test_eviction_takes_the_least_recently_used_and_its_tail_first():
    pool = BlockPool(7)
    a, b = cache(pool, 1, 2, 3), cache(pool, 11, 12, 13)
    pool.share(a)  # used again: now b is the older one
    pool.release(a)
    assert pool.allocate(2).tolist() == [b[2], b[1]]
    assert pool.index.match(keys(11, 12, 13)) == 1
    assert pool.index.match(keys(1, 2, 3)) == 3
    assert pool.allocate(2).tolist() == [b[0], a[2]]
    assert pool.index.match(keys(1, 2, 3)) == 2
    assert pool.index.stats().removed == 4
    pool.check()


def test_evict_on_demand():
    pool = BlockPool(7)
    cache(pool, 1, 2, 3)
    assert pool.evict(2) == 2
    assert pool.index.match(keys(1, 2, 3)) == 1
    assert pool.evict(9) == 1
    assert pool.evict(1) == 0
    assert pool.stats() == PoolStats(total=6, free=6, used=0, pinned=0, cached=0)
    pool.check()


def test_the_first_block_of_a_key_keeps_it():
    pool = BlockPool(7)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.bind(first, keys(1, 2))
    pool.bind(second, keys(1, 3))
    assert pool.index.blocks(keys(1, 2, 3)).tolist() == [first[0], first[1], second[1]]
    assert pool.index.stats().duplicates == 1
    pool.release(second)
    assert pool.stats().cached == 1  # the duplicate is free for anything
    pool.check()


def test_binding_again_changes_nothing():
    pool = BlockPool(7)
    ids = pool.allocate(3)
    pool.bind(ids[:2], keys(1, 2))
    pool.bind(ids, keys(1, 2, 3))
    assert pool.index.blocks(keys(1, 2, 3)).tolist() == ids.tolist()
    assert pool.index.stats().stored == 3
    pool.check()


def test_unbound_content_is_never_found():
    pool = BlockPool(7)
    used, ids = pool.allocate(1), cache(pool, 1, 2)
    pool.bind(used, keys(3))
    pool.unbind([*used.tolist(), ids[0]])
    assert pool.index.match(keys(1)) == pool.index.match(keys(3)) == 0
    assert pool.stats() == PoolStats(total=6, free=5, used=1, pinned=0, cached=1)
    pool.check()


def test_pinned_block_waits_for_its_io():
    pool = BlockPool(3)
    ids = pool.allocate(2)
    pool.bind(ids, keys(1, 2))
    pool.pin(ids[:1])
    pool.release(ids)
    assert (pool.stats().free, pool.stats().pinned) == (1, 1)
    assert pool.allocate(2) == Shortage(2, 1)
    assert pool.index.match(keys(1, 2)) == 2
    pool.unpin(ids[:1])
    pool.check()
    assert pool.available == 2


def test_pinned_block_can_be_hit():
    pool = BlockPool(3)
    ids = pool.allocate(2)
    pool.bind(ids, keys(1, 2))
    pool.release(ids)
    pool.pin(ids)  # cached: an IO reads it for the host tier
    assert pool.available == 0
    pool.share(ids)
    pool.unpin(ids)
    assert pool.stats() == PoolStats(total=2, free=0, used=2, pinned=0, cached=0)
    pool.release(ids)
    pool.check()
    assert pool.available == 2


def test_events_are_numbered_without_gaps_and_tell_the_whole_content():
    events = []
    pool = BlockPool(5, events.append)
    cache(pool, 1, 2, 3)
    ids = pool.allocate(3)
    pool.bind(ids[:1], keys(3))  # evicted by the allocation, computed again
    pool.unbind(ids)
    pool.evict(9)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    content: dict[bytes, int] = {}
    for event in events:
        if isinstance(event, BlocksStored):
            content.update(zip(event.keys, event.blocks, strict=True))
        else:
            assert isinstance(event, BlocksRemoved)
            for name, block in zip(event.keys, event.blocks, strict=True):
                assert content.pop(name) == block
    assert content == {}
    assert events[0] == BlocksStored(1, tuple(keys(1, 2, 3)), (1, 2, 3))


def test_removal_is_told_before_the_block_is_handed_out():
    pool = BlockPool(3)
    seen = []

    def listener(event):
        seen.append((type(event), pool.references(event.blocks[0])))

    pool.index._listener = listener
    cache(pool, 1, 2)
    pool.allocate(1)
    assert seen == [(BlocksStored, 1), (BlocksRemoved, 0)]


@pytest.mark.parametrize(
    ("operation", "ids", "words"),
    [
        ("release", [3], "released twice"),
        ("release", [1, 3], "released twice"),
        ("release", [0], "released twice"),
        ("share", [1, 3], "not in use"),
        ("share", [0], "not in use"),
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


def test_misuse_while_pinned_raises_too():
    pool = BlockPool(3)
    ids = pool.allocate(1)
    pool.pin(ids)
    pool.release(ids)
    with pytest.raises(InternalError, match="released twice"):
        pool.release(ids)
    assert pool.stats().pinned == 1
    pool.check()


def test_misuse_of_keys():
    pool = BlockPool(5)
    ids = pool.allocate(2)
    pool.bind(ids, keys(1, 2))
    with pytest.raises(InternalError, match="another key"):
        pool.bind(ids, keys(1, 3))
    with pytest.raises(InternalError, match="2 blocks, 1 keys"):
        pool.bind(ids, keys(1))
    with pytest.raises(InternalError, match="are free"):
        pool.bind([3], keys(3))
    with pytest.raises(InternalError, match="No block is bound"):
        pool.index.blocks(keys(1, 3))
    with pytest.raises(InternalError, match="wanted"):
        pool.take(-1)
    with pytest.raises(InternalError, match="wanted"):
        pool.take(3)
    assert pool.index.stats().stored == 2
    pool.check()


def test_check_finds_damage():
    def damaged(change):
        pool = BlockPool(6)
        cache(pool, 1, 2)
        pool.allocate(1)
        pool.check()
        change(pool)
        with pytest.raises(InternalError):
            pool.check()

    def set_state(block, value):
        return lambda pool: pool._state.__setitem__(block, value)

    damaged(set_state(0, 2))
    damaged(set_state(5, 2))
    damaged(set_state(1, 3))
    damaged(set_state(3, 3))
    damaged(set_state(4, -2))
    damaged(set_state(3, 2 + (1 << 32)))
    damaged(lambda pool: pool.index._block_of.pop(key(1)))
    damaged(lambda pool: pool.index._block_of.update({key(1): 2}))
    damaged(lambda pool: pool._cached.pop(1))
    damaged(lambda pool: pool._cached.left(1))


def test_lru_queue_skips_long_stale_stretches_and_compacts():
    state = np.zeros(5000, dtype=np.int64)
    queue = LruQueue(state)
    queue.push(np.arange(5000))
    state[1:4999] = 2
    queue.left(4998)
    assert queue.pop(2).tolist() == [0, 4999]
    state[:] = 0
    for start in range(0, 60_000, 500):  # more pushes than the buffer holds
        ids = np.arange(start, start + 500) % 5000
        queue.push(ids)
        assert queue.ids().tolist() == ids.tolist()
        assert queue.pop(500).tolist() == ids.tolist()
        state[ids] = 0
    assert queue.pop(0).tolist() == []
    assert len(queue) == 0
