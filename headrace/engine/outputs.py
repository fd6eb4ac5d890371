"""What leaves the engine in one step: new tokens and ends of requests, as arrays.

Contract: a `StepOutput` is built once per step, owns its arrays and stays valid as long as somebody
keeps it; per choice of a request the indices are gapless and exactly one entry has a finish code.
No object per request exists on the way: `StepOutput.chunks` builds those for whoever wants them.
Made by the scheduler; sent by `engine/host.py`, read by `LLM`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.core.output import FinishReason, TokenChunk
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.plan import NO_TOKEN_DRAWN, Ints, PromptRecords, Tokens
from headrace.engine.stops import EOS_ENDED, Ended
from headrace.errors import HeadraceError

Codes: TypeAlias = npt.NDArray[np.int8]

# Finish codes of StepOutput; 0 goes on.
RUNNING, STOP, LENGTH, ABORT, ERROR = range(5)
REASON_OF_CODE: tuple[FinishReason | None, ...] = (
    None,
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
)
_INTERNAL = HeadraceError.code
CODE_OF_REASON = {reason: code for code, reason in enumerate(REASON_OF_CODE)}


@dataclass(slots=True, eq=False)
class StepOutput:
    """New tokens and ends of n requests, at most one entry per choice of a request.

    numbers: int64 [n], of the choices as `Scheduler.enqueue` gave them. names: their (request id,
    choice). index: int64 [n], position in the output. tokens: int32 [n], NO_TOKEN_DRAWN: none.
    finish: int8 [n], RUNNING or why it ended. By entry, None where nobody has any: errors, texts of
    those that end with ERROR; error_codes, theirs if they are not internal errors; cached, prompt
    tokens that the prefix cache had, with first tokens; drafts, accepted and rejected ones of the
    whole answer, with its end; the others as in `StepResult`.
    """

    numbers: Ints
    names: Sequence[tuple[str, int]]
    index: Ints
    tokens: Tokens
    finish: Codes
    errors: Mapping[int, str] | None = None
    ended: Mapping[int, Ended] | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: Mapping[int, PromptRecords] | None = None
    cached: Mapping[int, int] | None = None
    error_codes: Mapping[int, str] | None = None
    drafts: Mapping[int, tuple[int, int]] | None = None

    def put_errors(self, errors: Mapping[int, HeadraceError]) -> None:
        """Say why entries end with ERROR."""
        if errors:
            self.errors = {entry: error.message for entry, error in errors.items()}
            codes = {entry: error.code for entry, error in errors.items()}
            self.error_codes = {e: code for e, code in codes.items() if code != _INTERNAL} or None

    def __len__(self) -> int:
        return int(self.numbers.size)

    def __iter__(self) -> Iterator[TokenChunk]:
        return self.chunks()

    def chunks(self) -> Iterator[TokenChunk]:
        """The entries as objects, in order."""
        return map(self.chunk, range(len(self)))

    def chunk(self, entry: int) -> TokenChunk:
        """One entry as an object."""
        request_id, choice = self.names[entry]
        token = int(self.tokens[entry])
        error = None if self.errors is None else self.errors.get(entry)
        end = EOS_ENDED if self.ended is None else self.ended.get(entry, EOS_ENDED)
        record = None if self.logprobs is None else self.logprobs.find(entry)
        prompts = self.prompt_logprobs
        accepted, rejected = (0, 0) if self.drafts is None else self.drafts.get(entry, (0, 0))
        return TokenChunk(
            request_id=request_id,
            index=int(self.index[entry]),
            tokens=() if token == NO_TOKEN_DRAWN else (token,),
            finish=REASON_OF_CODE[int(self.finish[entry])],
            error=error,
            error_code=None if error is None else (self.error_codes or {}).get(entry, _INTERNAL),
            choice=choice,
            stop=end.stop,
            stop_cut=end.stop_cut,
            logprobs=None if record is None else (record,),
            prompt_logprobs=None if prompts is None else prompts.get(entry),
            cached_tokens=0 if self.cached is None else self.cached.get(entry, 0),
            accepted_drafts=accepted,
            rejected_drafts=rejected,
        )

    def special_entries(self) -> set[int]:
        """Entries that are more than a token of a request that goes on."""
        special = set(np.flatnonzero(self.finish).tolist())
        special.update(self.prompt_logprobs or ())
        special.update(self.cached or ())
        if self.logprobs is not None:
            special.update(self.logprobs.index.tolist())
        return special

    @classmethod
    def of_chunks(cls, chunks: Sequence[TokenChunk], numbers: Sequence[int]) -> StepOutput:
        """An output of chunks of at most one token each, for engines without a scheduler."""
        ends = {
            entry: Ended(chunk.stop, chunk.stop_cut)
            for entry, chunk in enumerate(chunks)
            if chunk.stop is not None
        }
        return cls(
            numbers=np.array(numbers, dtype=np.int64),
            names=[(chunk.request_id, chunk.choice) for chunk in chunks],
            index=np.array([chunk.index for chunk in chunks], dtype=np.int64),
            tokens=np.array([(*c.tokens, NO_TOKEN_DRAWN)[0] for c in chunks], dtype=np.int32),
            finish=np.array([CODE_OF_REASON[c.finish] for c in chunks], dtype=np.int8),
            errors={i: c.error for i, c in enumerate(chunks) if c.error is not None} or None,
            error_codes={i: c.error_code for i, c in enumerate(chunks) if c.error_code} or None,
            ended=ends or None,
            cached={i: c.cached_tokens for i, c in enumerate(chunks) if c.cached_tokens} or None,
            drafts={
                i: (c.accepted_drafts, c.rejected_drafts)
                for i, c in enumerate(chunks)
                if c.accepted_drafts or c.rejected_drafts
            }
            or None,
        )

    @classmethod
    def concatenated(cls, parts: Sequence[StepOutput]) -> StepOutput:
        """The entries of several outputs, in order; only the last may have log probabilities."""
        if len(parts) == 1:
            return parts[0]
        first = sum(len(part) for part in parts[:-1])
        last = parts[-1]
        starts = np.cumsum([0, *(len(part) for part in parts)]).tolist()

        def moved(name: str) -> dict[int, Any]:
            out: dict[int, Any] = {}
            for start, part in zip(starts[:-1], parts, strict=True):
                out |= {start + entry: v for entry, v in (getattr(part, name) or {}).items()}
            return out

        return cls(
            numbers=np.concatenate([part.numbers for part in parts]),
            names=[name for part in parts for name in part.names],
            index=np.concatenate([part.index for part in parts]),
            tokens=np.concatenate([part.tokens for part in parts]),
            finish=np.concatenate([part.finish for part in parts]),
            errors=moved("errors"),
            error_codes=moved("error_codes"),
            ended=moved("ended"),
            logprobs=None if last.logprobs is None else _moved_rows(last.logprobs, first),
            prompt_logprobs=moved("prompt_logprobs"),
            cached=moved("cached"),
            drafts=moved("drafts"),
        )


NOTHING = StepOutput(
    numbers=np.zeros(0, dtype=np.int64),
    names=(),
    index=np.zeros(0, dtype=np.int64),
    tokens=np.zeros(0, dtype=np.int32),
    finish=np.zeros(0, dtype=np.int8),
)


def _moved_rows(rows: LogprobRows, by: int) -> LogprobRows:
    return LogprobRows(
        rows.index + by, rows.logprobs, rows.top_ids, rows.top_logprobs, rows.top_counts
    )
