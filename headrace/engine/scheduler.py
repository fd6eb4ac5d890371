"""Which rows run in the next step: a pure policy over requests, blocks and slots.

Contract: `plan` chooses rows and reserves their cache rows, `commit` takes the drawn tokens of a
plan. No torch, no clock, no IO: time comes in as `now` (seconds, monotonic). Order of a step:
decoding requests (one row each), then prompts being computed, then new admissions, each by arrival.
When blocks run out the latest-arrived running request is the victim: its cache rows are dropped, it
goes back to the front of the queue and its tokens, drawn ones included, are computed again.
Nobody waits for ever: admission is first come, first served, the earliest running request is never
a victim of another one, and one request alone always fits. Called by `engine/engine.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from headrace.core.output import FinishReason, TokenChunk
from headrace.engine.outputs import (
    NO_TOKEN_DRAWN,
    EngineStats,
    abort_chunk,
    finish_of,
    not_finite_chunk,
    token_chunk,
)
from headrace.engine.sequence import Sequence
from headrace.errors import ContextTooLong, InternalError, InvalidRequest, Overloaded
from headrace.kv.manager import KVManager
from headrace.kv.pool import IdArray, Shortage

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs: requests computed at once; max_num_batched_tokens: rows of one step (at least
    max_num_seqs, so that each decoding request advances in every step); max_waiting: queue length.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class StepShare:
    """Rows [q_start, q_start + q_len) of one request in a step.

    samples: whether the last row draws a token, that is, the share ends at the last known token.
    epoch: of the request when it was planned; a later one makes the result void.
    """

    sequence: Sequence
    epoch: int
    q_start: int
    q_len: int
    samples: bool
    block_table: IdArray
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: shares in row order."""

    shares: tuple[StepShare, ...]

    @property
    def total_rows(self) -> int:
        """Rows of the step."""
        return sum(share.q_len for share in self.shares)

    @property
    def sampling_shares(self) -> list[StepShare]:
        """Shares that draw a token, in the order in which `commit` expects the tokens."""
        return [share for share in self.shares if share.samples]


class Scheduler:
    """Waiting and running requests of one engine."""

    def __init__(self, kv: KVManager, limits: SchedulerLimits) -> None:
        self._kv = kv
        self._limits = limits
        self._waiting: deque[Sequence] = deque()  # by arrival; preempted ones come first
        self._running: list[Sequence] = []  # by arrival
        self._known: dict[str, Sequence] = {}
        self._arrivals = 0
        self._steps = 0
        self._computed_tokens = 0
        self._drawn_tokens = 0
        self._preemptions = 0
        self._admissions = 0
        self._queue_wait_s = 0.0
        self._first_tokens = 0
        self._first_token_s = 0.0
        self._ended: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)

    # --- requests in and out -----------------------------------------------------------------

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Take a request in.

        Raises InvalidRequest (its id is in use), ContextTooLong (all blocks together cannot hold
        it), Overloaded (the queue is full).
        """
        if sequence.request_id in self._known:
            raise InvalidRequest(f"Request id {sequence.request_id!r} is already in use.")
        total_blocks = self._kv.stats().blocks.total
        if self._kv.blocks_for(sequence.length_limit) > total_blocks:
            raise ContextTooLong(
                f"The request needs {sequence.length_limit} tokens (prompt "
                f"{sequence.prompt_length}, output up to "
                f"{sequence.length_limit - sequence.prompt_length}), that is "
                f"{self._kv.blocks_for(sequence.length_limit)} blocks of KV cache; the limit is "
                f"{total_blocks} blocks."
            )
        if len(self._waiting) >= self._limits.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting, the limit is "
                f"{self._limits.max_waiting}. Try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        sequence.order = self._arrivals
        sequence.arrival_s = sequence.queued_s = now
        self._arrivals += 1
        self._known[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> TokenChunk | None:
        """Drop a request and free all it holds at once; None if it is unknown or has ended."""
        sequence = self._known.get(request_id)
        if sequence is None:
            return None
        self._end(sequence, FinishReason.ABORT)
        return abort_chunk(sequence)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all requests that have not ended."""
        return list(self._known)

    def __len__(self) -> int:
        return len(self._known)

    # --- one step ----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Rows of the next step, at most `max_num_batched_tokens`; None without requests."""
        shares = self._plan_decodes(now)
        budget = self._limits.max_num_batched_tokens - len(shares)
        for sequence in self._running:
            if budget > 0 and not sequence.decoding:
                shares.append(self._share(sequence, budget))
                budget -= shares[-1].q_len
        while budget > 0 and self._admit_next(now):
            shares.append(self._share(self._running[-1], budget))
            budget -= shares[-1].q_len
        if not shares and self._known:
            # Cannot happen while blocks and slots are accounted for; loud beats idle for ever.
            raise InternalError("The scheduler has requests but cannot run any of them.")
        return StepPlan(tuple(shares)) if shares else None

    def commit(self, plan: StepPlan, tokens: Items[int], now: float) -> list[TokenChunk]:
        """Take the result of a plan; `tokens` has one id (or NO_TOKEN_DRAWN) per sampling share."""
        self._steps += 1
        drawn = iter(tokens)
        chunks = []
        for share in plan.shares:
            token = next(drawn) if share.samples else NO_TOKEN_DRAWN
            sequence = share.sequence
            known = self._known.get(sequence.request_id)
            if known is not sequence or sequence.epoch != share.epoch:
                continue  # cancelled or preempted since: the result is void
            sequence.computed = share.q_start + share.q_len
            self._computed_tokens += share.q_len
            if share.samples:
                chunks.append(self._commit_token(sequence, token, now))
        return chunks

    def stats(self, now: float) -> EngineStats:
        """Counters at `now`."""
        blocks = self._kv.stats().blocks
        oldest = min((sequence.arrival_s for sequence in self._waiting), default=now)
        return EngineStats(
            waiting=len(self._waiting),
            running=len(self._running),
            oldest_waiting_s=max(0.0, now - oldest),
            free_blocks=blocks.free,
            total_blocks=blocks.total,
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            drawn_tokens=self._drawn_tokens,
            preemptions=self._preemptions,
            admissions=self._admissions,
            queue_wait_s=self._queue_wait_s,
            first_tokens=self._first_tokens,
            first_token_s=self._first_token_s,
            finished=sum(self._ended.values()),
            aborted=self._ended[FinishReason.ABORT],
            failed=self._ended[FinishReason.ERROR],
        )

    # --- inside ------------------------------------------------------------------------------

    def _plan_decodes(self, now: float) -> list[StepShare]:
        """One row per decoding request, earliest first, with room for it; may preempt."""
        shares = []
        for sequence in [sequence for sequence in self._running if sequence.decoding]:
            # The victim arrived later than this request, so it is not among `shares` yet.
            while sequence in self._running and self._shortage(sequence):
                self._preempt(self._running[-1], now)
            if sequence in self._running:
                shares.append(self._share(sequence, 1))
        return shares

    def _shortage(self, sequence: Sequence) -> bool:
        return self._kv.grow(sequence.request_id, sequence.length) is not None

    def _preempt(self, victim: Sequence, now: float) -> None:
        self._running.remove(victim)
        self._kv.release(victim.request_id)
        victim.restart()
        victim.queued_s = now
        self._waiting.appendleft(victim)
        self._preemptions += 1

    def _admit_next(self, now: float) -> bool:
        """Move the head of the queue to the running requests if slots and blocks suffice.

        All blocks of the known tokens are taken at once, so a prompt never stalls half-way. One
        block per running request stays free: else the next growth would preempt the newcomer.
        """
        if not self._waiting or len(self._running) >= self._limits.max_num_seqs:
            return False
        head = self._waiting[0]
        needed = self._kv.blocks_for(head.length)
        if needed + len(self._running) > self._kv.stats().blocks.free:
            return False
        if isinstance(self._kv.admit(head.request_id, head.length), Shortage):
            return False
        self._waiting.popleft()
        self._running.append(head)
        self._admissions += 1
        self._queue_wait_s += now - head.queued_s
        return True

    def _share(self, sequence: Sequence, budget: int) -> StepShare:
        q_len = min(budget, sequence.length - sequence.computed)
        return StepShare(
            sequence=sequence,
            epoch=sequence.epoch,
            q_start=sequence.computed,
            q_len=q_len,
            samples=sequence.computed + q_len == sequence.length,
            block_table=self._kv.block_table(sequence.request_id),
            slot=self._kv.slot(sequence.request_id),
        )

    def _commit_token(self, sequence: Sequence, token: int, now: float) -> TokenChunk:
        if token == NO_TOKEN_DRAWN:
            self._end(sequence, FinishReason.ERROR)
            return not_finite_chunk(sequence)
        sequence.append(token)
        self._drawn_tokens += 1
        if sequence.output_length == 1:
            self._first_tokens += 1
            self._first_token_s += now - sequence.arrival_s
        finish = finish_of(sequence)
        if finish is not None:
            self._end(sequence, finish)
        return token_chunk(sequence, finish)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        del self._known[sequence.request_id]
        self._ended[reason] += 1
        if sequence in self._running:
            self._running.remove(sequence)
            self._kv.release(sequence.request_id)
        else:
            self._waiting.remove(sequence)
