"""Calibration of the draft's confidence: the error's definition, and that temperatures mend it."""

from __future__ import annotations

import numpy as np
import pytest

from train.calibration import (
    calibration_error,
    fit_temperatures,
    survival,
    survival_error,
)
from train.rounds import Round


def drawn(count: int, factors: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Confidences that are off by a factor per place, and outcomes of the true ones."""
    rng = np.random.default_rng(1)
    true = rng.normal(1.0, 1.5, (count, len(factors)))
    held = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    return true * np.array(factors), np.logical_and.accumulate(held, axis=1)


def test_the_error_by_hand() -> None:
    predicted = np.array([0.1, 0.1, 0.95, 0.95])
    happened = np.array([True, False, True, True])
    # Bin of 0.1: |0.2 - 1| ; bin of 0.95: |1.9 - 2|; of 4 samples.
    assert calibration_error(predicted, happened) == pytest.approx((0.8 + 0.1) / 4)


def test_survival_is_the_product_of_what_comes_before() -> None:
    found = survival(np.array([[0.0, 2.0]]), [1.0, 2.0])
    assert found.tolist() == [[0.5, pytest.approx(0.5 / (1 + np.exp(-1.0)))]]


def test_temperatures_undo_a_factor() -> None:
    factors = (2.0, 0.5, 3.0)
    confidence, accepted = drawn(20_000, factors)
    everything = np.ones_like(accepted)
    fitted = fit_temperatures(confidence, accepted, everything)
    assert fitted == pytest.approx(factors, rel=0.2)


def test_places_that_nobody_observed_change_nothing() -> None:
    confidence, accepted = drawn(4000, (2.0, 2.0))
    observed = np.ones_like(accepted)
    expected = fit_temperatures(confidence, accepted, observed)
    observed[::2, 1] = False
    only = fit_temperatures(confidence, accepted, observed)
    spoilt = np.where(observed, accepted, ~accepted)
    assert fit_temperatures(confidence, spoilt, observed) == only
    assert only[0] == expected[0]


def test_the_error_of_rounds_leaves_out_what_was_not_observed() -> None:
    def one(accepted: list[bool], observed: list[bool]) -> Round:
        z = np.array([30.0, 30.0])
        return Round("f", 1, False, np.array(accepted), np.array(observed), z, np.zeros(2))

    rounds = [one([True, False], [True, False]), one([True, True], [True, True])]
    error, by_place = survival_error(rounds, [1.0, 1.0])
    assert error == pytest.approx(0.0, abs=1e-6)
    assert by_place == pytest.approx([0.0, 0.0], abs=1e-6)
