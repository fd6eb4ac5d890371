"""What a step verifies: how many drafts in all, and whose. Pure functions of arrays.

How the engine uses it, each step (`controller.py` joins the parts and keeps the state):

    decision = budget(load, cost)            # when the step is planned
    lengths = decision.lengths(newest)       # when it is launched: int64 [R], drafts to verify

Two snapshots of survival (probability that a draft and all before it are accepted, float64 [R, G]):
`budget` takes that of the round BEFORE the drafts it admits, `lengths` that of these drafts. So
whether draft k of a request is verified depends on the drafts before it and on other requests,
never on draft k itself or what follows it: required for the `maximal` coupling, where the output
would else be biased, a matter of speed only for `gumbel`. `limits` must keep that rule too: they
may come from lengths and rooms, never from drafted ids (no cutting at what a grammar forbids).

`budget` maximises expected tokens / seconds over all prefixes of the sorted survivals, since costs
have steps and the first local maximum may be a poor one. Source: DSpark paper, algorithm 1, without
its early stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Floats, Ints
from headrace.errors import InternalError

LEAST_STEP_S = 1e-9


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step would run, R decoding requests (one row and one token each) and the rest.

    previous: float64 [R, G], survivals of the round before the newest drafts; 1 where they have
    not arrived (a draft that nobody has judged is worth a try, and trying is how it gets judged).
    Requests without a draft count 0, whatever stands here. wanted: int64 [R], `Policy.drafts` of
    each request. limits: int64 [R], most drafts that may be verified: 0 without a draft, fewer than
    G near the length limit. other_rows, other_tokens: rows of prompt chunks and how many of those
    requests draw a token. room: most drafts that the step has rows for; None: no bound.
    """

    previous: Floats
    wanted: Ints
    limits: Ints
    other_rows: int = 0
    other_tokens: int = 0
    room: int | None = None

    def __post_init__(self) -> None:
        shape = self.previous.shape
        if len(shape) != 2 or self.wanted.shape != shape[:1] or self.limits.shape != shape[:1]:
            raise InternalError(
                f"previous {shape}, wanted {self.wanted.shape} and limits {self.limits.shape} "
                "must be [R, G], [R] and [R]."
            )


@dataclass(frozen=True, slots=True)
class StepDecision:
    """fixed: int64 [R], drafts of requests with a fixed length. limits: int64 [R], most drafts of
    adaptive requests, 0 for the others. total: how many drafts of those are verified.
    draft: whether drafting for adaptive requests at the end of this step pays. expected_tokens,
    step_s: by the model that decided (0 without a cost model).
    """

    fixed: Ints
    limits: Ints
    total: int
    draft: bool
    expected_tokens: float
    step_s: float

    def lengths(self, newest: Floats) -> Ints:
        """Drafts that each request verifies, int64 [R]; newest: survivals float64 [R, G] of the
        drafts at hand, 1 where they have not arrived."""
        return self.fixed + split(self.total, newest, self.limits)


def budget(load: StepLoad, cost: StepCost | None, *, draft: bool | None = None) -> StepDecision:
    """How many drafts the step verifies in all: the best of all prefixes, none included.

    draft: whether a draft pass for the adaptive requests follows, which costs its time; None: it
    follows if a step with it is expected to be faster than one without speculation. cost None:
    unknown cost counts as flat, so everything is verified.
    """
    requests, length = load.previous.shape
    fixed, limits, most = _slots(load)
    if most < 0 or cost is None:
        return StepDecision(fixed, limits, max(most, 0), most >= 0 and draft is not False, 0.0, 0.0)
    rates = _ranked(load.previous, limits)[:most]
    tokens = np.empty(rates.size + 1)
    tokens[0] = requests + load.other_tokens
    tokens[0] += load.previous[np.arange(length) < fixed[:, None]].sum()
    tokens[1:] = tokens[0] + np.cumsum(rates)
    first_rows = requests + load.other_rows + int(fixed.sum())
    seconds = cost.verify_s(first_rows, tokens.size) + cost.sampler_s(requests + load.other_tokens)
    fixed_requests = int(np.count_nonzero(load.wanted > 0))
    adaptive_requests = int(np.count_nonzero(load.wanted == ADAPTIVE))
    seconds += cost.draft_s(fixed_requests)
    seconds = np.maximum(seconds, LEAST_STEP_S)
    drafting = seconds + cost.draft_s(fixed_requests + adaptive_requests)
    drafting -= cost.draft_s(fixed_requests)
    if draft is None:
        draft = bool(np.max(tokens / drafting) > tokens[0] / seconds[0])
    if draft:
        seconds = drafting
    total = int(np.argmax(tokens / seconds))
    return StepDecision(fixed, limits, total, draft, float(tokens[total]), float(seconds[total]))


def _slots(load: StepLoad) -> tuple[Ints, Ints, int]:
    """Drafts of fixed requests [R], most drafts of adaptive ones [R], and most of those in all
    (-1: there are no adaptive requests)."""
    is_adaptive = load.wanted == ADAPTIVE
    allowed = np.clip(load.limits, 0, load.previous.shape[1])
    fixed = np.where(is_adaptive, 0, np.minimum(load.wanted, allowed))
    if load.room is not None and fixed.sum() > load.room:
        fixed = split(load.room, np.ones_like(load.previous), fixed)
    if not is_adaptive.any():
        return fixed, np.zeros_like(fixed), -1
    limits = np.where(is_adaptive, allowed, 0)
    most = int(limits.sum())
    if load.room is not None:
        most = min(most, max(load.room - int(fixed.sum()), 0))
    return fixed, limits, most


def _admissible(survival: Floats, limits: Ints) -> Floats:
    """survival [R, G] as a non-increasing sequence per request, 0 from its limit on."""
    falling = np.minimum.accumulate(survival, axis=1)
    return np.where(np.arange(survival.shape[1]) < limits[:, None], falling, 0.0)


def _ranked(survival: Floats, limits: Ints) -> Floats:
    """Admissible survivals above 0, highest first: [n]."""
    values = np.sort(_admissible(survival, limits), axis=None)[::-1]
    return values[: np.count_nonzero(values > 0.0)]


def split(total: int, survival: Floats, limits: Ints) -> Ints:
    """The `total` most likely drafts, as a length per request: int64 [R].

    survival: float64 [R, G]; limits: int64 [R]. Equal ones: by position, then by request, so the
    result is always a prefix per request. Drafts that cannot survive (0) are left out, so the sum
    may be less than `total`.
    """
    if total <= 0:
        return np.zeros(len(limits), dtype=np.int64)
    requests, length = survival.shape
    # Position-major: that is the order in which equal ones are taken.
    values = _admissible(survival, limits).T.ravel()
    if total >= np.count_nonzero(values > 0.0):
        chosen = values > 0.0
    else:
        least = np.partition(values, values.size - total)[values.size - total]
        chosen = values > least
        equal = np.flatnonzero(values == least)
        chosen[equal[: total - int(np.count_nonzero(chosen))]] = True
    return chosen.reshape(length, requests).sum(axis=0, dtype=np.int64)
