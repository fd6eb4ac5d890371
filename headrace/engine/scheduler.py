"""Which rows run in the next step: a pure policy over tables, queues and block tables.

Contract: `plan` chooses rows and reserves their cache rows, `commit` takes what was drawn. No
torch, no clock, no IO: time comes in as `now` (seconds, monotonic), agreement between data-parallel
ranks as `votes`. The order of a step, who may pass whom, the victim rule and the bound on waiting
are written in `engine/README.md`; `engine/admission.py` holds what happens when somebody comes,
forks or gives way. A step in which nobody does costs a few array operations over all requests.
Called by `engine/engine.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.engine.admission import Admission, RowHooks, SchedulerLimits
from headrace.engine.commit import commit_shares, end_codes, finish, valid_shares
from headrace.engine.outputs import ABORT, ERROR, NOTHING, StepOutput
from headrace.engine.plan import (
    NO_COPIES,
    Flags,
    Ints,
    PlannedDrafts,
    StepPlan,
    StepResult,
    Tokens,
    Vote,
)
from headrace.engine.planned_drafts import commit_drafts, packed, plan_drafts
from headrace.engine.queues import WaitQueues
from headrace.engine.sequence import NOT_AGED, NewRequest, Sequence
from headrace.engine.speculation.controller import Controller
from headrace.engine.stats import EngineStats
from headrace.engine.tables import DECODE, PREFILL, DecodeSet
from headrace.errors import HeadraceError, InternalError, is_refusal
from headrace.kv.manager import KVManager
from headrace.kv.resume import ResumeRules

# The earliest prompt in work gets one of so many rows, whoever else is shorter.
EARLIEST_SHARE = 4

__all__ = ["NewRequest", "RowHooks", "Scheduler", "SchedulerLimits", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a scheduler knew at one moment, its cache accounting included."""

    state: dict[str, Any]


class Scheduler:
    """Waiting and running requests of one engine."""

    def __init__(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        *,
        resume: ResumeRules | None = None,
        root_key: bytes | None = None,
        hooks: RowHooks | None = None,
        controller: Controller | None = None,
    ) -> None:
        """`kv` belongs to this object from now on; its rows are the rows of the request table.

        resume: rules of prefix hits; None, or no `root_key` (see `core.hashing`): nothing is looked
        up or kept. hooks: told who gets and loses a row. controller: how many drafts are verified;
        None: none are, and `NewRequest.drafts` counts for nothing.
        """
        self._limits = limits
        self._controller = controller
        self._desk = Admission(kv, limits, resume, root_key, hooks, controller)
        self._decodes = DecodeSet.of(self._desk.table, kv.num_blocks, kv.block_tokens)
        self._decodes_of = -1  # version that `_decodes` belongs to
        self._plans = 0
        self._void_until = 0  # number of the last plan that a restore made void
        self._grammars_ran = False  # in the step committed last
        self._forcing = False  # somebody has forced tokens now
        self._all_ran = 0  # step in which all decoding rows ran last
        self._last: StepPlan | None = None  # newest plan, until it is committed
        self._in_flight: deque[StepPlan] = deque()  # launched, not committed

    # --- requests in and out -----------------------------------------------------------------

    @property
    def kv(self) -> KVManager:
        """Block tables, by row."""
        return self._desk.kv

    @property
    def tokens(self) -> Tokens:
        """Known tokens by row, int32 [num_rows, max_tokens]."""
        return self._desk.table.tokens

    @property
    def queues(self) -> WaitQueues:
        """Who waits."""
        return self._desk.queues

    def sequence(self, row: int) -> Sequence:
        """Who has a row. Raises InternalError for a free one."""
        return self._desk.table.sequence(row)

    @property
    def forks(self) -> int:
        """Choices that were started from the prompt of their request, since the start."""
        return self._desk.forks_handed_out

    @property
    def request_ids(self) -> list[str]:
        """Ids of all requests that have not ended."""
        return list(self._desk.requests)

    def __len__(self) -> int:
        return len(self._desk.requests)

    def enqueue(self, request: NewRequest, now: float) -> int:
        """Take a request in; choice i has the returned number + i.

        Raises InvalidRequest (its id is in use), ContextTooLong (all blocks together cannot hold
        it), Overloaded (the queue is full).
        """
        return self._desk.enqueue(request, now)

    def cancel(self, request_id: str, now: float) -> StepOutput | None:
        """Drop a request and free all it holds at once; its last entries, None if it is unknown."""
        return self._desk.drop(request_id, ABORT, now)

    def fail(self, request_id: str, error: HeadraceError, now: float) -> StepOutput | None:
        """`cancel` for a request that cannot go on, and why."""
        output = self._desk.drop(request_id, ERROR, now, refused=is_refusal(error.code))
        if output is not None:
            output.put_errors(dict.fromkeys(range(len(output)), error))
        return output

    def preempt(self, request_id: str, now: float) -> None:
        """Take the rows of a request away; it is computed again later. Unknown ids are ignored."""
        for sequence in self._desk.requests.get(request_id, ()):
            if sequence.row:
                self._desk.preempt(sequence.row, now)

    def ready(self, request_id: str, why: str, now: float) -> None:
        """An external event that a request waits for has come; unknown ones are ignored."""
        self._desk.ready(request_id, why, now)

    # --- one step ----------------------------------------------------------------------------

    def vote(self) -> Vote:
        """What this rank tells the others before they plan."""
        desk = self._desk
        prefill = desk.queues.has_ready or bool(desk.prefilling)
        return Vote(int(desk.table.running) + int(desk.queues.has_ready), prefill, desk.version)

    def plan(
        self, now: float, budget: int | None = None, votes: Items[Vote] | None = None
    ) -> StepPlan | None:
        """Rows of the next step; None where nobody can run.

        budget: rows at most, >= 1 (default and cap: max_num_batched_tokens). votes: of all ranks;
        where this one has nothing to do but another has, the plan is empty instead of None, so that
        all of them take part in the step's collectives.
        """
        desk = self._desk
        limit = self._limits.max_num_batched_tokens
        rows = limit if budget is None else min(budget, limit)
        desk.queues.age(desk.steps)
        # Without a grammar in the last step nobody has forced tokens.
        self._forcing = self._grammars_ran and bool(desk.table.forced.any())
        if self._in_flight or self._controller is not None or self._forcing:
            plan = self._plan_ahead(rows, now)
            return plan if plan.total_rows else self._idle_plan(votes)
        self._refresh()
        if self._decodes.growth_in < 0:
            self._grow(now)
        decodes = self._decodes
        idle = not desk.prefilling and desk.candidate() is None
        if idle and decodes.rows.size <= rows:
            if decodes.rows.size == 0:
                return self._idle_plan(votes)
            plan = self._decode_plan(decodes)
            self._all_ran = desk.steps
        else:
            plan = self._mixed_plan(decodes.rows, rows, now)
            if plan.total_rows == 0:
                return self._idle_plan(votes)
        self._last = plan
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Say that a plan is being carried out: the next one is made on top of it.

        Plans are committed in the order of their launch. One that is not launched is overtaken by
        the next plan; plans with drafts must be.
        """
        self._in_flight.append(plan)
        self._desk.copying(plan.forks)
        if plan.drafts is not None and self._controller is not None:
            drafting = self._drafting(plan)
            rows = plan.sampling_rows
            self._desk.table.drafted[rows] = drafting
            self._controller.launch(rows[drafting])

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepOutput:
        """Take the result of a plan: the tokens of its sampling rows.

        Shares whose row has changed hands since (cancelled, preempted), and plans that were
        overtaken by another plan of the same rows, are void.
        """
        if plan.number <= self._void_until:
            return NOTHING
        if self._in_flight and self._in_flight.popleft() is not plan:
            raise InternalError("A plan is committed before one that was launched earlier.")
        desk = self._desk
        desk.steps += 1
        desk.copied(plan.forks)
        self._grammars_ran = result.forced is not None
        decodes = self._decodes
        if plan is self._last and plan.version == desk.version and plan.rows is decodes.rows:
            output = self._commit_decodes(decodes, result, now)
        else:
            valid = valid_shares(desk.table, plan)
            if result.drafts is not None:
                drafting = self._drafting(plan)
                commit_drafts(desk, self._controller, plan, result.drafts, valid, drafting)
            self._decodes_of = -1
            output = commit_shares(desk, plan, result, valid, now)
        self._last = None
        return output

    def abandon(self, now: float) -> None:
        """All plans in flight are lost: they are void, and whoever runs is computed again."""
        self._in_flight.clear()
        self._void_until = self._plans
        self._last = None
        for row in np.flatnonzero(self._desk.table.state).tolist():
            self._desk.preempt(row, now)

    def stats(self, now: float) -> EngineStats:
        """Counters at `now`."""
        return self._desk.stats(now)

    # --- state as a value --------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """A copy of all state; later calls do not change it."""
        return Snapshot(deepcopy(self._state()))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot; what it is fed from then on gives what it gave then.

        Plans made since are void. The hooks are told: all rows are released, then those of the
        snapshot are admitted.
        """
        self._desk.release_hooks()
        state = deepcopy(snapshot.state)
        for name, value in state["desk"].items():
            setattr(self._desk, name, value)
        self._all_ran = state["all_ran"]
        self._void_until = self._plans
        self._decodes_of = -1
        self._last = None
        self._in_flight.clear()
        self._desk.admit_hooks()

    def _state(self) -> dict[str, Any]:
        return {"desk": self._desk.state(), "all_ran": self._all_ran}

    # --- planning ----------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Gather the decoding rows again if somebody has come or gone."""
        desk = self._desk
        if self._decodes_of != desk.version:
            self._decodes = DecodeSet.of(desk.table, desk.kv.num_blocks, desk.kv.block_tokens)
            self._decodes_of = desk.version

    def _grow(self, now: float) -> None:
        """Give decoding rows that have filled their blocks a new one each; may preempt."""
        desk = self._desk
        while True:
            self._refresh()
            decodes = self._decodes
            room = desk.kv.num_blocks[decodes.rows] * desk.kv.block_tokens
            short = decodes.length > room
            rows = decodes.rows[short]
            desk.bind_newest(rows)  # the blocks before are complete
            if desk.kv.grow(rows, decodes.length[short]) is None:
                break
            desk.preempt(desk.victim(), now)
        decodes.regrown(desk.kv.num_blocks, desk.kv.block_tokens)

    def _decode_plan(self, decodes: DecodeSet) -> StepPlan:
        desk = self._desk
        self._plans += 1
        total = decodes.rows.size
        return StepPlan(
            self._plans,
            desk.version,
            decodes.rows,
            decodes.epochs,
            decodes.computed,
            decodes.ones,
            decodes.all,
            total,
            total,
            decodes.window_floor,
            decodes.write_from,
            decodes.keep_from,
            None,
            desk.block_copies_due(),
            desk.slot_copies_due(),
            desk.forks_handed_out,
        )

    def _plan_ahead(self, budget: int, now: float) -> StepPlan:
        """The same while another step is in flight, or with drafts to verify."""
        table = self._desk.table
        table.look_ahead(self._in_flight)
        return self._mixed_plan(self._grow_ahead(now), budget, now)

    def _mixed_plan(self, decodes: Ints, budget: int, now: float) -> StepPlan:
        """Decode rows with their drafts, prompt chunks and new admissions."""
        desk, table = self._desk, self._desk.table
        prefills = self._prefills()
        if decodes.size + prefills.size > budget:
            decodes, prefills, q_len = self._tight(decodes, prefills, budget)
            drafts, draft_rows = self._drafts(decodes, prefills, 0)
        else:
            left = budget - decodes.size
            drafts, draft_rows = self._drafts(decodes, prefills, left)
            left -= draft_rows
            desk.admit(left, now)
            prefills, q_len = self._chunks(self._prefills(), left)
        rows = np.concatenate((decodes, prefills))
        table.last_step[rows] = desk.steps
        carried = None
        if self._in_flight:
            q_start = np.concatenate((table.most[decodes] - 1, table.planned[prefills]))
            carried = table.flying[rows] > 0
        else:
            q_start = table.computed[rows]
        lengths = np.concatenate((np.ones(decodes.size, dtype=np.int64), q_len))
        samples = q_start + lengths == table.length[rows]
        samples[: decodes.size] = True
        all_logits = table.all_logits[rows]
        all_logits[: decodes.size] = False
        self._plans += 1
        plan = StepPlan(
            number=self._plans,
            version=desk.version,
            rows=rows,
            epochs=table.epoch[rows],
            q_start=q_start,
            q_len=lengths,
            samples=samples,
            decodes=decodes.size,
            total_rows=int(lengths.sum()) + draft_rows,
            window_floor=table.window_floor[rows],
            write_from=table.write_from[rows],
            keep_from=table.keep_from[rows],
            all_logits=all_logits if all_logits.any() else None,
            block_copies=desk.block_copies_due(),
            slot_copies=desk.slot_copies_due(),
            forks=desk.forks_handed_out,
            carried=carried,
            drafts=drafts,
        )
        return plan

    # --- looking ahead -----------------------------------------------------------------------

    def _prefills(self) -> Ints:
        """Rows with prompt rows that are neither computed nor in flight, by admission."""
        rows = np.array(self._desk.prefilling, dtype=np.int64)
        if not self._in_flight:
            return rows
        table = self._desk.table
        return rows[table.planned[rows] < table.length[rows]]

    def _ready_rows(self) -> Ints:
        """Rows that draw a token each in the next step, by arrival.

        Left out: who has certainly reached its length, and the first choice of several until the
        others have forked, for which its slot must not move on.
        """
        table = self._desk.table
        drawn = (table.state == PREFILL) & (table.flying > 0)
        for row in np.flatnonzero(drawn).tolist():
            drawn[row] = not table.sequence(row).siblings
        rows = np.flatnonzero(drawn | (table.state == DECODE))
        rows = rows[table.room(rows) > 0]
        return rows[table.number[rows].argsort()]

    def _grow_ahead(self, now: float) -> Ints:
        """Blocks for all tokens that may be known once all in flight has run; the ready rows.

        May preempt.
        """
        desk, table = self._desk, self._desk.table
        while True:
            rows = self._ready_rows()
            short = table.most[rows] > desk.kv.num_blocks[rows] * desk.kv.block_tokens
            desk.bind_newest(rows[short])
            if desk.kv.grow(rows[short], table.most[rows][short]) is None:
                return rows
            desk.preempt(desk.victim(), now)

    def _drafts(self, rows: Ints, prefills: Ints, left: int) -> tuple[PlannedDrafts | None, int]:
        """See `plan_drafts`; while prompts wait drafts get half of the rows."""
        if self._controller is None and not self._forcing:
            return None, 0
        waiting = int(self._remaining(prefills).sum())
        if waiting or self._desk.candidate() is not None:
            left //= 2
        return plan_drafts(self._desk, self._controller, rows, waiting, left)

    def _drafting(self, plan: StepPlan) -> Flags:
        """For which sampling rows of a plan new drafts are made, bool [S]."""
        wanted = self._desk.table.wanted[plan.sampling_rows]
        if plan.drafts is None:
            return np.zeros(wanted.size, dtype=np.bool_)
        return wanted != 0 if plan.drafts.decision.draft else wanted > 0

    def _idle_plan(self, votes: Items[Vote] | None) -> StepPlan | None:
        desk = self._desk
        if desk.table.running == 0 and desk.queues.has_ready:
            # Cannot happen while blocks and rows are accounted for; loud beats idle for ever.
            raise InternalError("The scheduler has requests but cannot run any of them.")
        if not votes or not any(vote.rows for vote in votes):
            return None
        none = np.zeros(0, dtype=np.int64)
        self._plans += 1
        return StepPlan(
            number=self._plans,
            version=desk.version,
            rows=none,
            epochs=none,
            q_start=none,
            q_len=none,
            samples=np.zeros(0, dtype=np.bool_),
            decodes=0,
            total_rows=0,
            window_floor=none,
            write_from=none,
            keep_from=none,
            all_logits=None,
            block_copies=NO_COPIES,
            slot_copies=NO_COPIES,
            forks=0,
        )

    def _remaining(self, rows: Ints) -> Ints:
        table = self._desk.table
        return table.length[rows] - table.planned[rows]

    def _age_ranks(self, rows: Ints) -> Ints:
        """Let rows age that have not run for `ageing_steps` steps; ranks of all `rows`."""
        table = self._desk.table
        last = np.maximum(table.last_step[rows], self._all_ran)
        late = self._desk.steps - last >= self._limits.ageing_steps
        for row in rows[late & (table.age_rank[rows] == NOT_AGED)].tolist():
            table.age_rank[row] = self._desk.queues.next_age_rank()
        return table.age_rank[rows]

    def _chunks(self, rows: Ints, budget: int) -> tuple[Ints, Ints]:
        """Which prompts get how many of `budget` rows.

        A quarter is the earliest one's, however long it is. For the rest: aged ones as they aged,
        then by priority, fewest remaining tokens, arrival.
        """
        if rows.size == 0:
            return rows, rows
        table = self._desk.table
        rank = self._age_ranks(rows)
        wanted = self._remaining(rows)
        place = np.where(rank == NOT_AGED, table.priority[rows], rank)
        order = np.lexsort((table.number[rows], wanted, place, rank == NOT_AGED))
        rows, wanted = rows[order], wanted[order]
        earliest = table.number[rows].argmin()
        share = min(int(wanted[earliest]), max(1, budget // EARLIEST_SHARE))
        wanted[earliest] -= share
        q_len = packed(wanted, budget - share)
        q_len[earliest] += share
        return rows[q_len > 0], q_len[q_len > 0]

    def _tight(self, decodes: Ints, prefills: Ints, budget: int) -> tuple[Ints, Ints, Ints]:
        """More requests than rows: one row for each of the first `budget` of them.

        Aged ones come first, then decoding before prompts, by priority; of equals the one that has
        waited longest for a row.
        """
        table = self._desk.table
        rows = np.concatenate((decodes, prefills))
        is_prefill = np.arange(rows.size) >= decodes.size
        aged = self._age_ranks(rows) != NOT_AGED
        kind = np.where(aged, False, is_prefill)
        priority = np.where(aged, 0, table.priority[rows])
        last = np.maximum(table.last_step[rows], self._all_ran)
        order = np.lexsort((table.number[rows], last, priority, kind, ~aged))
        chosen = np.zeros(rows.size, dtype=np.bool_)
        chosen[order[:budget]] = True
        prefills = rows[chosen & is_prefill]
        return rows[chosen & ~is_prefill], prefills, np.ones(prefills.size, dtype=np.int64)

    # --- committing --------------------------------------------------------------------------

    def _commit_decodes(self, decodes: DecodeSet, result: StepResult, now: float) -> StepOutput:
        """All rows decode and nobody has come or gone since the plan: the common case."""
        table = self._desk.table
        tokens = result.tokens.astype(np.int32, copy=False)
        rows, position = decodes.rows, decodes.length
        table.tokens[rows, position] = tokens
        if result.forced is not None:
            table.forced[rows] = result.forced
        length = position + decodes.ones
        table.length[rows] = length
        table.computed[rows] = position
        decodes.length, decodes.computed = length, position
        decodes.growth_in -= 1
        decodes.limit_in -= 1
        self._desk.count_step(rows.size, rows.size)
        output = StepOutput(
            decodes.numbers,
            decodes.names,
            position - decodes.prompt_length,
            tokens,
            decodes.running,
            None,
            result.ended,
            result.logprobs,
            result.prompt_logprobs,
        )
        if result.errors:
            output.put_errors(result.errors)
        # A bytes search: any() costs three times as much, which shows with a single request.
        hit = b"\x01" in (tokens == decodes.stops).tobytes()
        if hit or decodes.limit_in <= 0 or result.ended or not decodes.started:
            codes = end_codes(table, rows, position, tokens, result.ended)
            finish(self._desk, output, rows, position, codes, now)
        return output
