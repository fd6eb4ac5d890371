"""The scheduler under random loads: nothing leaks, nothing is lost, nobody waits beyond the bound.

Tokens depend on request, choice and position only, so whatever the scheduler does, each choice must
get the same ones. The bound on waiting (engine/README.md): once a sequence has aged, it is admitted
before those ahead of it (running, or aged before) could do all their work one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from headrace.core.output import FinishReason, TokenChunk
from headrace.engine.plan import StepPlan, StepResult
from headrace.engine.scheduler import Scheduler
from headrace.kv.resume import ResumeRules
from tests.unit.engine.scheduling import BLOCK, STOP, make, request

MOST_STEPS = 4000


@dataclass
class Expected:
    """One choice: what it has got and what it must get."""

    prompt: int
    output: int
    received: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


def token_at(name: str, choice: int, position: int) -> int:
    return (7 * position + 11 * choice + sum(name.encode())) % 90


class SchedulerMachine(RuleBasedStateMachine):
    drafts = 0  # wanted by every request

    @initialize(
        blocks=st.integers(2, 14),
        seqs=st.integers(1, 5),
        extra_rows=st.integers(0, 12),
        ageing=st.integers(1, 12),
        replay=st.sampled_from([None, 0, 3]),
        keep=st.sampled_from([0, 5]),
    )
    def start(
        self, blocks: int, seqs: int, extra_rows: int, ageing: int, replay: int | None, keep: int
    ) -> None:
        rules = None
        if replay is not None:
            rules = ResumeRules("exact", max(keep, 1), replay, bool(keep), BLOCK)
        self.blocks, self.seqs, self.rows, self.ageing = blocks, seqs, seqs + extra_rows, ageing
        self.scheduler: Scheduler = make(blocks, seqs, self.rows, 1000, ageing, rules, keep=keep)
        self.expected: dict[tuple[str, int], Expected] = {}
        self.waiting_for: dict[str, str] = {}
        self.deadlines: dict[int, int] = {}  # number of an aged waiting sequence -> step
        self.steps = 0
        self.added = 0

    # --- what may happen ---------------------------------------------------------------------

    @rule(
        prompt=st.integers(1, 30),
        output=st.integers(1, 12),
        family=st.integers(0, 2),
        priority=st.integers(-1, 1),
        choices=st.sampled_from([1, 1, 1, 2, 4]),
        event=st.booleans(),
    )
    def add(
        self, prompt: int, output: int, family: int, priority: int, choices: int, event: bool
    ) -> None:
        name = f"r{self.added}"
        self.added += 1
        prompt = min(prompt, self.blocks * BLOCK - 1)  # what a pool of this size can hold
        output = min(output, self.blocks * BLOCK - prompt)
        why = ("event",) if event else ()
        ids = [(family + place) % 90 for place in range(prompt)]
        self.scheduler.enqueue(
            request(
                name,
                ids,
                output,
                priority=priority,
                choices=choices,
                waits_for=why,
                drafts=self.drafts,
            ),
            0.0,
        )
        for choice in range(choices):
            self.expected[name, choice] = Expected(prompt, output)
        if event:
            self.waiting_for[name] = "event"

    @precondition(lambda self: self.waiting_for)
    @rule(pick=st.integers(0, 99))
    def event(self, pick: int) -> None:
        name = list(self.waiting_for)[pick % len(self.waiting_for)]
        del self.waiting_for[name]
        self.scheduler.ready(name, "event", 0.0)

    @precondition(lambda self: len(self.scheduler))
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        name = self.scheduler.request_ids[pick % len(self.scheduler)]
        self.waiting_for.pop(name, None)
        output = self.scheduler.cancel(name, 0.0)
        assert output is not None
        self.take(list(output))
        assert name not in self.scheduler.request_ids

    @precondition(lambda self: len(self.scheduler))
    @rule(pick=st.integers(0, 99))
    def preempt(self, pick: int) -> None:
        name = self.scheduler.request_ids[pick % len(self.scheduler)]
        self.scheduler.preempt(name, 0.0)
        self.postpone(self.work_of(name))

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    @rule(budget=st.integers(1, 3))
    def small_step(self, budget: int) -> None:
        plan = self.scheduler.plan(0.0, budget=budget)
        if plan is not None:
            self.check_plan(plan, min(budget, self.rows))
            self.commit(plan)
        self.postpone(1)

    @rule(cancelled=st.integers(0, 99), swapped=st.booleans())
    def two_plans_in_flight(self, cancelled: int, swapped: bool) -> None:
        """The second is made before the first comes back; a request is gone by then."""
        plans = [self.scheduler.plan(0.0), self.scheduler.plan(0.0)]
        if len(self.scheduler):
            self.cancel(cancelled)
        for plan in plans[::-1] if swapped else plans:
            if plan is not None:
                self.commit(plan)
        self.postpone(2)

    @rule(count=st.integers(1, 4))
    def go_back_and_do_it_again(self, count: int) -> None:
        snapshot = self.scheduler.snapshot()
        before = self.run_blind(count)
        self.scheduler.restore(snapshot)
        after_restore = self.scheduler.snapshot()
        assert self.run_blind(count) == before
        self.scheduler.restore(after_restore)

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.kv.check()
        stats, blocks = self.scheduler.stats(0.0), self.scheduler.kv.stats().blocks
        assert blocks.free + blocks.used == blocks.total == self.blocks
        assert stats.running == self.scheduler.kv.stats().rows <= self.seqs
        alive = [key for key, one in self.expected.items() if one.finish is None]
        assert stats.waiting + stats.running == len(alive)
        assert stats.finished == len(self.expected) - len(alive)
        assert set(self.scheduler.request_ids) == {name for name, _ in alive}
        if not alive:
            assert blocks.free == blocks.total and not self.scheduler.kv.held.any()

    @invariant()
    def nobody_waits_beyond_the_bound(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        queues = self.scheduler.queues
        aged = sorted(
            (sequence for sequence in queues if sequence.aged and not sequence.row),
            key=lambda sequence: sequence.age_rank,
        )
        running = sum(self.work_of_row(row) for row in np.flatnonzero(self.scheduler.kv.held))
        ahead = running
        waiting = {sequence.number for sequence in aged}
        self.deadlines = {n: at for n, at in self.deadlines.items() if n in waiting}
        for sequence in aged:
            self.deadlines.setdefault(sequence.number, self.steps + ahead + 1)
            assert self.steps <= self.deadlines[sequence.number], sequence.name
            ahead += sequence.request.length_limit
        for sequence in queues:
            late = self.steps - sequence.queued_step + sequence.waited
            ready = sequence.number in queues._sequences
            # Marked by the next plan; two may be committed before that.
            assert sequence.aged or not ready or late <= self.ageing + 1

    def teardown(self) -> None:
        """Everything comes to its end, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        for name in list(self.waiting_for):
            self.scheduler.ready(name, "event", 0.0)
        self.waiting_for.clear()
        while len(self.scheduler):
            self.one_step()
            self.accounts_balance()
            self.nobody_waits_beyond_the_bound()
            assert self.steps < MOST_STEPS
        assert self.scheduler.plan(0.0) is None
        for (name, choice), one in self.expected.items():
            assert one.finish in (FinishReason.LENGTH, FinishReason.ABORT)
            wanted = [token_at(name, choice, one.prompt + i) for i in range(one.output)]
            assert one.received == wanted[: len(one.received)]
            assert one.finish is FinishReason.ABORT or len(one.received) == one.output

    # --- inside ------------------------------------------------------------------------------

    def one_step(self) -> None:
        plan = self.scheduler.plan(0.0)
        ready = len(self.scheduler) > len(self.waiting_for)
        assert (plan is not None) == ready
        if plan is None:
            return
        self.check_plan(plan, self.rows)
        self.commit(plan)

    def commit(self, plan: StepPlan) -> None:
        self.take(list(self.scheduler.commit(plan, self.result(plan), 0.0)))
        self.steps = self.scheduler.stats(0.0).steps

    def result(self, plan: StepPlan) -> StepResult:
        sampling = plan.samples
        rows = zip(plan.rows[sampling].tolist(), (plan.q_start + plan.q_len)[sampling], strict=True)
        tokens = []
        for row, position in rows:
            held = self.scheduler.kv.held[row]
            name, choice = self.scheduler.sequence(row).name if held else ("", 0)
            tokens.append(token_at(name, choice, int(position)))
        return StepResult(np.array(tokens, dtype=np.int64))

    def take(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            one = self.expected[chunk.request_id, chunk.choice]
            assert one.finish is None, "a chunk after the end"
            assert chunk.index == len(one.received)
            one.received += chunk.tokens
            one.finish = chunk.finish

    def check_plan(self, plan: StepPlan, rows: int) -> None:
        kv = self.scheduler.kv
        assert 0 < plan.total_rows == plan.q_len.sum() <= rows
        assert len(set(plan.rows.tolist())) == plan.rows.size and kv.held[plan.rows].all()
        ends = plan.q_start + plan.q_len
        assert (plan.q_len >= 1).all() and (plan.q_len[: plan.decodes] == 1).all()
        assert (ends <= kv.num_blocks[plan.rows] * BLOCK).all()
        assert plan.samples[: plan.decodes].all()
        # Nobody writes into a block that others read: from the first row that is written on.
        written: list[int] = []
        for row, start, end in zip(
            plan.rows, np.maximum(plan.q_start, plan.write_from), ends, strict=True
        ):
            written += kv.block_tables[row, start // BLOCK : -(-end // BLOCK)].tolist()
        assert len(set(written)) == len(written)
        everyone = [
            (row, block)
            for row in np.flatnonzero(kv.held).tolist()
            for block in kv.block_tables[row, : kv.num_blocks[row]].tolist()
        ]
        holders = [block for _, block in everyone]
        assert all(holders.count(block) == 1 for block in written)

    def run_blind(self, count: int) -> list[Any]:
        """Steps whose outcome is not taken in."""
        seen: list[Any] = []
        for _ in range(count):
            plan = self.scheduler.plan(0.0)
            if plan is None:
                break
            tables = self.scheduler.kv.block_tables[plan.rows].tolist()
            columns = (plan.rows, plan.q_start, plan.q_len, plan.samples, plan.slot_copies)
            seen.append((tables, [column.tolist() for column in columns]))
            seen += self.scheduler.commit(plan, self.result(plan), 0.0)
        return [*seen, self.scheduler.stats(0.0)]

    def work_of_row(self, row: int) -> int:
        return self.scheduler.sequence(int(row)).request.length_limit

    def work_of(self, name: str) -> int:
        return sum(one.prompt + one.output for (n, _), one in self.expected.items() if n == name)

    def postpone(self, steps: int) -> None:
        """Steps that do not count: something from outside held the others up."""
        self.deadlines = {number: at + steps for number, at in self.deadlines.items()}


assert STOP >= 90  # no token of the machine ends an answer
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
