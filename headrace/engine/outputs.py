"""What leaves the engine: why a request ended, its chunks, and the counters of the engine.

Contract: `finish_of` holds the rules by which a token ends a request; the chunk makers build
`TokenChunk`s with gapless indices. Pure functions and plain data (no torch), used by the scheduler
and by whoever reads `EngineStats`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.output import FinishReason, TokenChunk
from headrace.engine.sequence import Sequence
from headrace.errors import HeadraceError

# What the sampler gives instead of a token id for a row it cannot draw from.
NO_TOKEN_DRAWN = -1


def finish_of(sequence: Sequence) -> FinishReason | None:
    """Why the newest token ends `sequence`, or None; a stop token wins over the length."""
    if int(sequence.tokens[-1]) in sequence.stop_ids:
        return FinishReason.STOP
    if sequence.length >= sequence.length_limit:
        return FinishReason.LENGTH
    return None


def token_chunk(sequence: Sequence, finish: FinishReason | None) -> TokenChunk:
    """The chunk of the token appended last."""
    return TokenChunk(
        request_id=sequence.request_id,
        index=sequence.output_length - 1,
        tokens=(int(sequence.tokens[-1]),),
        finish=finish,
    )


def abort_chunk(sequence: Sequence) -> TokenChunk:
    """The last chunk of a request whose caller gave it up; carries no token."""
    return TokenChunk(sequence.request_id, sequence.output_length, (), FinishReason.ABORT)


def not_finite_chunk(sequence: Sequence) -> TokenChunk:
    """The last chunk of a request whose logits hold NaN or infinity."""
    return TokenChunk(
        request_id=sequence.request_id,
        index=sequence.output_length,
        tokens=(),
        finish=FinishReason.ERROR,
        error=f"The logits at position {sequence.length - 1} are not finite.",
        error_code=HeadraceError.code,
    )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine. Blocks hold 128 tokens each; block 0 is not counted.

    waiting / running: requests. oldest_waiting_s: age of the longest waiting request, 0 without
    one. steps, computed_tokens (cache rows written, recomputed ones included), drawn_tokens,
    preemptions, finished (all reasons), aborted, failed: totals since the start, as are admissions
    (again after a preemption) with the seconds they waited in the queue, and first tokens with the
    seconds from arrival to them.
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
