"""What users report of prefix caches (spec/user-reports.md 2.1), without a model.

`Turns` does with a KVManager what a scheduler does for requests that come one after another: look
up, plan the resume, admit, bind each block once it is computed, release.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.core.hashing import BlockKeys, pack_tokens, root_key
from headrace.kv import BlockPool, BlocksRemoved, KVManager
from headrace.kv.resume import Resume, ResumeRules, plan_resume

BLOCK, KEEP, WINDOW = 128, 140, 128
ROOT = root_key(b"n" * 32, b"s" * 32)
BOUNDED = ResumeRules("bounded", KEEP, WINDOW, True)


def tokens(seed: int, blocks: float) -> list[int]:
    return random.Random(seed).choices(range(129280), k=int(blocks * BLOCK))


class Turns:
    """Requests over one pool. `memory[block]` stands for the rows of a block: who computed it."""

    def __init__(self, num_blocks: int, rules: ResumeRules = BOUNDED) -> None:
        self.removed = 0
        self.pool = BlockPool(num_blocks, self._listen)
        self.kv = KVManager(self.pool, 8, 3000)
        self.rules = rules
        self.memory: dict[int, bytes] = {}

    def _listen(self, event) -> None:
        if isinstance(event, BlocksRemoved):
            self.removed += len(event.keys)

    def start(self, row: int, prompt: list[int]) -> tuple[Resume, BlockKeys]:
        keys = BlockKeys(ROOT)
        keys.cover(pack_tokens(prompt), len(prompt))
        found = plan_resume(self.rules, len(prompt), self.kv.match(keys.keys))
        hit = found.hit_tokens // BLOCK
        assert self.kv.admit(row, len(prompt), hit, keys.keys) is None
        table = self.kv.block_tables[row]
        # The rows of the hit are those of this very prefix.
        assert [self.memory[block] for block in table[:hit].tolist()] == keys.keys[:hit]
        for block, key in zip(table[hit : len(keys)].tolist(), keys.keys[hit:], strict=True):
            assert self.pool.references(block) == 1, "a shared block would be written"
            self.memory[block] = key
        self.kv.bind(row, hit, keys.keys[hit:])
        return found, keys

    def turn(self, prompt: list[int], output: list[int] = ()) -> Resume:
        """One request from prompt to end; returns where it was resumed."""
        found, keys = self.start(1, prompt)
        whole = [*prompt, *output]
        assert self.kv.grow(np.array([1]), np.array([len(whole)])) is None
        first = len(keys)
        for i, key in enumerate(keys.cover(pack_tokens(whole), len(whole)), first):
            self.memory[int(self.kv.block_tables[1, i])] = key
        self.kv.bind(1, first, keys.keys[first:])
        self.kv.release(1)
        self.kv.check()
        return found


def longest_hit(shared: int, prompt: int) -> int:
    """Reuse as specified: the shared prefix, less KEEP where the tail is shorter, in blocks."""
    return min(shared // BLOCK, (prompt - KEEP) // BLOCK) * BLOCK


def test_pc1_a_prompt_sent_again_hits_every_time():
    turns = Turns(200)
    prompt = tokens(1, 40)
    assert turns.turn(prompt, tokens(2, 0.2)).hit_tokens == 0
    for seed in (3, 4, 5):
        assert turns.turn(prompt, tokens(seed, 0.2)).hit_tokens == longest_hit(5120, 5120)
    assert turns.turn(tokens(6, 40)).hit_tokens == 0
    assert turns.turn(prompt) == Resume(longest_hit(5120, 5120), WINDOW)


@pytest.mark.parametrize("tail_blocks", [0, 25, 50, 100])
def test_pc2_the_hit_does_not_depend_on_the_fresh_tail(tail_blocks):
    prefix = tokens(1, 50)
    turns = Turns(4 * (50 + tail_blocks) + 1)
    for turn in range(12):
        prompt = prefix + tokens(100 + turn, tail_blocks)
        found = turns.turn(prompt)
        if turn:
            assert found.hit_tokens == longest_hit(len(prefix), len(prompt))
            assert found.hit_tokens >= len(prefix) - KEEP - BLOCK


def test_pc5_sessions_do_not_evict_each_other_while_blocks_are_free():
    turns = Turns(2701)
    history = {name: tokens(seed, 156) for name, seed in (("a", 1), ("b", 2))}
    for turn in range(3):
        for name, prompt in history.items():
            found = turns.turn(prompt, answer := tokens(10 * turn + len(name), 2.5))
            if turn:
                computed = len(prompt) - found.start
                new = BLOCK * 5 // 2 + 40
                assert computed <= new + WINDOW + KEEP + BLOCK
            history[name] = prompt + answer + tokens(50 + turn, 40 / BLOCK)
    assert turns.removed == 0
    assert turns.kv.stats().prefix.removed == 0


def test_pc8_long_chat_reports_the_whole_prefix_each_turn():
    turns = Turns(1000)
    prompt, known = tokens(1, 20), 0
    for turn in range(30):
        answer = tokens(100 + turn, 3)
        found = turns.turn(prompt, answer)
        if turn:
            assert found.hit_tokens == longest_hit(known, len(prompt))
            assert found.replay_rows == WINDOW
        known = len(prompt) + len(answer)
        prompt = prompt + answer + tokens(200 + turn, 12.4)
    assert len(prompt) > 60_000


def test_pc9_shared_blocks_are_never_written():
    """Hits that end at every residue of the block; `Turns.start` checks each written block."""
    turns = Turns(3000)
    prefix = tokens(1, 10)
    turns.turn(prefix)
    before = dict(turns.memory)
    for extra in range(1, 129, 9):
        for row in (1, 2):
            turns.start(row, prefix + tokens(extra + row, 1) + [7] * extra)
        for row in (1, 2):
            turns.kv.release(row)
        turns.kv.check()
    assert {block: turns.memory[block] for block in before} == before
    assert turns.kv.stats().prefix.hits > 100


def test_pc11_two_alternating_conversations_keep_their_prefix():
    turns = Turns(2 * 60 + 60)
    history = {seed: tokens(seed, 50) for seed in (1, 2)}
    known = {1: 0, 2: 0}
    for turn in range(6):
        for seed, prompt in history.items():
            found = turns.turn(prompt, answer := tokens(seed + 10 * turn, 0.5))
            assert found.hit_tokens == longest_hit(known[seed], len(prompt))
            history[seed] = prompt + answer + tokens(seed + 99 * turn, 0.6)
        known = {seed: len(prompt) - int(0.6 * BLOCK) for seed, prompt in history.items()}


def test_pc15_hit_and_miss_add_up_and_are_reproducible():
    def run() -> list[tuple[int, int]]:
        turns, source, seen = Turns(400), random.Random(3), []
        for _ in range(60):
            prompt = tokens(source.randrange(5), 20)[: source.randrange(100, 2500)]
            prompt += tokens(source.randrange(1000), 3)
            before = turns.kv.stats().prefix
            found = turns.turn(prompt)
            after = turns.kv.stats().prefix
            assert (after.hits - before.hits) * BLOCK == found.hit_tokens
            blocks = after.hits - before.hits + after.misses - before.misses
            assert blocks == -(-len(prompt) // BLOCK)
            seen.append((found.hit_tokens, len(prompt) - found.hit_tokens))
        assert sum(hit > 0 for hit, _ in seen) > 20
        return seen

    assert run() == run()


def test_evicted_content_is_never_hit():
    """A pool of 60 blocks under 40 prompts of 20 blocks: `Turns.start` compares every hit."""
    turns, source = Turns(61), random.Random(1)
    hits = [turns.turn(tokens(source.randrange(6), 20)).hit_tokens for _ in range(80)]
    assert turns.removed > 200
    assert {0, longest_hit(2560, 2560)} <= set(hits)
