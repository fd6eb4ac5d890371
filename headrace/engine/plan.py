"""What crosses between the scheduler and the rest of the engine in one step, as arrays.

Contract: a `StepPlan` says which rows run, a `StepResult` what was drawn for its sampling rows
(`engine/outputs.py` has what the requests get). Both are built once per step, own their arrays and
are read-only from then on. No torch, no objects per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.core.output import TokenLogprobs
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.stops import Ended
from headrace.errors import HeadraceError

Ints: TypeAlias = npt.NDArray[np.int64]
Tokens: TypeAlias = npt.NDArray[np.int32]
Flags: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
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


class Lengths(Protocol):
    """What a policy decided about the decode shares of a step; `StepDecision` is one."""

    @property
    def draft(self) -> bool:
        """Whether new drafts are made for requests that do not verify a fixed number."""
        ...

    def lengths(self, newest: Floats, /) -> Ints:
        """Drafts that each share verifies, int64 [decodes]; newest: survivals of the drafts at
        hand, float64 [decodes, G]."""
        ...


class NoLengths:
    """The `Lengths` of an engine without a drafter: forced tokens only."""

    draft = False

    def lengths(self, newest: Floats, /) -> Ints:
        """None for anybody."""
        return np.zeros(len(newest), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """Drafts that the decode shares of a plan verify, and whether new ones are made.

    most: int64 [decodes], each at most; cache memory is there for so many. decision: how many they
    are, which the executor asks once it knows the newest drafts. It takes less where a request has
    fewer drafts, or ends sooner. forced: int64 [decodes], of the tokens that the request's grammar
    forces, so many are taken whatever is decided.
    """

    most: Ints
    decision: Lengths
    forced: Ints


# Not frozen only for speed: a frozen dataclass takes 5 us to build, one of these 1 us.
@dataclass(slots=True, eq=False)
class StepPlan:
    """Row ranges [q_start, q_start + q_len) of B requests; decode shares first.

    number: counts plans. rows: int64 [B], table row = block table = slot = sampler row of each
    request. epochs: int64 [B], of the rows when planned; another one later makes the result void.
    q_start, q_len: int64 [B]; of a decode share q_len is 1, the rows of its drafts come on top.
    samples: bool [B], the share ends at the last known token, so its last row draws one. decodes:
    how many of the first shares decode. total_rows: of the step, drafts included. window_floor,
    write_from, keep_from: int64 [B], as in `model.batch.BatchRow`.
    all_logits: bool [B], prompt rows whose logits are all wanted; None: nobody. block_copies,
    slot_copies: int64 [n, 2], (source, target) pairs to copy before the step writes, in order.
    forks: how many forks, counted from the start, are copied then. version: of the scheduler's
    membership when planned. carried: bool [B], a share of the request was in flight when this was
    planned: where it starts is known to the executor alone, q_start is the furthest place. None:
    nobody's. drafts: None where this engine does not speculate.
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
    carried: Flags | None = None
    drafts: PlannedDrafts | None = None

    @property
    def sampling_rows(self) -> Ints:
        """Table rows that draw a token, int64 [S], in the order of `StepResult.tokens`."""
        return self.rows if self.decodes == self.rows.size else self.rows[self.samples]


@dataclass(slots=True, eq=False)
class StepResult:
    """What a plan's S sampling rows drew: T tokens, request after request.

    tokens: int [T], NO_TOKEN_DRAWN where nothing could be drawn. counts: int64 [S], how many
    of them each row got, 0 for one that had ended before; None: one each. The rest is by place in
    [T]; None: nobody has any. ended: answers that the sampler's stop rules end with this token
    (stop strings, and how a stop token is to be told). logprobs: of those that want them.
    prompt_logprobs: of prompts that are complete now, for their first chunk. errors: why nothing
    was drawn, where it is not that the logits were not finite. drafts: what was verified and
    drafted; None: nothing. forced: int64 [S], how many tokens behind the newest one of each row are
    known to come, whatever the logits are; None: no row has a grammar.
    """

    tokens: npt.NDArray[Any]
    ended: Mapping[int, Ended] | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: Mapping[int, PromptRecords] | None = None
    errors: Mapping[int, HeadraceError] | None = None
    counts: Ints | None = None
    drafts: DraftReport | None = None
    forced: Ints | None = None


@dataclass(slots=True, eq=False)
class DraftReport:
    """Drafts of one step, by place in the S sampling rows of its plan.

    verified: int64 [S], drafts that were checked; accepted: int64 [S], how many of them held; those
    of forced places do not count. features: float64 [S, G], of the new drafts, as in `Proposal`; 0
    where there are none. forced: int64 [S], forced tokens that were checked. rows: of the step, as
    it ran. drafted: tokens in new drafts. forward_s, sampler_s: seconds of the model, and of
    drawing and verifying.
    """

    verified: Ints
    accepted: Ints
    features: Floats
    forced: Ints
    rows: int = 0
    drafted: int = 0
    forward_s: float = 0.0
    sampler_s: float = 0.0


def selected(result: StepResult, places: Ints) -> StepResult:
    """The tokens of a result at `places` (ascending), renumbered from 0, without counts."""
    new_place = {old: new for new, old in enumerate(places.tolist())}

    def kept(column: Mapping[int, Any] | None) -> dict[int, Any] | None:
        if column is None:
            return None
        return {new_place[old]: value for old, value in column.items() if old in new_place}

    rows = result.logprobs
    if rows is not None:
        rows = rows.at(places)
    return StepResult(
        result.tokens[places],
        kept(result.ended),
        rows,
        kept(result.prompt_logprobs),
        kept(result.errors),
    )
