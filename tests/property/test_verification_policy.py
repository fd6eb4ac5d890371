"""Budget and split against brute force; and that no draft decides about itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.controller import Controller
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Curve
from headrace.engine.speculation.policy import StepLoad, budget, split

# Few different survivals, so that equal ones are frequent.
LEVELS = [0.0, 0.05, 0.2, 0.4, 0.4, 0.7, 0.7, 0.95, 1.0]
CASES = range(1000)


def random_cost(generator) -> StepCost:
    """Monotone, with steps, knees and flat stretches."""
    sizes = np.flatnonzero(generator.random(15) < 0.5) + 1
    sizes = sizes if sizes.size else np.array([4])
    rises = generator.choice([0.0, 0.1, 0.4, 1.0, 3.0], sizes.size)
    draft = Curve.linear(generator.choice([0.0, 1e-4, 1e-3]), 1e-5)
    sampler = Curve.linear(generator.choice([0.0, 1e-4]), 1e-6)
    verify = Curve(sizes, (1.0 + np.cumsum(rises)) / 1e3, stepped=generator.random() < 0.5)
    return StepCost(verify, draft, sampler)


def random_load(generator, rounds=1) -> StepLoad:
    requests, length = generator.integers(1, 4, 2)
    levels = generator.choice(LEVELS, (rounds, requests, length))
    wanted = np.where(
        generator.random(requests) < 0.7, ADAPTIVE, generator.integers(0, length + 1, requests)
    )
    limits = np.where(
        generator.random(requests) < 0.7, length, generator.integers(0, length + 1, requests)
    )
    room = None if generator.random() < 0.7 else int(generator.integers(0, 9))
    other_rows = int(generator.choice([0, 0, 1, 2, 5]))
    return StepLoad(-np.sort(-levels, axis=-1), wanted, limits, other_rows, room)


def fixed_lengths(load):
    """Drafts of fixed requests, deepest places given up first where room lacks."""
    fixed = np.where(load.wanted == ADAPTIVE, 0, np.minimum(load.wanted, load.limits))
    while load.room is not None and fixed.sum() > load.room:
        deepest = max(range(len(fixed)), key=lambda r: (fixed[r], r))
        fixed[deepest] -= 1
    return fixed


def allocations(load):
    """Every way to give adaptive requests prefixes of their drafts."""
    fixed = fixed_lengths(load)
    choices = [
        range(limit + 1) if wanted == ADAPTIVE else [0]
        for wanted, limit in zip(load.wanted, load.limits, strict=True)
    ]
    for lengths in itertools.product(*choices):
        if load.room is None or sum(lengths) + fixed.sum() <= load.room or sum(lengths) == 0:
            yield np.array(lengths), fixed


def tokens_of(load, survival, lengths):
    admitted = np.arange(survival.shape[1]) < lengths[:, None]
    return len(lengths) + survival[admitted].sum()


def seconds_of(load, cost, total, fixed, draft, prompts=True):
    """Seconds of a step, written down term by term; prompts: with its prompt chunks."""
    drafted = np.count_nonzero(load.wanted > 0)
    if draft:
        drafted += np.count_nonzero(load.wanted == ADAPTIVE)
    rows = len(load.wanted) + load.other_rows * prompts + int(fixed.sum()) + total
    draft_s = cost.draft.of(drafted) if drafted else 0.0
    return cost.verify.of(rows) + cost.sampler.of(len(load.wanted)) + draft_s


def best_speed(load, cost, survival, draft):
    """Tokens per second of the best allocation in a step without prompts."""
    return max(
        tokens_of(load, survival, lengths + fixed)
        / seconds_of(load, cost, lengths.sum(), fixed, draft, prompts=False)
        for lengths, fixed in allocations(load)
    )


@pytest.mark.parametrize("draft", [False, True])
def test_budget_is_the_best_of_all_allocations(draft):
    for seed in CASES:
        generator = np.random.default_rng(seed)
        check_best(random_load(generator), random_cost(generator), draft)


def check_best(load, cost, draft):
    survival = load.previous[0]
    decision = budget(load, cost, draft=draft)
    fixed = fixed_lengths(load)
    assert decision.fixed.tolist() == fixed.tolist()
    if not np.any(load.wanted == ADAPTIVE):
        assert decision.total == 0
        return
    lengths = decision.lengths(survival)
    assert (lengths - fixed).sum() == decision.total
    assert np.all(lengths <= load.limits)
    tokens = tokens_of(load, survival, lengths)
    seconds = seconds_of(load, cost, decision.total, fixed, draft)
    assert decision.expected_tokens == pytest.approx(tokens, rel=1e-9)
    assert decision.step_s == pytest.approx(seconds, rel=1e-9)
    speed = best_speed(load, cost, survival, draft)
    if load.other_rows == 0:
        assert tokens / seconds == pytest.approx(speed, rel=1e-9)
    gains = [
        tokens_of(load, survival, some + fixed)
        - speed * seconds_of(load, cost, some.sum(), fixed, draft)
        for some, _ in allocations(load)
    ]
    assert tokens - speed * seconds == pytest.approx(max(gains), abs=1e-9)


def test_never_slower_than_no_speculation():
    """By the model's own cost: neither the drafts verified nor the draft pass that follows. Beside
    prompts: what drafts add to the step brings tokens at least at the speed without them."""
    decided = []
    for seed in CASES:
        generator = np.random.default_rng(seed)
        load, cost = random_load(generator), random_cost(generator)
        if np.any(load.wanted == ADAPTIVE):
            decision, fixed = budget(load, cost), fixed_lengths(load)
            plain_tokens = tokens_of(load, load.previous[0], fixed)
            plain = plain_tokens / seconds_of(load, cost, 0, fixed, False, prompts=False)
            if load.other_rows == 0:
                assert decision.expected_tokens / decision.step_s >= plain * (1 - 1e-9)
            more_s = decision.step_s - seconds_of(load, cost, 0, fixed, decision.draft)
            more_tokens = decision.expected_tokens - plain_tokens
            assert more_tokens >= plain * more_s - 1e-9
            decided.append(decision.draft)
    assert 0.2 < np.mean(decided) < 0.8


def test_several_rounds_are_their_mean():
    for seed in CASES:
        generator = np.random.default_rng(seed)
        check_mean(random_load(generator, rounds=3), random_cost(generator))


def check_mean(load, cost):
    if load.other_rows or not np.any(load.wanted == ADAPTIVE):
        return
    decision, fixed = budget(load, cost, draft=True), fixed_lengths(load)
    limits = np.where(load.wanted == ADAPTIVE, load.limits, 0)
    most = int(limits.sum())
    if load.room is not None:
        most = min(most, max(load.room - int(fixed.sum()), 0))
    speeds = [
        np.mean([tokens_of(load, s, fixed + split(k, s, limits)) for s in load.previous])
        / seconds_of(load, cost, k, fixed, True)
        for k in range(most + 1)
    ]
    assert speeds[decision.total] == pytest.approx(max(speeds), rel=1e-9)


def test_split_takes_the_best_prefixes():
    """Against a plain sort by (survival falling, place, request)."""
    for seed in CASES:
        load = random_load(np.random.default_rng(seed))
        for total in range(10):
            check_split(load, total)


def check_split(load, total):
    survival = load.previous[0]
    ranked = sorted(
        (-survival[r, k], k, r)
        for r, k in np.ndindex(survival.shape)
        if k < load.limits[r] and survival[r, k] > 0.0
    )
    expected = np.zeros(len(survival), dtype=int)
    for _, k, r in ranked[:total]:
        assert expected[r] == k  # the sort itself gives prefixes
        expected[r] += 1
    assert split(total, survival, load.limits).tolist() == expected.tolist()


# --- causality ---------------------------------------------------------------------------------


REQUESTS, LENGTH, ROUNDS = 4, 3, 4
# Near the point where drafting pays and where each further row does: every leak shows.
TIGHT = StepCost(Curve((1, 16), (0.010, 0.055)), Curve.linear(0.0008, 0.0))


class Drafter:
    """Features of draft k are a function of the request, the round and the drafts before k, as in
    the Markov head: x_k itself shows only from k + 1 on. Request r joins in round r % 3 + 2."""

    def __init__(self, seed):
        generator = np.random.default_rng(seed)
        self.tokens = generator.integers(0, 2, (ROUNDS + 1, REQUESTS, LENGTH))
        self.accepted = generator.integers(0, LENGTH + 1, (ROUNDS + 1, REQUESTS))
        # One feature for each (round, request, place, the drafts before as a binary number).
        shape = (ROUNDS + 1, REQUESTS, LENGTH, 2 ** (LENGTH - 1))
        self._features = generator.normal(1.0, 2.0, shape)

    def features(self, number, rows, tokens):
        found = np.empty((len(rows), LENGTH))
        for i, k in np.ndindex(found.shape):
            before = sum(int(bit) << j for j, bit in enumerate(tokens[rows[i], :k]))
            found[i, k] = self._features[number, rows[i], k, before]
        return found


def last_lengths(drafter, changed, wanted, overlapped):
    """Drafts verified in the last round, in which `changed` [R, G] replaces the drafted tokens."""
    controller = Controller(REQUESTS, LENGTH, TIGHT)
    everybody = np.arange(REQUESTS)
    lengths = np.zeros(REQUESTS, dtype=np.int64)
    for number in range(1, ROUNDS + 1):
        tokens = changed if number == ROUNDS else drafter.tokens[number]
        rows = everybody[everybody % 3 + 2 <= number]
        limits = np.full(len(rows), LENGTH)
        controller.launch(rows)
        if overlapped:  # planned before the confidences of the newest drafts have arrived
            decision = controller.decide(rows, wanted[rows], limits)
            controller.arrive(rows, drafter.features(number, rows, tokens))
        else:
            controller.arrive(rows, drafter.features(number, rows, tokens))
            decision = controller.decide(rows, wanted[rows], limits)
        lengths[rows] = decision.lengths(controller.newest(rows))
        accepted = np.minimum(lengths, drafter.accepted[number])
        controller.outcome(rows, lengths[rows], accepted[rows])
    return lengths


@pytest.mark.parametrize("overlapped", [False, True])
def test_no_draft_decides_about_itself(overlapped):
    """Changing x_k, and all that follows from it, never changes whether x_k is verified; required
    for the `maximal` coupling."""
    others = 0
    for seed in range(300):
        drafter, generator = Drafter(seed), np.random.default_rng([seed, 1])
        wanted = generator.choice([ADAPTIVE, ADAPTIVE, ADAPTIVE, ADAPTIVE, 0, 2], REQUESTS)
        r, k = generator.integers(REQUESTS), generator.integers(LENGTH - 1)
        changed = drafter.tokens[ROUNDS].copy()
        changed[r, k] = 1 - changed[r, k]
        changed[r, k + 1 :] = generator.integers(0, 2, LENGTH - k - 1)
        before = last_lengths(drafter, drafter.tokens[ROUNDS], wanted, overlapped)
        after = last_lengths(drafter, changed, wanted, overlapped)
        assert (before[r] > k) == (after[r] > k), (seed, r, k)
        others += before.tolist() != after.tolist()
    assert others > 15  # what comes after k, and other requests, may well change


def test_blocking_and_overlapped_loops_decide_alike():
    """Where nothing has to be guessed: when confidences arrive makes no difference."""
    same = 0
    for seed in range(100):
        drafter, wanted = Drafter(seed), np.full(REQUESTS, ADAPTIVE)
        tokens = drafter.tokens[ROUNDS]
        lengths = [last_lengths(drafter, tokens, wanted, way).tolist() for way in (False, True)]
        same += lengths[0] == lengths[1]
    assert same == 100
