"""What crosses between the scheduler and the rest of the engine in one step, as arrays.

Contract: a `StepPlan` says which rows run, a `StepResult` what was drawn for its sampling rows
(`engine/outputs.py` has what the requests get). Both are built once per step, own their arrays and
are read-only from then on. No torch, no objects per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.core.output import TokenLogprobs
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.stops import Ended

Ints: TypeAlias = npt.NDArray[np.int64]
Tokens: TypeAlias = npt.NDArray[np.int32]
Flags: TypeAlias = npt.NDArray[np.bool_]
PromptRecords: TypeAlias = "tuple[TokenLogprobs | None, ...]"

# What the sampler gives instead of a token id for a row that it cannot draw from.
NO_TOKEN_DRAWN = -1
NO_COPIES: Ints = np.zeros((0, 2), dtype=np.int64)


class Vote(NamedTuple):
    """What one data-parallel rank tells the others before they plan.

    rows: that it would run now. wants_prefill: prompts are among them. epoch: changes with every
    preemption, cancel and end.
    """

    rows: int
    wants_prefill: bool
    epoch: int


# Not frozen only for speed: a frozen dataclass takes 5 us to build, one of these 1 us.
@dataclass(slots=True, eq=False)
class StepPlan:
    """Row ranges [q_start, q_start + q_len) of B requests; decode rows first.

    number: counts plans. rows: int64 [B], table row = block table = slot = sampler row of each
    request. epochs: int64 [B], of the rows when planned; another one later makes the result void.
    q_start, q_len: int64 [B]. samples: bool [B], the share ends at the last known token, so its
    last row draws one. decodes: how many of the first shares are decode rows. total_rows: sum of
    q_len. window_floor, write_from, keep_from: int64 [B], as in `model.batch.BatchRow`.
    all_logits: bool [B], prompt rows whose logits are all wanted; None: nobody. block_copies,
    slot_copies: int64 [n, 2], (source, target) pairs to copy before the step writes, in order.
    forks: how many forks, counted from the start, are copied then. version: of the scheduler's
    membership when planned.
    """

    number: int
    version: int
    rows: Ints
    epochs: Ints
    q_start: Ints
    q_len: Ints
    samples: Flags
    decodes: int
    total_rows: int
    window_floor: Ints
    write_from: Ints
    keep_from: Ints
    all_logits: Flags | None
    block_copies: Ints
    slot_copies: Ints
    forks: int

    @property
    def sampling_rows(self) -> Ints:
        """Table rows that draw a token, int64 [S], in the order of `StepResult.tokens`."""
        return self.rows if self.decodes == self.rows.size else self.rows[self.samples]


@dataclass(slots=True, eq=False)
class StepResult:
    """What a plan's S sampling rows drew.

    tokens: int [S], NO_TOKEN_DRAWN where the logits were not finite. The rest is by place in [S];
    None: nobody has any. ended: answers that the sampler's stop rules end with this token (stop
    strings, and how a stop token is to be told). logprobs: of those that want them.
    prompt_logprobs: of prompts that are complete now, for their first chunk. errors: why nothing
    was drawn, where it is not the logits.
    """

    tokens: npt.NDArray[Any]
    ended: Mapping[int, Ended] | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: Mapping[int, PromptRecords] | None = None
    errors: Mapping[int, str] | None = None


def selected(result: StepResult, places: Ints) -> StepResult:
    """The entries of a result at `places` (ascending), renumbered from 0."""
    new_place = {old: new for new, old in enumerate(places.tolist())}

    def kept(column: Mapping[int, Any] | None) -> dict[int, Any] | None:
        if column is None:
            return None
        return {new_place[old]: value for old, value in column.items() if old in new_place}

    rows = result.logprobs
    if rows is not None:
        mine = np.isin(rows.index, places)
        rows = LogprobRows(
            np.searchsorted(places, rows.index[mine]),
            rows.logprobs[mine],
            rows.top_ids[mine],
            rows.top_logprobs[mine],
            rows.top_counts[mine],
        )
    return StepResult(
        result.tokens[places],
        kept(result.ended),
        rows,
        kept(result.prompt_logprobs),
        kept(result.errors),
    )
