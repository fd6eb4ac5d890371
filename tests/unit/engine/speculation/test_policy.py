"""What a step verifies: known decisions, both inputs apart, mixed batches."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.confidence import survivals
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Curve
from headrace.engine.speculation.policy import StepLoad, budget, split
from headrace.errors import InternalError

CONFIDENCE = np.array(
    [[0.95, 0.9, 0.9, 0.85, 0.8], [0.6, 0.5, 0.5, 0.4, 0.4], [0.9, 0.8, 0.7, 0.6, 0.5]]
)
FLAT = Curve((1,), (0.01,))
PROPORTIONAL = Curve((0, 1), (0.0, 0.01))


def load(survival, wanted=ADAPTIVE, limits=None, **rest) -> StepLoad:
    """One earlier round [R, G]; the same wish for all, or one each."""
    requests, length = survival.shape
    return StepLoad(
        survival[None],
        np.broadcast_to(np.asarray(wanted), (requests,)).astype(np.int64),
        np.full(requests, length) if limits is None else np.asarray(limits),
        **rest,
    )


def steps(sizes, ms, sampler_ms) -> StepCost:
    verify = Curve(sizes, np.array(ms) / 1e3, stepped=True)
    return StepCost(verify, sampler=Curve((1,), (sampler_ms / 1e3,)))


@pytest.mark.parametrize(
    ("cost", "rows", "lengths", "tokens", "step_s"),
    [
        (
            steps((1, 2, 4, 8, 16, 24), (10, 10, 10.2, 10.6, 11.5, 13.0), 2),
            16,
            [5, 3, 5],
            10.379435,
            0.0135,
        ),
        # Stopping at the first step that does not improve would give 4 rows here.
        (steps((1, 2, 4, 8, 16, 24), (5, 6, 8, 14, 26, 38), 1), 8, [3, 0, 2], 7.1945, 0.015),
    ],
)
def test_published_vectors(cost, rows, lengths, tokens, step_s):
    survival = survivals(CONFIDENCE)
    decision = budget(load(survival), cost)
    assert decision.total == rows - 3
    assert decision.expected_tokens == pytest.approx(tokens, abs=1e-12)
    assert decision.step_s == pytest.approx(step_s, abs=1e-12)
    assert decision.lengths(survival).tolist() == lengths


def test_flat_cost_verifies_everything():
    survival = survivals(np.full((7, 5), 0.05))
    decision = budget(load(survival), StepCost(FLAT))
    assert decision.total == 35
    assert decision.lengths(survival).tolist() == [5] * 7


def test_unknown_cost_verifies_everything():
    assert budget(load(survivals(CONFIDENCE)), None).total == 15
    assert budget(load(survivals(CONFIDENCE)), None).draft


@pytest.mark.parametrize("confidence", [0.01, 0.83, 0.999999, 1.0])
def test_cost_by_rows_verifies_nothing(confidence):
    survival = survivals(np.full((4, 5), confidence))
    decision = budget(load(survival), StepCost(PROPORTIONAL, Curve.linear(1e-4, 0.0)))
    assert decision.total == 0
    assert not decision.draft  # and drafting would only cost time
    assert decision.expected_tokens / decision.step_s == pytest.approx(100.0)


def test_budget_and_split_take_different_rounds():
    cost = StepCost(Curve((3, 18), (0.010, 0.013)))
    previous, newest = survivals(CONFIDENCE), survivals(CONFIDENCE[[1, 0, 2]])
    decision = budget(load(previous), cost)
    again = budget(load(newest), cost)
    assert decision.total == again.total  # the same survivals in another order
    assert decision.lengths(previous).tolist() != decision.lengths(newest).tolist()
    assert decision.lengths(newest)[[1, 0, 2]].tolist() == decision.lengths(previous).tolist()
    worse = budget(load(previous * 0.1), cost)
    assert worse.total < decision.total
    assert worse.lengths(newest).sum() == worse.total


def test_several_rounds_count_their_mean():
    cost = StepCost(Curve((1, 2, 3), (1.0, 1.5, 2.0)))
    wanted, limits = np.array([ADAPTIVE]), np.array([2])
    for rounds, total in (
        ([[0.9, 0.8]], 2),
        ([[0.1, 0.0]], 0),
        ([[0.9, 0.8], [0.1, 0.0]], 0),
        ([[0.9, 0.8], [0.9, 0.0]], 1),
    ):
        previous = np.array(rounds)[:, None]
        assert budget(StepLoad(previous, wanted, limits), cost).total == total, rounds


def test_fixed_first_off_none_adaptive_the_rest():
    survival = survivals(np.vstack([CONFIDENCE, CONFIDENCE[:1], CONFIDENCE[:1]]))
    decision = budget(load(survival, [ADAPTIVE, 3, 0, ADAPTIVE, 5]), StepCost(FLAT))
    assert decision.lengths(survival).tolist() == [5, 3, 0, 5, 5]
    # Fixed ones pay nothing here, but their rows make the step dearer for the others.
    knee = StepCost(Curve((5, 13, 14), (0.010, 0.010, 0.020), stepped=True))
    decision = budget(load(survival, [ADAPTIVE, 3, 0, ADAPTIVE, 5]), knee)
    assert decision.total == 0
    assert decision.lengths(survival).tolist() == [0, 3, 0, 0, 5]
    decision = budget(load(survival, [ADAPTIVE, 3, 0, ADAPTIVE, 0]), knee)
    assert decision.total == 5
    assert decision.lengths(survival).tolist() == [3, 3, 0, 2, 0]


def test_fixed_drafts_count_as_tokens():
    survival = np.array([[0.9, 0.8], [0.5, 0.4]])
    cost = StepCost(Curve((1, 2), (0.010, 0.011)))
    decision = budget(load(survival, [2, 0]), cost)
    assert decision.total == 0
    mixed = budget(load(survival, [2, ADAPTIVE], [2, 0]), cost)
    assert mixed.expected_tokens == pytest.approx(2 + 0.9 + 0.8)
    assert mixed.step_s == pytest.approx(0.013)


def test_prompt_rows_make_drafts_cheap_or_dear():
    survival = survivals(np.full((2, 5), 0.7))
    knee = StepCost(Curve((16, 32, 64), (0.010, 0.035, 0.140), stepped=True))
    assert budget(load(survival), knee).total == 10
    assert budget(load(survival, other_rows=4), knee).total == 10
    assert budget(load(survival, other_rows=8), knee).total == 6  # up to the knee, not beyond
    assert budget(load(survival, other_rows=14), knee).total == 0
    assert budget(load(survival, other_rows=15), knee).total == 10
    assert budget(load(survival, other_rows=23), knee).total == 7


@pytest.mark.parametrize("other_rows", [0, 1, 64, 4096])
def test_cost_by_rows_verifies_nothing_beside_prompts_either(other_rows):
    """A step that is long anyway is no reason to pay for drafts."""
    survival = survivals(np.full((2, 5), 0.9))
    assert budget(load(survival, other_rows=other_rows), StepCost(PROPORTIONAL)).total == 0
    assert budget(load(survival, other_rows=other_rows), StepCost(FLAT)).total == 10


def test_room_bounds_the_drafts_of_a_step():
    survival = survivals(CONFIDENCE)
    cost = StepCost(FLAT)
    for room in range(16):
        decision = budget(load(survival, room=room), cost)
        assert decision.lengths(survival).sum() == room
        mixed = budget(load(survival, [4, ADAPTIVE, 4], room=room), cost)
        lengths = mixed.lengths(survival)
        assert lengths.sum() == min(room, 13)
        assert lengths[[0, 2]].sum() == min(room, 8)  # fixed ones come first
    assert mixed.fixed.tolist() == [4, 0, 4]
    assert budget(load(survival, [4, 4, 4], room=5), cost).fixed.tolist() == [2, 2, 1]


def test_limits_hold_and_no_draft_counts_nothing():
    survival = np.ones((3, 5))
    decision = budget(load(survival, limits=[0, 2, 9]), StepCost(FLAT))
    assert decision.total == 7
    assert decision.lengths(survival).tolist() == [0, 2, 5]
    none = budget(load(survival, limits=[0, 0, 0]), StepCost(FLAT))
    assert none.lengths(survival).tolist() == [0, 0, 0]
    assert budget(load(survival, 4, limits=[0, 2, 9]), StepCost(FLAT)).fixed.tolist() == [0, 2, 4]


def test_split_takes_equal_ones_by_place_then_request():
    survival = np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.1], [0.9, 0.5, 0.5]])
    limits = np.full(3, 3)
    found = [split(total, survival, limits).tolist() for total in range(1, 10)]
    assert found[:4] == [[0, 0, 1], [1, 0, 1], [1, 1, 1], [2, 1, 1]]
    assert found[4:] == [[2, 2, 1], [2, 2, 2], [3, 2, 2], [3, 2, 3], [3, 3, 3]]


def test_split_leaves_out_what_cannot_survive():
    survival = np.array([[0.5, 0.0], [0.0, 0.0]])
    assert split(4, survival, np.full(2, 2)).tolist() == [1, 0]
    assert split(1, np.zeros((2, 2)), np.full(2, 2)).tolist() == [0, 0]
    assert split(3, np.zeros((0, 5)), np.zeros(0, dtype=np.int64)).tolist() == []


def test_drafting_is_weighed_with_its_own_cost():
    survival = survivals(np.full((8, 5), 0.7))
    verify = Curve((8, 48), (0.010, 0.030))
    assert budget(load(survival), StepCost(verify, Curve.linear(0.001, 0.0))).draft
    dear = budget(load(survival), StepCost(verify, Curve.linear(0.020, 0.0)))
    assert not dear.draft
    assert dear.total > 0  # the drafts at hand cost nothing any more
    assert budget(load(survival), StepCost(verify, Curve.linear(0.020, 0.0)), draft=True).draft
    # What fixed requests need is drafted anyway: the rest of a cheap pass is what counts.
    shared = StepCost(verify, Curve.linear(0.020, 0.0))
    assert budget(load(survival, [5] + [ADAPTIVE] * 7), shared).draft


def test_shapes_are_checked():
    ones = np.ones((2, 3))
    with pytest.raises(InternalError, match=r"\[M, R, G\], \[R\] and \[R\]"):
        StepLoad(ones, np.full(2, ADAPTIVE), np.full(2, 3))
    with pytest.raises(InternalError, match="must be"):
        StepLoad(ones[None], np.full(3, ADAPTIVE), np.full(2, 3))
