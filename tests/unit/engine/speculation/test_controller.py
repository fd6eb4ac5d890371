"""The controller over many steps: never slower, probes, learning, counts."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.controller import PROBE_SHARE, Controller
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Curve
from headrace.engine.speculation.policy import StepLoad, budget

LENGTH = 5
PROPORTIONAL = Curve((0, 1), (0.0, 0.001))
CHEAP_ROWS = Curve((1, 1000), (0.010, 0.020))


class Loop:
    """A simulated engine: one step after the other, time by its own cost."""

    def __init__(self, cost, requests, accept=0.8, wanted=ADAPTIVE, true_cost=None):
        self.controller = Controller(requests, LENGTH, cost)
        self.cost = true_cost or cost
        self.rows = np.arange(requests)
        self.wanted = np.full(requests, wanted)
        self.accept = accept
        self.limits = np.zeros(requests, dtype=np.int64)
        self.generator = np.random.default_rng(0)
        self.tokens, self.seconds, self.plain_s, self.passes, self.verified = 0, 0.0, 0.0, 0, 0
        self.verified_latest = 0

    def step(self):
        controller, rows, requests = self.controller, self.rows, len(self.rows)
        decision = controller.decide(rows, self.wanted, self.limits)
        lengths = decision.lengths(controller.newest(rows))
        luck = self.generator.random((requests, LENGTH)) < self.accept
        accepted = np.minimum(np.cumprod(luck, axis=1).sum(axis=1), lengths)
        drafted = decision.draft and bool(np.any(self.wanted == ADAPTIVE))
        if drafted:
            controller.launch(rows)
        self.seconds += self.cost.verify.of(requests + int(lengths.sum()))
        self.seconds += self.cost.draft_s(requests) * drafted
        self.plain_s += self.cost.verify.of(requests) * (1 + accepted.mean())
        self.tokens += requests + int(accepted.sum())
        self.passes += drafted
        self.verified_latest = int(lengths.sum())
        self.verified += self.verified_latest
        if np.any(self.limits):
            controller.outcome(rows, lengths, accepted)
        if drafted:
            logit = np.log(self.accept / (1 - self.accept))
            controller.arrive(rows, np.full((requests, LENGTH), logit))
        self.limits[:] = LENGTH * drafted

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self


@pytest.mark.parametrize("accept", [0.2, 0.8, 0.999])
@pytest.mark.parametrize("requests", [1, 16])
def test_never_slower_than_no_speculation_where_rows_cost_their_price(accept, requests):
    loop = Loop(StepCost(PROPORTIONAL, Curve.linear(0.0005, 0.0)), requests, accept).run(600)
    assert loop.verified == 0
    assert loop.passes == 0  # not even perfect drafts would pay: no probes
    assert loop.seconds == pytest.approx(loop.plain_s)


def test_probes_cost_little_while_drafts_are_poor():
    cost = StepCost(CHEAP_ROWS, Curve.linear(0.005, 0.0))
    loop = Loop(cost, 16, accept=0.1).run(200)
    start_s, start_plain_s, passes = loop.seconds, loop.plain_s, loop.passes
    loop.run(2000)
    overhead = (loop.seconds - start_s) / (loop.plain_s - start_plain_s) - 1
    assert 0 < overhead < 1.1 * PROBE_SHARE
    assert loop.passes > passes + 5


def test_speculation_returns_when_drafts_become_good():
    loop = Loop(StepCost(CHEAP_ROWS, Curve.linear(0.003, 0.0)), 16, accept=0.05).run(300)
    assert loop.verified_latest == 0
    loop.accept = 0.9
    loop.run(1000)
    assert loop.verified_latest > 16 * 3
    loop.accept = 0.05
    loop.run(300)
    assert loop.verified_latest == 0


def test_the_first_drafts_are_tried():
    loop = Loop(StepCost(CHEAP_ROWS, Curve.linear(0.001, 0.0)), 4)
    loop.step()
    assert loop.passes == 1 and loop.verified_latest == 0
    loop.step()
    assert loop.verified_latest == 4 * LENGTH  # nobody has judged them yet: all are verified
    loop.run(50)
    assert loop.passes == 52


def test_newcomers_are_expected_to_be_like_the_others():
    controller = Controller(64, LENGTH, StepCost(CHEAP_ROWS, Curve.linear(0.005, 0.0)))
    old, new = np.arange(16), np.arange(16, 32)
    wanted, whole, none = np.full(16, ADAPTIVE), np.full(16, LENGTH), np.zeros(16, dtype=np.int64)
    assert controller.decide(new, wanted, none).draft  # nothing is known of anybody
    for _ in range(20):
        controller.launch(old)
        controller.arrive(old, np.full((16, LENGTH), -3.0))
        controller.decide(old, wanted, whole)
    assert not controller.decide(new, wanted, none).draft
    controller.launch(new)  # as a probe would
    decision = controller.decide(new, wanted, whole)
    assert not decision.draft
    assert decision.total == 0  # its drafts are there to be judged, not to be verified


def test_steps_that_turn_out_slow_end_speculation():
    """The start-up curve knew nothing of long contexts; observed steps correct it."""
    cost = StepCost(Curve((1, 1000), (0.010, 0.011)), Curve.linear(0.001, 0.0))
    loop = Loop(cost, 16, accept=0.5).run(10)
    assert loop.verified_latest > 0
    for rows in (16, 40, 96):
        for _ in range(64):
            cost.observe(rows, 0.010 + 0.01 * rows)
    loop.run(20)
    assert loop.verified_latest == 0


def test_mixed_batches_and_fixed_drafts():
    controller = Controller(8, LENGTH, StepCost(CHEAP_ROWS, Curve.linear(0.001, 0.0)))
    rows, wanted = np.array([4, 2, 7]), np.array([0, 2, ADAPTIVE])
    limits = np.array([0, 0, 0])
    for number in range(6):
        decision = controller.decide(rows, wanted, limits)
        lengths = decision.lengths(controller.newest(rows))
        assert lengths[:2].tolist() == ([0, 2] if number else [0, 0])
        assert lengths[2] == (5 if number else 0)
        assert decision.draft
        controller.outcome(rows[1:], lengths[1:], np.zeros(2, dtype=np.int64))
        controller.launch(rows[1:])
        controller.arrive(rows[1:], np.full((2, LENGTH), 3.0))
        limits = np.array([0, LENGTH, LENGTH])


def test_prompts_that_end_get_their_first_draft():
    nobody = np.zeros(0, dtype=np.int64)
    pays = Controller(8, LENGTH, StepCost(CHEAP_ROWS, Curve.linear(0.001, 0.0)))
    assert pays.decide(nobody, nobody, nobody, other_rows=64).draft
    assert pays.decide(np.array([1]), np.array([0]), np.array([0])).draft
    never = Controller(8, LENGTH, StepCost(PROPORTIONAL, Curve.linear(0.001, 0.0)))
    assert not never.decide(nobody, nobody, nobody, other_rows=64).draft
    assert Controller(8, LENGTH, None).decide(nobody, nobody, nobody).draft


def test_unknown_cost_verifies_all_there_is():
    controller = Controller(4, LENGTH, None)
    rows = np.array([1, 2])
    decision = controller.decide(rows, np.full(2, ADAPTIVE), np.array([0, 3]))
    assert decision.lengths(controller.newest(rows)).tolist() == [0, 3]
    assert decision.draft


def test_a_wrong_head_is_corrected():
    """The head says 0.4 where 0.9 is true, so only first drafts are verified: from these the other
    places learn, and after a while all drafts are."""
    cost = StepCost(Curve((16, 96), (0.010, 0.018)), Curve.linear(0.0001, 0.0))
    loop = Loop(cost, 16, accept=0.9)
    controller, at_first = loop.controller, 0
    for number in range(900):
        controller.launch(loop.rows)
        controller.arrive(loop.rows, np.full((16, LENGTH), np.log(0.4 / 0.6)))
        decision = controller.decide(loop.rows, loop.wanted, np.full(16, LENGTH))
        lengths = decision.lengths(controller.newest(loop.rows))
        luck = loop.generator.random((16, LENGTH)) < 0.9
        accepted = np.minimum(np.cumprod(luck, axis=1).sum(axis=1), lengths)
        controller.outcome(loop.rows, lengths, accepted)
        at_first = int(lengths.sum()) if number < 90 else at_first
    assert at_first <= 2 * 16
    found = controller.confidences(np.full((1, LENGTH), np.log(0.4 / 0.6)))
    assert found[0, 0] == pytest.approx(0.9, abs=0.03)
    assert lengths.sum() == 16 * LENGTH


def test_temperatures_scale_the_features():
    controller = Controller(2, 2, None, temperatures=[2.0, 0.5])
    rows = np.array([1])
    controller.launch(rows)
    controller.arrive(rows, np.array([[2.0, 1.0]]))
    c = 1 / (1 + np.exp(-np.array([1.0, 2.0])))
    assert controller.newest(rows)[0] == pytest.approx([c[0], c[0] * c[1]])
    assert controller.confidences(np.array([[2.0, 1.0]]))[0] == pytest.approx(c)


def test_counts_by_place():
    controller = Controller(4, 3, None)
    rows = np.array([1, 2, 3])
    controller.launch(rows)
    controller.arrive(rows, np.zeros((3, 3)))
    controller.outcome(rows, np.array([3, 2, 0]), np.array([1, 2, 0]))
    stats = controller.stats()
    assert stats.verified.tolist() == [2, 2, 1]
    assert stats.judged.tolist() == [2, 2, 0]
    assert stats.accepted.tolist() == [2, 1, 0]
    assert stats.predicted == pytest.approx([1.0, 1.0, 0.0])


@pytest.mark.parametrize("requests", [4, 256])
@pytest.mark.parametrize("spread", [2, 20])
@pytest.mark.parametrize("timid", [1.0, 1.5])
def test_near_the_perfect_selector_and_above_every_fixed_length(requests, spread, timid):
    """Expected tokens per second beside a selector that sees the true probabilities of the round
    itself, and beside every fixed length. bench/verify.py does this on the fixed load."""
    cost = StepCost(Curve((8, 64, 512), (0.010, 0.016, 0.032)), Curve.linear(0.001, 4e-6))
    means = np.array([0.85, 0.8, 0.8, 0.75, 0.7])
    generator = np.random.default_rng([requests, spread])
    controller, rows = Controller(requests, LENGTH, cost), np.arange(requests)
    wanted, limits = np.full(requests, ADAPTIVE), np.full(requests, LENGTH)
    tokens, seconds = np.zeros(LENGTH + 3), np.zeros(LENGTH + 3)
    for number in range(450 if timid > 1.0 else 120):
        c = generator.beta(spread * means, spread * (1 - means), (requests, LENGTH))
        c = np.clip(c, 1e-6, 1 - 1e-6)
        survival = np.cumprod(c, axis=1)
        controller.launch(rows)
        controller.arrive(rows, np.log(c / (1 - c)) / timid)
        ours = controller.decide(rows, wanted, limits).lengths(controller.newest(rows))
        accepted = np.cumprod(generator.random(c.shape) < c, axis=1).sum(axis=1)
        controller.outcome(rows, ours, np.minimum(ours, accepted))
        if number < (350 if timid > 1.0 else 20):
            continue
        best = budget(StepLoad(survival[None], wanted, limits), cost, draft=True).lengths(survival)
        fixed = [np.full(requests, k) for k in range(LENGTH + 1)]
        for i, lengths in enumerate([ours, best, *fixed]):
            admitted = np.arange(LENGTH) < lengths[:, None]
            tokens[i] += requests + survival[admitted].sum()
            seconds[i] += cost.verify.of(requests + int(lengths.sum())) + cost.draft_s(requests)
    speed = tokens / seconds
    assert speed[0] >= 0.99 * speed[1]
    assert speed[0] >= 0.99 * speed[2:].max()
