"""Any sequence of manager calls keeps every request's rows intact and memory accounted for.

The model writes, for every token that a row computes, the whole history up to it into (block, row
in the block), and does the ordered copies. Whatever others do, a row must then read back its own
history: also through blocks that it got by their key. Histories are over two letters, so prefixes
meet often. The same machine runs as a long seeded random walk.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.hashing import BlockKeys, pack_tokens
from headrace.errors import InternalError
from headrace.kv import BlockPool, KVManager, Shortage

BLOCK = 4
MAX_BLOCKS = 10
ROOT = bytes(32)


class Model:
    """A manager, and what the model's forward pass would have left in memory."""

    def __init__(self, num_blocks: int, num_rows: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.manager = KVManager(self.pool, num_rows, MAX_BLOCKS, BLOCK)
        self.num_rows = num_rows
        self.histories: dict[int, str] = {}  # row -> its computed tokens
        self.memory: dict[tuple[int, int], str] = {}  # (block, row in it) -> history up to there
        self.keys: dict[int, BlockKeys] = {}

    def free_row(self) -> int | None:
        return next((r for r in range(1, self.num_rows) if r not in self.histories), None)

    def table(self, row: int) -> list[int]:
        return self.manager.block_tables[row, : self.manager.num_blocks[row]].tolist()

    def snapshot(self):
        tables = {row: self.table(row) for row in self.histories}
        return tables, self.manager.stats()

    def compute(self, row: int, tokens: str) -> None:
        """Write `tokens` behind what the row has computed."""
        table = self.table(row)
        for token in tokens:
            block, place = divmod(len(self.histories[row]), BLOCK)
            # Blocks that others hold, or that have a key, are never written.
            assert self.pool.references(table[block]) == 1
            self.histories[row] += token
            self.memory[table[block], place] = self.histories[row]

    def bind(self, row: int) -> None:
        """Bind all full blocks of a row, as the scheduler does after a step."""
        keys, history = self.keys[row], self.histories[row]
        first = len(keys)
        new = keys.cover(pack_tokens([ord(token) for token in history]), len(history))
        self.manager.bind(row, first, new)

    def admit(self, prompt: str) -> None:
        row = self.free_row()
        if row is None:
            return
        keys = BlockKeys(ROOT, BLOCK)
        keys.cover(pack_tokens([ord(token) for token in prompt]), max(0, len(prompt) - 1))
        hit = self.manager.match(keys.keys)
        before, stats = self.snapshot()
        found = self.pool.index.blocks(keys.keys[:hit]).tolist()
        needed = self.manager.blocks_for(len(prompt)) - hit
        room = stats.blocks.free - sum(self.pool.references(block) == 0 for block in found)
        got = self.manager.admit(row, len(prompt), hit, keys.keys)
        if needed > room:
            assert got == Shortage(needed, room)
            assert self.snapshot() == (before, stats)
            assert not self.manager.held[row]
            return
        assert got is None
        assert self.table(row)[:hit] == found
        self.histories[row] = prompt[: hit * BLOCK]
        keys.truncate(hit)
        self.keys[row] = keys
        self.compute(row, prompt[hit * BLOCK :])

    def grow(self, more: dict[int, str]) -> None:
        rows = [row for row in more if len(self.histories[row]) + len(more[row]) <= 40]
        lengths = [len(self.histories[row]) + len(more[row]) for row in rows]
        before, stats = self.snapshot()
        missing = sum(
            max(0, self.manager.blocks_for(length) - len(before[row]))
            for row, length in zip(rows, lengths, strict=True)
        )
        got = self.manager.grow(np.array(rows, dtype=np.int64), np.array(lengths, dtype=np.int64))
        if missing > stats.blocks.free:
            assert got == Shortage(missing, stats.blocks.free)
            assert self.snapshot() == (before, stats)
            return
        assert got is None
        for row in rows:
            self.compute(row, more[row])

    def rollback(self, row: int, to_tokens: int) -> None:
        before = self.snapshot()
        try:
            self.manager.rollback(row, to_tokens)
        except InternalError:
            # Only a cut inside a block that another row holds too is refused.
            cut = before[0][row][to_tokens // BLOCK]
            assert to_tokens % BLOCK
            assert sum(cut in table for table in before[0].values()) > 1
            assert self.snapshot() == before
            return
        self.histories[row] = self.histories[row][:to_tokens]
        self.keys[row].truncate(to_tokens // BLOCK)

    def fork(self, parent: int, at: int) -> None:
        child = self.free_row()
        if child is None:
            return
        before = self.snapshot()
        copied = 1 if at % BLOCK else 0
        got = self.manager.fork(parent, child, at)
        if before[1].blocks.free < copied:
            assert got == Shortage(copied, before[1].blocks.free)
            assert self.snapshot() == before
            return
        assert not isinstance(got, Shortage)
        assert len(got) == copied
        for source, target in got:
            for place in range(BLOCK):
                if (source, place) in self.memory:
                    self.memory[target, place] = self.memory[source, place]
        self.histories[child] = self.histories[parent][:at]
        self.keys[child] = self.keys[parent].copy()
        self.keys[child].truncate(at // BLOCK)

    def release(self, row: int, keep_cached: bool) -> None:
        table, index = self.table(row), self.pool.index
        alone = [block for block in table if self.pool.references(block) == 1]
        free = self.pool.available
        full = self.keys.pop(row).keys
        known = index.match(full)  # not all: a duplicate may have had the key, and be evicted
        self.manager.release(row, keep_cached)
        del self.histories[row]
        assert self.pool.available == free + len(alone)
        if keep_cached:
            assert index.match(full) == known
        else:
            bound = index.blocks([key for key in full if key in index]).tolist()
            assert not set(bound) & set(alone)

    def verify(self) -> None:
        for row, history in self.histories.items():
            table = self.table(row)
            assert len(table) >= self.manager.blocks_for(len(history))
            for position in range(len(history)):
                read = self.memory[table[position // BLOCK], position % BLOCK]
                assert read == history[: position + 1]
        self.manager.check()
        stats = self.manager.stats()
        assert stats.rows == len(self.histories)
        held = {block for row in self.histories for block in self.table(row)}
        assert stats.blocks.used == len(held)
        assert stats.blocks.free + stats.blocks.used == stats.blocks.total

    def drain(self) -> None:
        for row in list(self.histories):
            self.release(row, True)
        stats = self.manager.stats()
        assert stats.blocks.free == stats.blocks.total
        assert stats.prefix.bound_blocks == stats.blocks.cached
        assert not self.manager.block_tables.any()
        self.manager.check()


TEXT = st.text("ab", max_size=20)


class KVManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 16), num_rows=st.integers(2, 6))
    def start(self, num_blocks, num_rows):
        self.model = Model(num_blocks, num_rows)

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.model.histories)))

    @rule(prompt=TEXT)
    def admit(self, prompt):
        self.model.admit(prompt)

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data())
    def grow(self, data):
        rows = st.sampled_from(sorted(self.model.histories))
        self.model.grow(data.draw(st.dictionaries(rows, st.text("ab", max_size=9), min_size=1)))

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data())
    def bind(self, data):
        self.model.bind(self.pick(data))

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data())
    def rollback(self, data):
        row = self.pick(data)
        self.model.rollback(row, data.draw(st.integers(0, len(self.model.histories[row]))))

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data)
        self.model.fork(parent, data.draw(st.integers(0, len(self.model.histories[parent]))))

    @precondition(lambda self: self.model.histories)
    @rule(data=st.data(), keep_cached=st.booleans())
    def release(self, data, keep_cached):
        row = self.pick(data)
        self.model.bind(row)
        self.model.release(row, keep_cached)

    @invariant()
    def holds(self):
        self.model.verify()

    def teardown(self):
        if hasattr(self, "model"):
            for row in self.model.histories:
                self.model.bind(row)
            self.model.drain()


TestKVManager = KVManagerMachine.TestCase
TestKVManager.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def walk(seed: int, operations: int) -> Model:
    """PC-7: insert, match, share, split, evict, abort, in random order; then drain."""
    source = random.Random(seed)
    model = Model(num_blocks=source.choice([12, 40, 90]), num_rows=8)
    texts = ["".join(source.choices("ab", k=36)) for _ in range(6)]

    def text(length: int) -> str:
        return source.choice(texts)[:length]

    for step in range(operations):
        row = source.choice(sorted(model.histories)) if model.histories else None
        action = source.random()
        if row is None or action < 0.25:
            model.admit(text(source.randrange(37)) + text(source.randrange(4)))
        elif action < 0.55:
            chosen = source.sample(sorted(model.histories), source.randint(1, len(model.histories)))
            model.grow({row: text(source.randrange(6)) for row in chosen})
        elif action < 0.65:
            model.bind(row)
        elif action < 0.7:
            model.rollback(row, source.randint(0, len(model.histories[row])))
        elif action < 0.75:
            model.fork(row, source.randint(0, len(model.histories[row])))
        elif action < 0.8:
            model.pool.evict(source.randrange(4))
        else:
            model.bind(row)
            model.release(row, keep_cached=source.random() < 0.8)
        if step % 97 == 0:
            model.verify()
    model.verify()
    for row in model.histories:
        model.bind(row)
    model.drain()
    return model


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pc7_random_walk(seed):
    stats = walk(seed, 2_000).manager.stats().prefix
    assert stats.hits > 100
    assert stats.removed > 100


@pytest.mark.slow
def test_pc7_long_random_walk():
    stats = walk(7, 100_000).manager.stats().prefix
    assert stats.hits > 20_000
    assert stats.removed > 20_000
