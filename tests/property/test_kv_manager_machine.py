"""Any sequence of manager calls keeps every request's rows intact and memory accounted for.

The model writes a fresh mark into every (block, row) that a request gains, and does the ordered
copies; whatever others do, a request must then read back its own history.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import InternalError
from headrace.kv import Admission, BlockPool, Fork, KVManager, Shortage, SlotPool

BLOCK_TOKENS = 4


class KVManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 14), num_slots=st.integers(2, 6))
    def start(self, num_blocks, num_slots):
        self.pool, self.slots = BlockPool(num_blocks), SlotPool(num_slots)
        self.manager = KVManager(self.pool, self.slots, BLOCK_TOKENS)
        self.history: dict[int, list[int]] = {}  # request -> the marks it wrote, by position
        self.rows: dict[tuple[int, int], int] = {}  # (block, row) -> the mark it holds
        self.next_mark = self.next_key = 0

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.history)))

    def free(self) -> tuple[int, int]:
        return self.pool.available, self.slots.available

    def snapshot(self):
        tables = {key: self.manager.block_table(key).tolist() for key in self.history}
        tokens = {key: self.manager.tokens(key) for key in self.history}
        return tables, tokens, self.manager.stats()

    def write(self, key: int, upto: int) -> None:
        """Fill the positions a request gained, as the model's forward pass would."""
        table, marks = self.manager.block_table(key), self.history[key]
        for position in range(len(marks), upto):
            block, row = int(table[position // BLOCK_TOKENS]), position % BLOCK_TOKENS
            self.rows[block, row] = self.next_mark
            marks.append(self.next_mark)
            self.next_mark += 1

    @rule(tokens=st.integers(0, 20))
    def admit(self, tokens):
        blocks, slots = self.free()
        before = self.snapshot()
        key, self.next_key = self.next_key, self.next_key + 1
        needed = -(-tokens // BLOCK_TOKENS)
        got = self.manager.admit(key, tokens)
        if slots == 0 or blocks < needed:
            assert isinstance(got, Shortage)
            assert got.available < got.needed
            assert got.resource == ("slots" if slots == 0 else "blocks")
            assert self.snapshot() == before
            assert key not in self.manager
            return
        assert isinstance(got, Admission)
        assert self.free() == (blocks - needed, slots - 1)
        self.history[key] = []
        self.write(key, tokens)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), more=st.integers(0, 10))
    def grow(self, data, more):
        key = self.pick(data)
        target = len(self.history[key]) + more
        before = self.snapshot()
        missing = -(-target // BLOCK_TOKENS) - len(self.manager.block_table(key))
        got = self.manager.grow(key, target)
        if missing > before[2].blocks.free:
            assert got == Shortage("blocks", missing, before[2].blocks.free)
            assert self.snapshot() == before
            return
        assert got is None
        assert self.pool.available == before[2].blocks.free - missing
        self.write(key, target)

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def rollback(self, data):
        key = self.pick(data)
        marks = self.history[key]
        target = data.draw(st.integers(0, len(marks)))
        before = self.snapshot()
        try:
            self.manager.rollback(key, target)
        except InternalError:
            # Only a cut inside a block that another request holds too is refused.
            cut = before[0][key][target // BLOCK_TOKENS]
            assert target % BLOCK_TOKENS
            assert sum(cut in table for table in before[0].values()) > 1
            assert self.snapshot() == before
            return
        del marks[target:]

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data)
        at = data.draw(st.integers(0, len(self.history[parent])))
        before = self.snapshot()
        blocks, slots = self.free()
        child, self.next_key = self.next_key, self.next_key + 1
        got = self.manager.fork(parent, child, at)
        copied = 1 if at % BLOCK_TOKENS else 0
        if slots == 0 or blocks < copied:
            assert isinstance(got, Shortage)
            assert self.snapshot() == before
            return
        assert isinstance(got, Fork)
        assert len(got.block_copies) == copied
        assert got.slot_copies == ((self.manager.slot(parent), got.slot),)
        for source, target in got.block_copies:
            for row in range(BLOCK_TOKENS):
                if (source, row) in self.rows:
                    self.rows[target, row] = self.rows[source, row]
        self.history[child] = self.history[parent][:at]
        assert self.free() == (blocks - copied, slots - 1)

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def release(self, data):
        key = self.pick(data)
        alone = [b for b in self.manager.block_table(key).tolist() if self.pool.references(b) == 1]
        blocks, slots = self.free()
        self.manager.release(key)
        del self.history[key]
        assert key not in self.manager
        assert self.free() == (blocks + len(alone), slots + 1)

    @invariant()
    def every_request_reads_its_own_rows(self):
        for key, marks in self.history.items():
            table = self.manager.block_table(key).tolist()
            assert len(table) == -(-len(marks) // BLOCK_TOKENS)
            read = [
                self.rows[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS]
                for position in range(len(marks))
            ]
            assert read == marks

    @invariant()
    def memory_is_accounted_for(self):
        self.manager.check()
        stats = self.manager.stats()
        assert stats.requests == len(self.history)
        assert stats.slots.used == len(self.history)
        held = {b for key in self.history for b in self.manager.block_table(key).tolist()}
        assert stats.blocks.used == len(held)
        assert 0 not in held
        assert 0 not in {self.manager.slot(key) for key in self.history}
        assert stats.blocks.free + stats.blocks.used + stats.blocks.pinned == stats.blocks.total

    def teardown(self):
        for key in list(getattr(self, "history", {})):
            self.manager.release(key)
        if hasattr(self, "manager"):
            assert self.manager.stats().blocks.free == self.pool.num_blocks - 1
            assert self.manager.stats().slots.free == self.slots.num_slots - 1


TestKVManager = KVManagerMachine.TestCase
TestKVManager.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
