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
its early stop. Prompt chunks in the step: see `budget`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Floats, Ints
from headrace.errors import InternalError

# Of equally good totals the smallest is taken; sums of floats are equal up to about this.
EQUAL = 1.0 - 1e-12


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step would run, R decoding requests (one row and one token each) and the rest.

    previous: float64 [M, R, G], survivals of M >= 1 rounds before the newest drafts, latest first:
    the expectation is the mean over them (with few requests one round says little). 1 where they
    have not arrived: a draft that nobody has judged is worth a try, and trying is how it gets
    judged. Requests without a draft count 0, whatever stands here. wanted: int64 [R],
    `Policy.drafts` of each request. limits: int64 [R], most drafts that may be verified: 0 without
    a draft, fewer than G near the length limit. other_rows: rows of prompt chunks. room: most
    drafts that the step has rows for; None: no bound.
    """

    previous: Floats
    wanted: Ints
    limits: Ints
    other_rows: int = 0
    room: int | None = None

    def __post_init__(self) -> None:
        shape = self.previous.shape
        requests = shape[1:2]
        if len(shape) != 3 or self.wanted.shape != requests or self.limits.shape != requests:
            raise InternalError(
                f"previous {shape}, wanted {self.wanted.shape} and limits {self.limits.shape} "
                "must be [M, R, G], [R] and [R]"
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

    Without prompt chunks the best is most tokens per second. With them a step is long anyway, and
    more tokens in it would always look good; but its rows can be as dear as any. So drafts must
    then earn what a step without prompts would: most of tokens - (its best speed) * seconds, which
    for a step without prompts is the same rule.

    draft: whether a draft pass for the adaptive requests follows, which costs its time; None: it
    follows if a step with it (and without prompts) is expected to be faster than one without
    speculation. cost None: unknown cost counts as flat, so everything is verified.
    """
    rounds, requests, length = load.previous.shape
    fixed, limits, most = _slots(load)
    if most < 0 or cost is None:
        return StepDecision(fixed, limits, max(most, 0), most >= 0 and draft is not False, 0.0, 0.0)
    rates = _ranked(load.previous, limits)[:most]
    tokens = np.empty(rates.size + 1)
    tokens[0] = requests
    rows = requests
    if fixed.any():
        kept_places = np.arange(length) < fixed[:, None]
        tokens[0] += load.previous[:, kept_places].sum() / rounds
        rows += int(fixed.sum())
    np.cumsum(rates, out=tokens[1:])
    tokens[1:] += tokens[0]
    kept = int(np.count_nonzero(load.wanted > 0))  # drafted for, whatever is decided here
    drafted = kept + int(np.count_nonzero(load.wanted == ADAPTIVE))
    overhead_s = cost.sampler_s(requests) + cost.draft_s(kept)
    seconds = cost.verify_s(rows, tokens.size) + overhead_s
    draft_s = cost.draft_s(drafted) - cost.draft_s(kept)
    if draft is None:
        draft = bool(EQUAL * np.max(tokens / (seconds + draft_s)) > tokens[0] / seconds[0])
    if draft:
        overhead_s += draft_s
        seconds = seconds + draft_s
    speed = tokens / seconds
    total = int(np.argmax(speed >= EQUAL * speed.max()))
    if load.other_rows:
        seconds = cost.verify_s(rows + load.other_rows, tokens.size) + overhead_s
        gain = tokens - speed[total] * seconds
        total = int(np.argmax(gain >= gain.max() - (1.0 - EQUAL) * tokens[-1]))
    return StepDecision(fixed, limits, total, draft, float(tokens[total]), float(seconds[total]))


def _slots(load: StepLoad) -> tuple[Ints, Ints, int]:
    """Drafts of fixed requests [R], most drafts of adaptive ones [R], and most of those in all
    (-1: there are no adaptive requests)."""
    is_adaptive = load.wanted == ADAPTIVE
    allowed = np.clip(load.limits, 0, load.previous.shape[2])
    fixed = np.where(is_adaptive, 0, np.minimum(load.wanted, allowed))
    if load.room is not None and fixed.sum() > load.room:
        fixed = split(load.room, np.ones_like(load.previous[0]), fixed)
    if not is_adaptive.any():
        return fixed, np.zeros_like(fixed), -1
    limits = np.where(is_adaptive, allowed, 0)
    most = int(limits.sum())
    if load.room is not None:
        most = min(most, max(load.room - int(fixed.sum()), 0))
    return fixed, limits, most


def _admissible(survival: Floats, limits: Ints) -> Floats:
    """survival [..., R, G] as a non-increasing sequence per request, 0 from its limit [R] on."""
    # Both repairs are seldom needed and cost as much as the rest of a decision.
    if np.any(survival[..., 1:] > survival[..., :-1]):
        survival = np.minimum.accumulate(survival, axis=-1)
    length = survival.shape[-1]
    if np.all(limits >= length):
        return survival
    return np.where(np.arange(length) < limits[:, None], survival, 0.0)


def _ranked(survival: Floats, limits: Ints) -> Floats:
    """What the k-th best draft of a round is worth, mean over rounds [M, R, G], highest first:
    [n], without the end that is worth nothing."""
    values = _admissible(survival, limits)
    best = np.sort(values.reshape(len(values), -1), axis=1)[:, ::-1]
    mean: Floats = best[0] if len(best) == 1 else best.mean(axis=0)
    return mean[: np.count_nonzero(mean > 0.0)]


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
    lengths: Ints = chosen.reshape(length, requests).sum(axis=0, dtype=np.int64)
    return lengths
