"""Any sequence of pool calls agrees with a dictionary of reference counts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.errors import InternalError
from headrace.kv.pool import BlockPool, Shortage, SlotPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Model: references and pins per block; free is what has neither."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.ids = range(1, num_blocks)
        self.references = dict.fromkeys(self.ids, 0)
        self.pins = dict.fromkeys(self.ids, 0)

    def free(self):
        return {i for i in self.ids if not self.references[i] and not self.pins[i]}

    @rule(count=st.integers(0, 13))
    def allocate(self, count):
        free = self.free()
        got = self.pool.allocate(count)
        if count > len(free):
            assert got == Shortage("blocks", count, len(free))
            return
        ids = got.tolist()
        assert len(ids) == len(set(ids)) == count
        assert set(ids) <= free
        for i in ids:
            self.references[i] = 1

    @rule(ids=st.lists(st.integers(-1, 12), max_size=6), data=st.data())
    def change(self, ids, data):
        operation = data.draw(st.sampled_from(["share", "release", "pin", "unpin"]))
        counts = self.references if operation in ("share", "release") else self.pins
        step = 1 if operation in ("share", "pin") else -1
        allowed = {
            "share": lambda i: self.references[i] > 0,
            "release": lambda i: self.references[i] > 0,
            "pin": lambda i: self.references[i] > 0 or self.pins[i] > 0,
            "unpin": lambda i: self.pins[i] > 0,
        }[operation]
        # Mostly legal calls, some illegal ones as drawn.
        if data.draw(st.integers(0, 3)):
            ids = [i for i in dict.fromkeys(ids) if i in self.ids and allowed(i)]
        legal = len(set(ids)) == len(ids) and all(i in self.ids and allowed(i) for i in ids)
        if not legal:
            with pytest.raises(InternalError):
                getattr(self.pool, operation)(ids)
            return
        getattr(self.pool, operation)(ids)
        for i in ids:
            counts[i] += step

    @invariant()
    def agrees(self):
        stats = self.pool.stats()
        used = sum(count > 0 for count in self.references.values())
        assert stats.total == len(self.ids)
        assert stats.free == self.pool.available == len(self.free())
        assert stats.used == used
        assert stats.pinned == stats.total - stats.free - used
        for i in self.ids:
            assert self.pool.references(i) == self.references[i]
        assert self.pool.references(0) == 0
        self.pool.check()


class SlotPoolMachine(RuleBasedStateMachine):
    """Model: the set of slots in use."""

    @initialize(num_slots=st.integers(2, 6))
    def start(self, num_slots):
        self.pool = SlotPool(num_slots)
        self.used = set()

    @rule()
    def allocate(self):
        slot = self.pool.allocate()
        if len(self.used) == self.pool.num_slots - 1:
            assert slot == Shortage("slots", 1, 0)
            return
        assert 1 <= slot < self.pool.num_slots
        assert slot not in self.used
        self.used.add(slot)

    @rule(slot=st.integers(0, 6))
    def release(self, slot):
        if slot in self.used:
            self.pool.release(slot)
            self.used.remove(slot)
        else:
            with pytest.raises(InternalError):
                self.pool.release(slot)

    @invariant()
    def agrees(self):
        stats = self.pool.stats()
        assert stats.used == len(self.used)
        assert stats.free == self.pool.available == stats.total - stats.used
        self.pool.check()


RUNS = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = RUNS
TestSlotPool = SlotPoolMachine.TestCase
TestSlotPool.settings = RUNS
