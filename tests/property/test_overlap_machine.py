"""The scheduler with steps in flight and drafts: the same tokens, nothing leaks, nobody gets stuck.

A scripted device runs plans as the executor does: it alone knows how many drafts were accepted, so
it starts every decode share where the one before really ended.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from headrace.core.speculation import ADAPTIVE
from headrace.engine.plan import DraftReport, StepPlan, StepResult
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.speculation.controller import Controller
from headrace.kv.resume import ResumeRules
from tests.property.test_scheduler_machine import MOST_STEPS, SchedulerMachine, token_at
from tests.unit.engine.scheduling import BLOCK, make


def run_from(position: int) -> int:
    """Forced tokens from a position on, where requests have a grammar."""
    return max(0, 9 - position % 13)


class Device:
    """Tokens by row as the executor has them; hooks of the scheduler."""

    def __init__(self, draft_length: int, forces: bool) -> None:
        self.draft_length = draft_length
        self.forces = forces
        self.pending: list[tuple[int, Sequence | None, int]] = []
        self.rows: dict[int, tuple[Sequence, int]] = {}  # row -> whose, known length
        self.drafted: set[int] = set()
        self.written: dict[int, int] = {}

    def admitted(self, row: int, sequence: Sequence, tokens: np.ndarray) -> None:
        self.pending.append((row, sequence, tokens.size))

    def released(self, row: int) -> None:
        self.pending.append((row, None, 0))

    def launch(self) -> None:
        """Take in what happened to rows since the plan before."""
        for row, sequence, length in self.pending:
            self.rows.pop(row, None)
            self.drafted.discard(row)
            if sequence is not None:
                assert length
                self.rows[row] = sequence, length
        self.pending = []

    def run(self, plan: StepPlan, held_tokens: np.ndarray) -> StepResult:
        """held_tokens: int64 [B], tokens that the blocks of each share hold."""
        tokens: list[int] = []
        counts, verified, accepted, forced, ahead = [], [], [], [], []
        lengths, most_forced = np.zeros((2, plan.decodes), dtype=np.int64)
        if plan.drafts is not None:
            newest = np.full((plan.decodes, self.draft_length), 0.5)
            lengths = np.minimum(plan.drafts.decision.lengths(newest), plan.drafts.most)
            most_forced = plan.drafts.forced
        for share in np.flatnonzero(plan.samples).tolist():
            row = int(plan.rows[share])
            sequence, known = self.rows[row]
            room = sequence.request.length_limit - known
            drafts, certain = 0, run_from(known) if self.forces else 0
            if share < plan.decodes:
                drafts = int(lengths[share]) * (row in self.drafted)
                drafts = max(0, min(max(drafts, min(most_forced[share], certain)), room - 1))
                assert known + drafts <= held_tokens[share]
            else:
                assert known == plan.q_start[share] + plan.q_len[share] <= held_tokens[share]
            kept = min(drafts, (known * 5 + sum(sequence.request.request_id.encode())) % 7)
            kept = max(kept, min(certain, drafts))
            count = kept + 1 if room > 0 else 0
            tokens += [token_at(*sequence.name, known + place) for place in range(count)]
            self.rows[row] = sequence, known + count
            self.drafted.add(row)
            counts.append(count)
            used = min(certain, drafts) if count else 0
            forced.append(used)
            verified.append(drafts - used if count else 0)
            accepted.append(kept - used if count else 0)
            ahead.append(run_from(known + count) if count else 0)
        report = None
        if plan.drafts is not None:
            features = np.full((len(counts), self.draft_length), 0.5)
            lengths = [np.array(found, dtype=np.int64) for found in (verified, accepted, forced)]
            report = DraftReport(*lengths[:2], features, lengths[2])
            if not plan.drafts.decision.draft:
                self.drafted -= {
                    int(row)
                    for row in plan.sampling_rows
                    if self.rows[int(row)][0].request.drafts < 0
                }
        return StepResult(
            np.array(tokens, dtype=np.int64),
            counts=np.array(counts, dtype=np.int64),
            drafts=report,
            forced=np.array(ahead, dtype=np.int64) if self.forces else None,
        )


class OverlapMachine(SchedulerMachine):
    @initialize(
        blocks=st.integers(2, 14),
        seqs=st.integers(1, 5),
        extra_rows=st.integers(0, 24),
        ageing=st.integers(1, 12),
        replay=st.sampled_from([None, 0, 3]),
        keep=st.sampled_from([0, 5]),
        drafts=st.sampled_from([0, 1, 3, 5, ADAPTIVE]),
        ahead=st.sampled_from([0, 1]),
        forces=st.booleans(),
    )
    def start(  # type: ignore[override]
        self,
        blocks: int,
        seqs: int,
        extra_rows: int,
        ageing: int,
        replay: int | None,
        keep: int,
        drafts: int,
        ahead: int,
        forces: bool,
    ) -> None:
        rules = None
        if replay is not None:
            rules = ResumeRules("exact", max(keep, 1), replay, bool(keep), BLOCK)
        self.blocks, self.seqs, self.rows, self.ageing = blocks, seqs, seqs + extra_rows, ageing
        self.drafts, self.ahead = drafts, ahead
        self.device = Device(5, forces)
        controller = Controller(seqs + 1, 5, None) if drafts else None
        self.scheduler: Scheduler = make(
            blocks,
            seqs,
            self.rows,
            1000,
            ageing,
            rules,
            hooks=self.device,
            controller=controller,
            keep=keep,
        )
        self.expected = {}
        self.waiting_for = {}
        self.deadlines = {}
        self.steps = 0
        self.added = 0
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()

    @rule()
    def lose_what_is_in_flight(self) -> None:
        """The executor failed."""
        self.scheduler.abandon(0.0)
        self.in_flight.clear()
        assert self.scheduler.stats(0.0).running == 0

    def one_step(self) -> None:
        plan = self.scheduler.plan(0.0)
        ready = len(self.scheduler) > len(self.waiting_for)
        assert plan is not None or self.in_flight or not ready
        if plan is not None:
            self.check_plan(plan, self.rows)
            self.device.launch()
            self.scheduler.launch(plan)
            held = self.scheduler.kv.num_blocks[plan.rows].astype(np.int64) * BLOCK
            self.in_flight.append((plan, self.device.run(plan, held)))
        if self.in_flight and (plan is None or len(self.in_flight) > self.ahead):
            done, result = self.in_flight.popleft()
            self.take(list(self.scheduler.commit(done, result, 0.0)))
            self.steps = self.scheduler.stats(0.0).steps

    def check_plan(self, plan: StepPlan, rows: int) -> None:
        assert 0 < plan.total_rows <= rows
        assert len(set(plan.rows.tolist())) == plan.rows.size
        assert self.scheduler.kv.held[plan.rows].all()
        assert plan.samples[: plan.decodes].all()
        assert (plan.q_len >= 1).all() and (plan.q_len[: plan.decodes] == 1).all()
        if plan.drafts is not None:
            lengths = plan.drafts.decision.lengths(np.full((plan.decodes, 5), 0.5))
            lengths = np.maximum(lengths, plan.drafts.forced)
            assert (lengths <= plan.drafts.most).all()
            assert plan.total_rows >= plan.q_len.sum() + lengths.sum()

    # Rules of the base class about plans that are not launched, and its bound in steps.
    small_step = two_plans_in_flight = go_back_and_do_it_again = None  # type: ignore[assignment]
    nobody_waits_beyond_the_bound = lambda self: None  # type: ignore[assignment] # noqa: E731

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        super().teardown()

    def drained(self) -> Any:
        return not self.in_flight


assert MOST_STEPS > 0
TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
