"""The scheduler as a policy: packing, admission, preemption, and properties on random loads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.output import FinishReason, TokenChunk
from headrace.core.sampling import SamplingParams
from headrace.engine.outputs import NO_TOKEN_DRAWN
from headrace.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from headrace.engine.sequence import Sequence
from headrace.errors import ContextTooLong, InvalidRequest, Overloaded
from headrace.kv.manager import KVManager
from headrace.kv.pool import BlockPool, SlotPool

BLOCK = 4
STOP = 99


def make(blocks: int = 100, seqs: int = 4, rows: int = 16, waiting: int = 100) -> Scheduler:
    kv = KVManager(BlockPool(blocks + 1), SlotPool(seqs + 1), block_tokens=BLOCK)
    return Scheduler(kv, SchedulerLimits(seqs, rows, waiting))


def sequence(name: str, prompt: int, output: int) -> Sequence:
    return Sequence(
        request_id=name,
        prompt=np.arange(prompt, dtype=np.int64),
        sampling=SamplingParams(max_tokens=output),
        seed=0,
        stop_ids=frozenset({STOP}),
        length_limit=prompt + output,
    )


def shape(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(s.sequence.request_id, s.q_start, s.q_len, s.samples) for s in plan.shares]


def run(scheduler: Scheduler, token: int = 7) -> tuple[list[Any], list[TokenChunk]]:
    """One step in which every sampling share draws `token`."""
    plan = scheduler.plan(0.0)
    assert plan is not None
    return shape(plan), scheduler.commit(plan, [token] * len(plan.sampling_shares), 0.0)


def test_a_long_prompt_is_cut_into_chunks() -> None:
    scheduler = make(rows=10)
    scheduler.enqueue(sequence("a", 25, 2), 0.0)
    assert run(scheduler) == ([("a", 0, 10, False)], [])
    assert run(scheduler) == ([("a", 10, 10, False)], [])
    assert run(scheduler) == ([("a", 20, 5, True)], [TokenChunk("a", 0, (7,))])
    assert run(scheduler) == (
        [("a", 25, 1, True)],
        [TokenChunk("a", 1, (7,), FinishReason.LENGTH)],
    )
    assert scheduler.plan(0.0) is None


def test_decode_rows_come_first_and_prefill_fills_the_rest() -> None:
    scheduler = make(rows=10)
    scheduler.enqueue(sequence("a", 3, 5), 0.0)
    run(scheduler)
    scheduler.enqueue(sequence("b", 4, 5), 0.0)
    scheduler.enqueue(sequence("c", 20, 5), 0.0)
    assert run(scheduler)[0] == [("a", 3, 1, True), ("b", 0, 4, True), ("c", 0, 5, False)]
    assert run(scheduler)[0] == [("a", 4, 1, True), ("b", 4, 1, True), ("c", 5, 8, False)]


def test_slots_limit_running_requests() -> None:
    scheduler = make(seqs=2)
    for name in "abc":
        scheduler.enqueue(sequence(name, 2, 2), 0.0)
    assert [name for name, *_ in run(scheduler)[0]] == ["a", "b"]
    assert scheduler.stats(3.0).waiting == 1
    assert scheduler.stats(3.0).oldest_waiting_s == 3.0
    run(scheduler)
    assert [name for name, *_ in run(scheduler)[0]] == ["c"]


def test_blocks_limit_admission_and_the_queue_keeps_its_order() -> None:
    scheduler = make(blocks=5)
    scheduler.enqueue(sequence("a", 8, 1), 0.0)
    scheduler.enqueue(sequence("b", 16, 1), 0.0)
    scheduler.enqueue(sequence("c", 1, 1), 0.0)  # would fit, but b came first
    assert [name for name, *_ in run(scheduler)[0]] == ["a"]
    assert [name for name, *_ in run(scheduler)[0]] == ["b"]
    assert [name for name, *_ in run(scheduler)[0]] == ["c"]


def test_the_latest_arrived_is_preempted_and_recomputed_with_its_output() -> None:
    scheduler = make(blocks=4)
    scheduler.enqueue(sequence("a", 4, 8), 0.0)
    scheduler.enqueue(sequence("b", 4, 8), 0.0)
    scheduler.enqueue(sequence("c", 4, 2), 0.0)
    seen = [run(scheduler)[0] for _ in range(5)]
    assert seen[0] == [("a", 0, 4, True), ("b", 0, 4, True)]
    assert seen[4] == [("a", 7, 1, True), ("b", 7, 1, True)]
    assert scheduler.stats(0.0).free_blocks == 0
    # a needs a third block: b makes room and waits in front of c.
    assert run(scheduler)[0] == [("a", 8, 1, True)]
    assert scheduler.stats(0.0).preemptions == 1
    assert [run(scheduler)[0] for _ in range(2)] == [[("a", 9, 1, True)], [("a", 10, 1, True)]]
    rows, chunks = run(scheduler)
    assert rows == [("b", 0, 9, True)]
    assert chunks == [TokenChunk("b", 5, (7,))]


def test_results_of_preempted_and_cancelled_shares_are_void() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.enqueue(sequence(name, 2, 4), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.cancel("a") == TokenChunk("a", 0, (), FinishReason.ABORT)
    scheduler.enqueue(sequence("a", 3, 4), 0.0)  # the id again, but another request
    assert scheduler.commit(plan, [5, 6], 0.0) == [TokenChunk("b", 0, (6,))]
    assert scheduler.cancel("unknown") is None
    plan = scheduler.plan(0.0)
    plan.shares[0].sequence.restart()
    chunks = scheduler.commit(plan, [5, 6], 0.0)
    assert [chunk.request_id for chunk in chunks] == ["a"]


def test_cancel_frees_at_once() -> None:
    scheduler = make(blocks=8)
    scheduler.enqueue(sequence("a", 9, 4), 0.0)
    run(scheduler)
    assert scheduler.stats(0.0).free_blocks == 5
    assert scheduler.cancel("a") == TokenChunk("a", 1, (), FinishReason.ABORT)
    stats = scheduler.stats(0.0)
    assert (stats.free_blocks, stats.running, stats.aborted, stats.finished) == (8, 0, 1, 1)


def test_stop_token_and_broken_row_end_only_their_request() -> None:
    scheduler = make()
    for name in "abc":
        scheduler.enqueue(sequence(name, 2, 4), 0.0)
    plan = scheduler.plan(0.0)
    first, second, third = scheduler.commit(plan, [STOP, NO_TOKEN_DRAWN, 5], 0.0)
    assert first == TokenChunk("a", 0, (STOP,), FinishReason.STOP)
    assert (second.request_id, second.tokens, second.finish) == ("b", (), FinishReason.ERROR)
    assert "position 1" in second.error and second.error_code == "internal_error"
    assert third == TokenChunk("c", 0, (5,))
    assert scheduler.stats(0.0).failed == 1


def test_requests_that_cannot_be_taken() -> None:
    scheduler = make(blocks=4, waiting=2)
    with pytest.raises(ContextTooLong, match=r"17 tokens.*5 blocks.*limit is 4 blocks"):
        scheduler.enqueue(sequence("a", 10, 7), 0.0)
    scheduler.enqueue(sequence("a", 10, 6), 0.0)
    with pytest.raises(InvalidRequest, match="'a' is already in use"):
        scheduler.enqueue(sequence("a", 1, 1), 0.0)
    scheduler.enqueue(sequence("b", 1, 1), 0.0)
    with pytest.raises(Overloaded, match="2 requests are waiting") as caught:
        scheduler.enqueue(sequence("c", 1, 1), 0.0)
    assert caught.value.retry_after_s > 0


def test_waiting_times_are_counted() -> None:
    scheduler = make(seqs=1)
    scheduler.enqueue(sequence("a", 2, 1), 1.0)
    scheduler.enqueue(sequence("b", 2, 2), 2.0)
    for now in (4.0, 5.0):
        plan = scheduler.plan(now)
        scheduler.commit(plan, [5], now + 0.5)
    stats = scheduler.stats(6.0)
    assert (stats.admissions, stats.queue_wait_s) == (2, 3.0 + 3.0)
    assert (stats.first_tokens, stats.first_token_s) == (2, 3.5 + 3.5)
    assert (stats.steps, stats.computed_tokens, stats.drawn_tokens) == (2, 4, 2)


# --- properties ------------------------------------------------------------------------------


class Driver:
    """Steps a scheduler with checks after every call."""

    def __init__(self, blocks: int, seqs: int, rows: int) -> None:
        self.blocks, self.rows = blocks, rows
        self.kv = KVManager(BlockPool(blocks + 1), SlotPool(seqs + 1), block_tokens=BLOCK)
        self.scheduler = Scheduler(self.kv, SchedulerLimits(seqs, rows, 1000))
        self.alive: dict[str, Sequence] = {}  # by arrival
        self.received: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.expected: dict[str, int] = {}
        self.first_planned: list[int] = []

    def add(self, prompt: int, output: int) -> None:
        name = f"r{len(self.expected)}"
        # What any pool of this size can hold.
        prompt = min(prompt, self.blocks * BLOCK - 1)
        output = min(output, self.blocks * BLOCK - prompt)
        item = sequence(name, prompt, output)
        self.scheduler.enqueue(item, 0.0)
        self.alive[name] = item
        self.received[name] = []
        self.expected[name] = output

    def abort(self, pick: int) -> None:
        if self.alive:
            name = list(self.alive)[pick % len(self.alive)]
            self.take(self.scheduler.cancel(name))
            self.kv.check()

    def take(self, chunk: TokenChunk) -> None:
        assert chunk.request_id in self.alive, "chunk after the end"
        received = self.received[chunk.request_id]
        assert chunk.index == len(received)
        received += chunk.tokens
        if chunk.finish is not None:
            self.finish[chunk.request_id] = chunk.finish
            del self.alive[chunk.request_id]

    def step(self) -> None:
        earliest = next(iter(self.alive.values()), None)
        plan = self.scheduler.plan(0.0)
        if plan is None:
            assert earliest is None
            return
        self.check_plan(plan)
        # Ageing bound: whoever has waited longest advances in every single step.
        assert earliest is not None and any(s.sequence is earliest for s in plan.shares)
        # The token of a position never depends on the schedule.
        tokens = [(s.q_start + s.q_len) % 90 for s in plan.sampling_shares]
        for chunk in self.scheduler.commit(plan, tokens, 0.0):
            self.take(chunk)
        self.kv.check()

    def check_plan(self, plan: StepPlan) -> None:
        assert 0 < plan.total_rows <= self.rows
        names = [share.sequence.request_id for share in plan.shares]
        assert len(set(names)) == len(names)
        blocks = np.concatenate([share.block_table for share in plan.shares])
        assert len(set(blocks.tolist())) == len(blocks) and 0 not in blocks
        slots = [share.slot for share in plan.shares]
        assert len(set(slots)) == len(slots) and 0 not in slots
        for share in plan.shares:
            end = share.q_start + share.q_len
            assert share.q_len >= 1 and share.q_start == share.sequence.computed
            assert end <= len(share.block_table) * BLOCK
            assert share.samples == (end == share.sequence.length)
            if share.sequence.order not in self.first_planned:
                self.first_planned.append(share.sequence.order)


loads = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("step")),
    ),
    min_size=12,
    max_size=60,
)


@settings(max_examples=250, deadline=None)
@given(loads, st.integers(1, 12), st.integers(1, 4), st.integers(0, 9))
def test_random_loads(load: list[Any], blocks: int, seqs: int, extra_rows: int) -> None:
    driver = Driver(blocks, seqs, seqs + extra_rows)
    for operation, *arguments in load:
        getattr(driver, operation)(*arguments)
    # The ageing bound makes this finite: each step advances the earliest request.
    steps = 0
    while driver.alive:
        driver.step()
        steps += 1
        assert steps <= 60 * 60
    assert driver.scheduler.plan(0.0) is None
    stats = driver.kv.stats()
    assert stats.blocks.free == stats.blocks.total == blocks
    assert stats.slots.free == stats.slots.total and stats.requests == 0
    assert driver.first_planned == sorted(driver.first_planned)  # first come, first served
    assert len(driver.finish) == len(driver.expected)
    for name, reason in driver.finish.items():
        if reason is FinishReason.LENGTH:
            assert len(driver.received[name]) == driver.expected[name]
        else:
            assert reason is FinishReason.ABORT


def test_the_properties_reach_preemption() -> None:
    driver = Driver(blocks=6, seqs=3, rows=8)
    for _ in range(5):
        driver.add(4, 12)
    while driver.alive:
        driver.step()
    assert driver.scheduler.stats(0.0).preemptions > 0
    prompt_ends = [4 + index for index in range(12)]
    assert all(received == prompt_ends for received in driver.received.values())
