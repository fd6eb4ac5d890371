"""The counters of an engine.

Contract: `EngineStats` is what leaves the engine: plain numbers, of now or added up since the
start. `Counters` is kept by the scheduler; time is given to it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from headrace.engine.outputs import ABORT, ERROR
from headrace.engine.sequence import Sequence
from headrace.engine.speculation.controller import DraftStats
from headrace.kv.pool import PoolStats
from headrace.kv.resume import Resume


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine. Blocks hold 128 tokens each; block 0 is not counted.

    Of now: waiting / running (choices of requests; waiting_blocks, waiting_events,
    waiting_siblings: those of the waiting that lack blocks or rows, an external event, the prompt
    of their request), oldest_waiting_s (0 without one), free_blocks (cached ones included),
    total_blocks. Totals since the start: steps, computed_tokens (cache rows written, recomputed and
    replayed ones included), drawn_tokens, preemptions, finished (all reasons), aborted, failed,
    refused (both ended with an error, the latter because of what they asked for);
    admissions (again after a preemption) with the seconds spent in the queue; first tokens with the
    seconds from arrival to them; prefills and decodes that have ended with their seconds (from
    admission to the first token, and from there to the end); prefix_hit_tokens + prefix_miss_tokens
    = prompt tokens of first admissions; replayed_rows; drafted_tokens; draft_rounds: decode rows of
    requests that want drafts, also with none to verify. By place in the block, the first draft
    first, empty in an engine without a drafter: verified_drafts, judged_drafts (verified, and all
    before them accepted), accepted_drafts, and predicted_drafts, what the confidences of the judged
    ones add up to. forced_tokens: taken without a step of their own; drafts behind one of those in
    a round have no place of their own and do not count by place.
    """

    waiting: int
    running: int
    oldest_waiting_s: float
    free_blocks: int
    total_blocks: int
    steps: int
    computed_tokens: int
    drawn_tokens: int
    preemptions: int
    admissions: int
    queue_wait_s: float
    first_tokens: int
    first_token_s: float
    finished: int
    aborted: int
    failed: int
    waiting_blocks: int = 0
    waiting_events: int = 0
    waiting_siblings: int = 0
    prefills: int = 0
    prefill_s: float = 0.0
    decodes: int = 0
    decode_s: float = 0.0
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0
    replayed_rows: int = 0
    drafted_tokens: int = 0
    draft_rounds: int = 0
    verified_drafts: tuple[int, ...] = ()
    judged_drafts: tuple[int, ...] = ()
    accepted_drafts: tuple[int, ...] = ()
    predicted_drafts: tuple[float, ...] = ()
    forced_tokens: int = 0
    refused: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start; names as in `EngineStats`."""

    computed_tokens: int = 0
    drawn_tokens: int = 0
    preemptions: int = 0
    admissions: int = 0
    queue_wait_s: float = 0.0
    first_tokens: int = 0
    first_token_s: float = 0.0
    prefills: int = 0
    prefill_s: float = 0.0
    decodes: int = 0
    decode_s: float = 0.0
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0
    replayed_rows: int = 0
    drafted_tokens: int = 0
    draft_rounds: int = 0
    forced_tokens: int = 0
    refused: int = 0
    by_code: dict[int, int] = field(default_factory=dict)

    def admitted(self, sequence: Sequence, found: Resume, now: float) -> None:
        """A sequence left the queue, resumed where `found` says."""
        self.admissions += 1
        self.queue_wait_s += now - sequence.queued_s
        sequence.admitted_s = now
        self.replayed_rows += found.replay_rows
        if sequence.resumed_at < 0:
            self.prefix_hit_tokens += found.hit_tokens
            self.prefix_miss_tokens += sequence.prompt_length - found.hit_tokens

    def forked(self, sequence: Sequence, now: float) -> None:
        """A choice went on from the prompt of its request; its prompt is not counted again."""
        self.admissions += 1
        sequence.admitted_s = now

    def first_token(self, sequence: Sequence, now: float) -> None:
        """A sequence drew its first token."""
        self.first_tokens += 1
        self.first_token_s += now - sequence.arrival_s
        self.prefills += 1
        self.prefill_s += now - sequence.admitted_s
        sequence.first_token_s = now

    def count_drafts(self, rounds: int, verified: int, drafted: int) -> None:
        """What one step verified and drafted."""
        self.draft_rounds += rounds
        self.computed_tokens += verified
        self.drafted_tokens += drafted

    def count_forced(self, tokens: int) -> None:
        """Forced tokens of one step."""
        self.computed_tokens += tokens
        self.forced_tokens += tokens

    def preempted(self, sequence: Sequence, now: float) -> None:
        """A sequence gave way; it waits from now on."""
        self.preemptions += 1
        sequence.queued_s = now

    def ended(self, sequence: Sequence, code: int, now: float, *, refused: bool) -> None:
        """A sequence ended. refused: with an error that is its own fault."""
        self.refused += refused
        self.by_code[code] = self.by_code.get(code, 0) + 1
        if sequence.first_token_s >= 0:
            self.decodes += 1
            self.decode_s += now - sequence.first_token_s

    def stats(
        self,
        now: float,
        *,
        steps: int,
        running: int,
        waiting: Items[Sequence],
        causes: tuple[int, int, int, int],
        blocks: PoolStats,
        drafts: DraftStats | None,
    ) -> EngineStats:
        """All counters; `waiting` and `causes` as the queues give them."""
        oldest = min((sequence.arrival_s for sequence in waiting), default=now)
        totals = {name: getattr(self, name) for name in self.__slots__ if name != "by_code"}
        if drafts is not None:
            for name in ("verified", "judged", "accepted", "predicted"):
                totals[f"{name}_drafts"] = tuple(getattr(drafts, name).tolist())
        return EngineStats(
            waiting=len(waiting),
            running=running,
            oldest_waiting_s=max(0.0, now - oldest),
            free_blocks=blocks.free,
            total_blocks=blocks.total,
            steps=steps,
            finished=sum(self.by_code.values()),
            aborted=self.by_code.get(ABORT, 0),
            failed=self.by_code.get(ERROR, 0) - self.refused,
            waiting_blocks=causes[1],
            waiting_events=causes[2],
            waiting_siblings=causes[3],
            **totals,
        )
