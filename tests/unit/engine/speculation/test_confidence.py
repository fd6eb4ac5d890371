"""Confidences, survivals, calibration error and temperatures."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.speculation.confidence import (
    TEMPERATURE_GRID,
    confidences,
    ece,
    fit_temperatures,
    survivals,
)
from headrace.errors import ConfigError


def test_confidence_is_a_sigmoid_with_a_temperature_each():
    z = np.array([[0.0, 2.0, -2.0]])
    expected = [0.5, 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(2.0))]
    assert confidences(z)[0] == pytest.approx(expected)
    expected[1:] = 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(4.0))
    assert confidences(z, [1.0, 2.0, 0.5])[0] == pytest.approx(expected)
    ends = confidences(np.array([1e30, -1e30, np.inf, -np.inf, np.nan, 3.0]), 1e-9)
    assert ends == pytest.approx([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], abs=1e-20)
    assert np.all(confidences(np.array([-1e30, -np.inf])) > 0.0)  # clamped at -60
    assert confidences(np.array([1.0], dtype=np.float32)).dtype == np.float64


def test_survivals():
    found = survivals([[0.95, 0.9, 0.9, 0.85, 0.8], [0.6, 0.5, 0.5, 0.4, 0.4]])
    assert found[0] == pytest.approx([0.95, 0.855, 0.7695, 0.654075, 0.52326])
    assert found[1] == pytest.approx([0.6, 0.3, 0.15, 0.06, 0.024])
    assert survivals([1.5, np.nan, 0.5]).tolist() == [1.0, 0.0, 0.0]
    assert survivals([-0.5, 0.5]).tolist() == [0.0, 0.0]


def test_calibration_error():
    assert ece([0.5, 0.5], [1, 0]) == 0.0
    assert ece([0.9, 0.9, 0.1, 0.1], [1, 1, 0, 0]) == pytest.approx(0.1)
    # Two bins, errors of opposite sign: they do not cancel.
    assert ece([0.2, 0.8], [1, 0]) == pytest.approx(0.8)
    assert ece([0.2, 0.8], [1, 0], bins=1) == 0.0
    assert ece([0.0, 1.0], [0, 1]) == 0.0
    for wrong in (([], []), ([0.1], [1, 0]), ([[0.1]], [[1]])):
        with pytest.raises(ConfigError, match="n >= 1"):
            ece(*wrong)


def outcomes(temperatures, n=40_000, seed=0):
    """z, whether all before it and it were accepted: P(accept) = sigmoid(z / T)."""
    generator = np.random.default_rng(seed)
    z = generator.normal(1.0, 2.0, (n, len(temperatures)))
    accepted = generator.random(z.shape) < confidences(z, temperatures)
    return z, np.cumprod(accepted, axis=1)


def test_temperatures_are_found_one_after_the_other():
    true = np.array([0.5, 2.0, 1.0, 4.0])
    z, prefix = outcomes(true)
    found = fit_temperatures(z, prefix)
    assert np.abs(np.log(found / true)).max() < 0.2  # a grid step is 0.115
    for k in range(4):
        raw = ece(survivals(confidences(z))[:, k], prefix[:, k])
        fitted = ece(survivals(confidences(z, found))[:, k], prefix[:, k])
        assert fitted < 0.01
        assert fitted < raw or k == 2
    assert set(found) <= set(TEMPERATURE_GRID)


def test_calibrated_heads_stay():
    z, prefix = outcomes(np.ones(3), seed=1)
    assert np.abs(np.log(fit_temperatures(z, prefix))).max() < 0.12
    # Nothing to learn from: every temperature is as good, the nearest to 1 is taken.
    assert fit_temperatures(np.zeros((10, 2)), np.ones((10, 2))).tolist() == [1.0, 1.0]


def test_places_that_were_not_observed_do_not_count():
    z, prefix = outcomes(np.array([2.0, 0.5, 1.0]), seed=2)
    observed = np.ones(prefix.shape, dtype=bool)
    observed[::2, 1:] = False  # half of the answers end behind the first draft
    observed[:, 2] = False
    garbage = np.where(observed, prefix, 1)
    found = fit_temperatures(z, garbage, observed)
    assert found[:2] == pytest.approx([2.0, 0.5], rel=0.2)
    assert found[2] == 1.0


def test_bad_calibration_data_is_refused():
    z, ones = np.zeros((4, 2)), np.ones((4, 2))
    with pytest.raises(ConfigError, match=r"must all be \[n, G\]"):
        fit_temperatures(z, np.ones((4, 3)))
    with pytest.raises(ConfigError, match=r"must all be \[n, G\]"):
        fit_temperatures(z, ones, np.ones(4))
    with pytest.raises(ConfigError, match="not empty"):
        fit_temperatures(np.zeros((0, 2)), np.zeros((0, 2)))
    with pytest.raises(ConfigError, match="not finite"):
        fit_temperatures(z + np.nan, ones)
    with pytest.raises(ConfigError, match="no 1 after a 0"):
        fit_temperatures(z, [[0, 1]] * 4)
    with pytest.raises(ConfigError, match="hold 0 and 1"):
        fit_temperatures(z, ones * 0.5)
