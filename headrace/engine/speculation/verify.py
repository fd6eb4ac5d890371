"""Verification: which drafts of a step stand, and what is emitted.

Contract: a request's rows are consecutive: the first draws the token behind its known ones, row j
the token behind drafts 1 .. j, all of them whether or not those drafts stand. `verify` draws every
row by its request's coupling (`engine/sampler.py`); a draft is accepted if it is the token of its
row and all before it were, and what is emitted is always the row's own token: the accepted drafts
and one more. So the tokens are distributed as without drafts, and in the `gumbel` coupling and in
greedy rows they are the same tokens, however many drafts are verified. Nothing of the state
changes; what is emitted is committed by `SamplerState.commit`. With one row per request this is
`sampler.sample`. Drafts come from `engine/speculation/draft_picker.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.edits import Prefixes
from headrace.engine.grammar.rows import Masks
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.plan import NO_TOKEN_DRAWN
from headrace.engine.sampler import DraftRows, draw, reported
from headrace.engine.sampling_state import SamplerState
from headrace.engine.speculation.draft_picker import NO_DRAFT, DraftPicker, draft_picker

__all__ = ["NO_DRAFT", "DraftPicker", "Verified", "VerifyRows", "draft_picker", "verify"]

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """T rows of R requests. Raises ValueError where the arrays contradict each other.

    rows: int64 [R], table rows. first: int64 [R], absolute position of the token that the request's
    first row draws. counts: int64 [R], rows of each: 1 and the drafts to verify. draft_ids: int64
    [T], the draft that each row checks; NO_DRAFT in the last row of a request, which draws freshly.
    draft_weights: [T, vocab], not normalised distributions that the drafts were drawn from, read by
    the `maximal` coupling only; None or a row of zeros for drafts that were not drawn at random.
    Drawn drafts may pass as such: that is right too, but accepts fewer.
    """

    rows: Ids
    first: Ids
    counts: Ids
    draft_ids: Ids
    draft_weights: Tensor | None = None

    def __post_init__(self) -> None:
        ends = self.counts.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        if not len(self.rows) == len(self.first) == len(self.counts):
            raise ValueError("rows, first and counts must have one entry per request.")
        if (self.counts < 1).any() or total != len(self.draft_ids):
            raise ValueError("counts must be at least 1 each and add up to the number of drafts.")
        if (self.draft_ids[ends - 1] >= 0).any():
            raise ValueError("The last row of a request checks no draft: its id must be -1.")
        if self.draft_weights is not None and len(self.draft_weights) != total:
            raise ValueError("draft_weights must have one row per draft id.")


@dataclass(frozen=True, slots=True)
class Verified:
    """tokens: int64 [T]; request r emits those of its first accepted[r] + 1 rows, the others are
    NO_TOKEN_DRAWN. A row that cannot draw (its highest logit is not finite) is NO_TOKEN_DRAWN too
    and ends acceptance. accepted: int64 [R], drafts accepted. logprobs: of the emitted tokens that
    want them, `index` counts the T rows, or None. agreement: float64 [T], 1 - TV of the target's
    and the draft's distribution, that is, the probability of acceptance under `maximal`; NaN where
    the draft's is not known; None: nowhere.
    """

    tokens: Ids
    accepted: Ids
    logprobs: LogprobRows | None = None
    agreement: NDArray[np.float64] | None = None


def verify(
    logits: Tensor, state: SamplerState, rows: VerifyRows, *, masks: Masks | None = None
) -> Verified:
    """Draw for logits [T, vocab] (fp32 or fp64), which are not changed, and accept drafts.

    masks: what the grammars of some of the T rows allow.
    """
    if len(rows.draft_ids) == len(rows.rows):  # nobody has a draft
        drawn = draw(logits, state, rows.rows, rows.first, masks=masks)
        none = np.zeros(len(rows.rows), dtype=np.int64)
        return Verified(drawn.tokens, none, reported(logits, state, rows.rows, drawn))
    ends = rows.counts.cumsum()
    begin = np.repeat(ends - rows.counts, rows.counts)
    places = np.arange(len(begin))
    table = np.repeat(rows.rows, rows.counts)
    positions = np.repeat(rows.first, rows.counts) + places - begin
    drafts = DraftRows(rows.draft_ids, Prefixes(rows.draft_ids, begin, places), rows.draft_weights)
    drawn = draw(logits, state, table, positions, drafts=drafts, masks=masks)
    # A row past which nothing is emitted: its draft, if any, is not its token.
    stops = (drawn.tokens != rows.draft_ids) | (rows.draft_ids < 0)
    last = np.minimum.reduceat(np.where(stops, places, len(places)), ends - rows.counts)
    emitted = places <= np.repeat(last, rows.counts)
    return Verified(
        np.where(emitted, drawn.tokens, NO_TOKEN_DRAWN),
        last - (ends - rows.counts),
        reported(logits, state, table, drawn, emitted),
        drawn.agreement,
    )
