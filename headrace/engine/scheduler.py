"""Which rows run in the next step: a pure policy over tables, queues and block tables.

Contract: `plan` chooses rows and reserves their cache rows, `commit` takes what was drawn. No
torch, no clock, no IO: time comes in as `now` (seconds, monotonic), agreement between data-parallel
ranks as `votes`. The order of a step, who may pass whom, the victim rule and the bound on waiting
are written in `engine/README.md`; `engine/admission.py` holds what happens when somebody comes,
forks or gives way. A step in which nobody does costs a few array operations over all requests.
Called by `engine/engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.engine.admission import Admission, RowHooks, SchedulerLimits
from headrace.engine.outputs import ABORT, ERROR, LENGTH, NOTHING, RUNNING, STOP, Codes, StepOutput
from headrace.engine.plan import (
    NO_COPIES,
    Ints,
    StepPlan,
    StepResult,
    Tokens,
    Vote,
    selected,
)
from headrace.engine.queues import WaitQueues
from headrace.engine.sequence import NOT_AGED, NewRequest, Sequence
from headrace.engine.stats import EngineStats
from headrace.engine.tables import PREFILL, DecodeSet
from headrace.errors import InternalError
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
    ) -> None:
        """`kv` belongs to this object from now on; its rows are the rows of the request table.

        resume: rules of prefix hits; None, or no `root_key` (see `core.hashing`): nothing is looked
        up or kept. hooks: told who gets and loses a row.
        """
        self._limits = limits
        self._desk = Admission(kv, limits, resume, root_key, hooks)
        self._decodes = DecodeSet.of(self._desk.table, kv.num_blocks, kv.block_tokens)
        self._decodes_of = -1  # version that `_decodes` belongs to
        self._plans = 0
        self._void_until = 0  # number of the last plan that a restore made void
        self._all_ran = 0  # step in which all decoding rows ran last
        self._last: StepPlan | None = None  # newest plan, until it is committed

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

    def fail(self, request_id: str, message: str, code: str, now: float) -> StepOutput | None:
        """`cancel` for a request that cannot go on; message and code: of the HeadraceError."""
        output = self._desk.drop(request_id, ERROR, now)
        if output is not None:
            output.errors = dict.fromkeys(range(len(output)), message)
            output.error_codes = dict.fromkeys(range(len(output)), code)
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
            plan = self._mixed_plan(rows, now)
            if plan.total_rows == 0:
                return self._idle_plan(votes)
        self._last = plan
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepOutput:
        """Take the result of a plan: one token per sampling row.

        Shares whose row has changed hands since (cancelled, preempted), and plans that were
        overtaken by another plan of the same rows, are void.
        """
        if plan.number <= self._void_until:
            return NOTHING
        desk = self._desk
        desk.steps += 1
        desk.copied(plan.forks)
        decodes = self._decodes
        if plan is self._last and plan.version == desk.version and plan.rows is decodes.rows:
            output = self._commit_decodes(decodes, result, now)
        else:
            output = self._commit_any(plan, result, now)
        self._last = None
        return output

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

    def _mixed_plan(self, budget: int, now: float) -> StepPlan:
        """Decode rows, prompt chunks and new admissions."""
        decodes = self._decodes.rows
        prefills = np.array(self._desk.prefilling, dtype=np.int64)
        if decodes.size + prefills.size > budget:
            decodes, prefills, q_len = self._tight(decodes, prefills, budget)
        else:
            left = budget - decodes.size
            self._desk.admit(left, now)
            prefills, q_len = self._chunks(np.array(self._desk.prefilling, dtype=np.int64), left)
        table = self._desk.table
        rows = np.concatenate((decodes, prefills))
        table.last_step[rows] = self._desk.steps
        q_start = table.computed[rows]
        lengths = np.concatenate((np.ones(decodes.size, dtype=np.int64), q_len))
        all_logits = table.all_logits[rows]
        self._plans += 1
        return StepPlan(
            number=self._plans,
            version=self._desk.version,
            rows=rows,
            epochs=table.epoch[rows],
            q_start=q_start,
            q_len=lengths,
            samples=q_start + lengths == table.length[rows],
            decodes=decodes.size,
            total_rows=int(lengths.sum()),
            window_floor=table.window_floor[rows],
            write_from=table.write_from[rows],
            keep_from=table.keep_from[rows],
            all_logits=all_logits if all_logits.any() else None,
            block_copies=self._desk.block_copies_due(),
            slot_copies=self._desk.slot_copies_due(),
            forks=self._desk.forks_handed_out,
        )

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
        return table.length[rows] - table.computed[rows]

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
        q_len = _packed(wanted, budget - share)
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
            result.errors,
            result.ended,
            result.logprobs,
            result.prompt_logprobs,
        )
        # A bytes search: any() costs three times as much, which shows with a single request.
        hit = b"\x01" in (tokens == decodes.stops).tobytes()
        if hit or decodes.limit_in <= 0 or result.ended or not decodes.started:
            self._finish(output, rows, position, now)
        return output

    def _commit_any(self, plan: StepPlan, result: StepResult, now: float) -> StepOutput:
        """Prompt chunks, or shares that are void by now."""
        desk = self._desk
        table = desk.table
        rows = plan.rows
        valid = (table.epoch[rows] == plan.epochs) & (table.computed[rows] == plan.q_start)
        places = np.flatnonzero(valid[plan.samples])
        if places.size < result.tokens.size:
            result = selected(result, places)
        if not valid.all():
            rows = rows[valid]
        q_len = plan.q_len[valid]
        table.computed[rows] = plan.q_start[valid] + q_len
        sampled = rows[plan.samples[valid]]
        position = table.length[sampled]
        tokens = result.tokens.astype(np.int32, copy=False)
        table.tokens[sampled, position] = tokens
        table.length[sampled] = position + (tokens >= 0)
        for row in rows[table.state[rows] == PREFILL].tolist():
            desk.bind(row)
        desk.count_step(int(q_len.sum()), sampled.size)
        desk.start_decoding(sampled[table.state[sampled] == PREFILL])
        output = StepOutput(
            table.number[sampled],
            list(map(table.names.__getitem__, sampled.tolist())),
            position - table.prompt_length[sampled],
            tokens,
            np.zeros(sampled.size, dtype=np.int8),
            result.errors,
            result.ended,
            result.logprobs,
            result.prompt_logprobs,
        )
        self._decodes_of = -1
        self._finish(output, sampled, position, now)
        return output

    def _finish(self, output: StepOutput, rows: Ints, position: Ints, now: float) -> None:
        """First tokens, forks and ends of a step; sets what its output says of them."""
        desk = self._desk
        firsts = np.flatnonzero(output.index == 0)
        desk.note_first_tokens(rows[firsts], now)
        hits = zip(firsts.tolist(), map(desk.table.sequence, rows[firsts].tolist()), strict=True)
        output.cached = {i: one.resumed_at for i, one in hits if one.resumed_at > 0} or None
        codes = self._codes(output, rows, position)
        ending = np.flatnonzero(codes)
        for row in rows[(output.index == 0) & (output.tokens >= 0)].tolist():
            desk.fork_siblings(row, now)
        if ending.size == 0:
            return
        output.finish = codes
        for entry in ending.tolist():
            code = int(codes[entry])
            if code == ERROR and entry not in (output.errors or {}):
                text = f"The logits at position {position[entry] - 1} are not finite."
                output.errors = {**(output.errors or {}), entry: text}
            desk.end(desk.table.sequence(int(rows[entry])), code, now)

    def _codes(self, output: StepOutput, rows: Ints, position: Ints) -> Codes:
        """Why each answer ends, or RUNNING; a stop wins over the length."""
        table = self._desk.table
        tokens = output.tokens
        length = position + 1
        codes = np.where(length >= table.limit[rows], LENGTH, RUNNING).astype(np.int8)
        stops = (tokens == table.stops[1:, rows]).any(axis=0) & (tokens >= 0)
        codes[stops & (length >= table.stop_from[rows])] = STOP
        if output.ended:
            codes[list(output.ended)] = STOP
        codes[tokens < 0] = ERROR
        return codes


def _packed(wanted: Ints, budget: int) -> Ints:
    """How much each gets when all are served in order until `budget` is used up."""
    before = np.cumsum(wanted) - wanted
    packed: Ints = np.clip(budget - before, 0, wanted)
    return packed
