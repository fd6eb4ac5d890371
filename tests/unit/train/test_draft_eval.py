"""What is measured of a draft module: outcomes, and how well confidences hold."""

from __future__ import annotations

import numpy as np
import pytest

from train.draft_eval import outcomes, survival_error
from train.rounds import Round


def one(accepted: list[bool], observed: list[bool], z: float) -> Round:
    return Round(
        "f", 1, False, np.array(accepted), np.array(observed), np.array([z, z]), np.zeros(2)
    )


def test_the_error_of_rounds_leaves_out_what_was_not_observed() -> None:
    rounds = [one([True, False], [True, False], 30.0), one([True, True], [True, True], 30.0)]
    error, by_place = survival_error(rounds, [1.0, 1.0])
    assert error == pytest.approx(0.0, abs=1e-6)
    assert by_place == pytest.approx([0.0, 0.0], abs=1e-6)
    # Answers that end with their first token: nothing is known of the second place.
    error, by_place = survival_error(rounds[:1], [1.0, 1.0])
    assert (error, by_place) == (pytest.approx(0.0, abs=1e-6), [pytest.approx(0.0, abs=1e-6), 0.0])


def test_the_error_is_that_of_products_at_the_temperatures() -> None:
    rounds = [one([True, False], [True, True], 2.0)]
    first, second = (1 / (1 + np.exp(-2.0 / t)) for t in (2.0, 4.0))
    error, by_place = survival_error(rounds, [2.0, 4.0])
    assert by_place == pytest.approx([1 - first, first * second])
    assert error == pytest.approx((1 - first + first * second) / 2)


def test_outcomes_are_stacked_by_round() -> None:
    z, accepted, observed = outcomes([one([True, False], [True, True], 1.0)] * 3)
    assert z.shape == accepted.shape == observed.shape == (3, 2)
    assert accepted[:, 0].all() and not accepted[:, 1].any() and observed.all()
