"""What a step verifies: how many drafts in all, and whose. Pure functions of arrays.

How the engine uses it, each step (`controller.py` joins the parts and keeps the state):

    decision = budget(load, cost)            # when the step is planned
    lengths = decision.lengths(newest)       # when it is launched: int64 [R], drafts to verify

Two snapshots of survival (probability that a draft and all before it are accepted, [R, G] in
fp32 or fp64, falling along G as `confidence.survivals` makes it):
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
from typing import NamedTuple

import numpy as np

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.confidence import Survivals
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Floats, Ints
from headrace.errors import InternalError

# Of equally good totals the smallest is taken; sums of floats are equal up to about this.
EQUAL = 1.0 - 1e-12


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step would run, R decoding requests (one row and one token each) and the rest.

    previous: [M, R, G], survivals of M >= 1 rounds before the newest drafts, latest first:
    the expectation is the mean over them (with few requests one round says little). 1 where they
    have not arrived: a draft that nobody has judged is worth a try, and trying is how it gets
    judged. Requests without a draft count 0, whatever stands here. wanted: int64 [R],
    `Policy.drafts` of each request. limits: int64 [R], most drafts that may be verified: 0 without
    a draft, fewer than G near the length limit. other_rows: rows of prompt chunks. room: most
    drafts that the step has rows for; None: no bound.
    """

    previous: Survivals
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

    def lengths(self, newest: Survivals) -> Ints:
        """Drafts that each request verifies, int64 [R]; newest: survivals [R, G] of the
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
    requests = load.previous.shape[1]
    slots = _slots(load)
    if slots.adaptive == 0 or cost is None:
        draft = slots.adaptive > 0 and draft is not False
        return StepDecision(slots.fixed, slots.limits, slots.most, draft, 0.0, 0.0)
    rates = _ranked(load.previous, slots.limits)[: slots.most]
    tokens = np.empty(rates.size + 1)
    tokens[0] = requests + slots.fixed_tokens
    np.cumsum(rates, out=tokens[1:])
    tokens[1:] += tokens[0]
    rows = requests + slots.fixed_total
    kept_s = cost.draft_s(slots.kept)
    draft_s = cost.draft_s(slots.kept + slots.adaptive) - kept_s
    plain_s = cost.sampler_s(requests) + kept_s
    overhead_s = plain_s if draft is False else plain_s + draft_s
    verify_s = cost.verify_s(rows, tokens.size)
    total, speed = _fastest(tokens, verify_s + overhead_s)
    if draft is None:
        draft = bool(EQUAL * speed > tokens[0] / (verify_s[0] + plain_s))
        if not draft:
            overhead_s = plain_s
            total, speed = _fastest(tokens, verify_s + overhead_s)
    if load.other_rows:
        verify_s = cost.verify_s(rows + load.other_rows, tokens.size)
        gain = tokens - speed * (verify_s + overhead_s)
        total = int((gain >= gain.max() - (1.0 - EQUAL) * tokens[-1]).argmax())
    step_s = float(verify_s[total]) + overhead_s
    return StepDecision(slots.fixed, slots.limits, total, draft, float(tokens[total]), step_s)


def _fastest(tokens: Floats, seconds: Floats) -> tuple[int, float]:
    """Where tokens / seconds is highest, the first of equal ones, and how high."""
    speed = tokens / seconds
    highest = float(speed.max())
    return int((speed >= EQUAL * highest).argmax()), highest


class _Slots(NamedTuple):
    """fixed: drafts of fixed requests [R], together fixed_total, worth fixed_tokens. limits: most
    drafts of adaptive ones [R], together at most `most`. kept: requests that are drafted for
    whatever is decided. adaptive: how many requests are."""

    fixed: Ints
    limits: Ints
    most: int
    fixed_total: int
    fixed_tokens: float
    kept: int
    adaptive: int


def _slots(load: StepLoad) -> _Slots:
    rounds, requests, length = load.previous.shape
    room, limits = load.room, np.minimum(load.limits, length)
    is_adaptive = load.wanted == ADAPTIVE
    adaptive = int(np.count_nonzero(is_adaptive))
    if adaptive == requests:
        most = int(limits.sum())
        most = most if room is None else min(most, room)
        return _Slots(np.zeros_like(limits), limits, most, 0, 0.0, 0, adaptive)
    fixed = np.where(is_adaptive, 0, np.minimum(load.wanted, limits))
    if room is not None and fixed.sum() > room:
        fixed = split(room, np.ones((requests, length)), fixed)
    total = int(fixed.sum())
    limits = np.where(is_adaptive, limits, 0)
    most = int(limits.sum())
    most = most if room is None else max(min(most, room - total), 0)
    verified = np.arange(length) < fixed[:, None]
    tokens = float(load.previous[:, verified].sum()) / rounds
    return _Slots(
        fixed, limits, most, total, tokens, int(np.count_nonzero(load.wanted > 0)), adaptive
    )


def _admissible(survival: Survivals, limits: Ints) -> Survivals:
    """survival [..., R, G], 0 from each request's limit [R] on."""
    length = survival.shape[-1]
    if (limits >= length).all():
        return survival
    return np.where(np.arange(length) < limits[:, None], survival, 0.0)


def _ranked(survival: Survivals, limits: Ints) -> Survivals:
    """What the k-th best draft of a round is worth, mean over rounds [M, R, G], highest first:
    [n], without the end that is worth nothing."""
    values = _admissible(survival, limits)
    rising = np.sort(values.reshape(len(values), -1), axis=1)
    mean: Survivals = rising[0] if len(rising) == 1 else rising.mean(axis=0)
    return mean[mean.searchsorted(0.0, "right") :][::-1]


def split(total: int, survival: Survivals, limits: Ints) -> Ints:
    """The `total` most likely drafts, as a length per request: int64 [R].

    survival: [R, G]; limits: int64 [R]. Equal ones: by position, then by request, so the
    result is always a prefix per request. Drafts that cannot survive (0) are left out, so the sum
    may be less than `total`.
    """
    if total <= 0:
        return np.zeros(len(limits), dtype=np.int64)
    requests, length = survival.shape
    # Position-major: that is the order in which equal ones are taken.
    values = _admissible(survival, limits).T.ravel()
    chosen = values > 0.0
    if total < np.count_nonzero(chosen):
        least = np.partition(values, values.size - total)[values.size - total]
        chosen = values > least
        lacking = total - int(np.count_nonzero(chosen))
        chosen[(values == least).nonzero()[0][:lacking]] = True
    lengths: Ints = chosen.reshape(length, requests).sum(axis=0, dtype=np.int64)
    return lengths
