"""Any sequence of pool calls agrees with dictionaries of references, pins and keys.

The model also keeps the order in which cached blocks were last used, as a plain list: what the pool
evicts must be its head.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.errors import InternalError
from headrace.kv import BlockPool, BlocksRemoved, BlocksStored, Shortage

KEYS = [bytes([number]) * 32 for number in range(8)]


class BlockPoolMachine(RuleBasedStateMachine):
    """Model: references, pins and key per block; `lru` has the cached ones, oldest first."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.told: dict[bytes, int] = {}  # what a directory knows from the events
        self.events = 0
        self.pool = BlockPool(num_blocks, self.listen)
        self.ids = range(1, num_blocks)
        self.references = dict.fromkeys(self.ids, 0)
        self.pins = dict.fromkeys(self.ids, 0)
        self.keys: dict[int, bytes] = {}
        self.lru: list[int] = []

    def listen(self, event):
        self.events += 1
        assert event.sequence == self.events
        for key, block in zip(event.keys, event.blocks, strict=True):
            if isinstance(event, BlocksStored):
                assert key not in self.told
                self.told[key] = block
            else:
                assert isinstance(event, BlocksRemoved)
                assert self.told.pop(key) == block

    def idle(self, block):
        return not self.references[block] and not self.pins[block]

    def requeue(self, before):
        """Bring `lru` up to date; newly idle ones come last, in the order of `before` reversed."""
        self.lru = [block for block in self.lru if self.idle(block) and block in self.keys]
        for block in reversed(before):
            if self.idle(block) and block in self.keys and block not in self.lru:
                self.lru.append(block)

    @rule(count=st.integers(0, 13))
    def allocate(self, count):
        free = {block for block in self.ids if self.idle(block)}
        got = self.pool.allocate(count)
        if count > len(free):
            assert got == Shortage(count, len(free))
            return
        ids = got.tolist()
        assert len(ids) == len(set(ids)) == count
        plain = free - set(self.lru)
        evicted = self.lru[: max(0, count - len(plain))]
        assert set(ids) <= plain | set(evicted)
        assert set(evicted) <= set(ids)
        for block in evicted:
            del self.keys[block]
        self.lru = self.lru[len(evicted) :]
        for block in ids:
            self.references[block] = 1

    @rule(count=st.integers(0, 5))
    def evict(self, count):
        evicted = self.lru[:count]
        assert self.pool.evict(count) == len(evicted)
        for block in evicted:
            del self.keys[block]
        self.lru = self.lru[count:]

    @rule(ids=st.lists(st.integers(0, 11), max_size=6, unique=True), data=st.data())
    def change(self, ids, data):
        operation = data.draw(st.sampled_from(["share", "release", "pin", "unpin"]))
        counts = self.references if operation in ("share", "release") else self.pins
        step = 1 if operation in ("share", "pin") else -1
        allowed = {
            "share": lambda block: self.references[block] > 0 or block in self.keys,
            "release": lambda block: self.references[block] > 0,
            "pin": lambda block: not self.idle(block) or block in self.keys,
            "unpin": lambda block: self.pins[block] > 0,
        }[operation]
        ids = [block for block in ids if block < self.pool.num_blocks]
        # Mostly legal calls, some illegal ones as drawn.
        if data.draw(st.integers(0, 3)):
            ids = [block for block in ids if block and allowed(block)]
        if not all(block and allowed(block) for block in ids):
            with pytest.raises(InternalError):
                getattr(self.pool, operation)(ids)
            return
        getattr(self.pool, operation)(ids)
        for block in ids:
            counts[block] += step
        self.requeue(ids)

    @rule(pairs=st.dictionaries(st.integers(1, 11), st.sampled_from(KEYS), max_size=4))
    def bind(self, pairs):
        ids = [block for block in pairs if block < self.pool.num_blocks]
        keys = [pairs[block] for block in ids]
        wrong = any(
            self.idle(block) or self.keys.get(block, key) != key
            for block, key in zip(ids, keys, strict=True)
        )
        if wrong:
            with pytest.raises(InternalError):
                self.pool.bind(ids, keys)
            return
        self.pool.bind(ids, keys)
        for block, key in zip(ids, keys, strict=True):
            if key not in self.keys.values():
                self.keys[block] = key

    @rule(ids=st.lists(st.integers(1, 11), max_size=4, unique=True))
    def unbind(self, ids):
        ids = [block for block in ids if block < self.pool.num_blocks]
        self.pool.unbind(ids)
        for block in ids:
            self.keys.pop(block, None)
        self.requeue([])

    @invariant()
    def agrees(self):
        stats = self.pool.stats()
        used = sum(count > 0 for count in self.references.values())
        free = sum(map(self.idle, self.ids))
        assert (stats.total, stats.free, stats.used) == (len(self.ids), free, used)
        assert stats.free + stats.used + stats.pinned == stats.total
        assert (self.pool.available, stats.cached) == (free, len(self.lru))
        for block in self.ids:
            assert self.pool.references(block) == self.references[block]
        by_key = {key: block for block, key in self.keys.items()}
        assert by_key == self.told
        for key in KEYS:
            assert (key in self.pool.index) == (key in by_key)
        known = list(by_key)
        assert self.pool.index.match(known) == len(known)
        assert self.pool.index.blocks(known).tolist() == [by_key[key] for key in known]
        self.pool.check()

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for counts, undo in ((self.references, self.pool.release), (self.pins, self.pool.unpin)):
            while held := [block for block in self.ids if counts[block]]:
                undo(held)
                for block in held:
                    counts[block] -= 1
        stats = self.pool.stats()
        assert (stats.free, stats.cached) == (stats.total, len(self.keys))
        assert self.pool.evict(100) == len(self.keys)
        assert not self.told
        self.pool.check()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
