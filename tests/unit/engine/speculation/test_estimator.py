"""Confidence learned from outcomes."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.speculation.confidence import sigmoid
from headrace.engine.speculation.estimator import (
    HEAD_START,
    STEPS,
    ConfidenceEstimator,
    top_logit,
)
from headrace.errors import InternalError


def test_top_logit_is_the_logit_of_the_top_probability():
    logits = np.random.default_rng(0).normal(0.0, 3.0, (5, 4, 50))
    p = np.exp(logits).max(axis=-1) / np.exp(logits).sum(axis=-1)
    assert top_logit(logits) == pytest.approx(np.log(p / (1 - p)))
    assert top_logit(np.array([1.0, 1.0])) == pytest.approx(0.0)  # a tie: one half each
    assert top_logit(np.array([1000.0, 0.0, 0.0])) == 40.0
    assert top_logit(np.array([0.0, -np.inf])) == 40.0
    assert top_logit(np.array([1000.0, 990.0, -np.inf])) == pytest.approx(10.0)


def simulate(estimator, slope, intercepts, steps, seed=0, requests=16, verified=None):
    """Show outcomes of P(accept | f) = sigmoid(slope * f + b_k)."""
    generator = np.random.default_rng(seed)
    length = len(intercepts)
    for _ in range(steps):
        features = generator.normal(1.0, 2.0, (requests, length))
        accepts = generator.random(features.shape) < sigmoid(slope * features + intercepts)
        lengths = np.full(requests, length) if verified is None else verified(features, generator)
        accepted = np.minimum(np.cumprod(accepts, axis=1).sum(axis=1), lengths)
        estimator.observe(features, lengths, accepted)


def test_starts_from_its_prior_and_waits_for_steps():
    estimator = ConfidenceEstimator(3)
    assert estimator.confidences(np.zeros((1, 3))) == pytest.approx(1 / (1 + np.exp(0.2)))
    simulate(estimator, 2.0, np.zeros(3), STEPS - 1)
    assert (estimator.slope, estimator.intercepts.tolist()) == (0.5, [-0.2] * 3)
    simulate(estimator, 2.0, np.zeros(3), 1)
    assert estimator.slope == 0.75  # one bounded step


@pytest.mark.parametrize(
    ("slope", "intercepts"),
    [(1.0, [0.0] * 4), (0.3, [1.0, 0.5, -0.5, -1.0]), (2.5, [2.0, 0, 0, 1])],
)
def test_learns_slope_and_intercepts(slope, intercepts):
    estimator = ConfidenceEstimator(4)
    simulate(estimator, slope, np.array(intercepts), 30 * STEPS)
    assert estimator.slope == pytest.approx(slope, rel=0.1)
    assert estimator.intercepts == pytest.approx(intercepts, abs=0.25)


def test_choosing_what_to_verify_does_not_bias_it():
    """Only confident drafts are verified: outcomes given the features stay what they are."""
    estimator = ConfidenceEstimator(3, HEAD_START)

    def confident(features, generator):
        return (features > 1.0).cumprod(axis=1).sum(axis=1)

    simulate(estimator, 1.5, np.array([0.5, 0.0, -0.5]), 40 * STEPS, verified=confident)
    assert estimator.slope == pytest.approx(1.5, rel=0.15)
    assert estimator.intercepts == pytest.approx([0.5, 0.0, -0.5], abs=0.4)


def test_follows_a_change():
    estimator = ConfidenceEstimator(2)
    simulate(estimator, 1.0, np.array([1.0, 1.0]), 20 * STEPS)
    simulate(estimator, 1.0, np.array([-1.0, -1.0]), 20 * STEPS, seed=1)
    assert estimator.intercepts == pytest.approx([-1.0, -1.0], abs=0.25)


@pytest.mark.parametrize("accept_all", [True, False])
def test_labels_that_contradict_the_features(accept_all):
    estimator = ConfidenceEstimator(2)
    features = np.tile([[40.0, -1e9]], (8, 1))
    for _ in range(30 * STEPS):
        estimator.observe(features, np.full(8, 2), np.full(8, 2 * accept_all))
    found = estimator.confidences(features)
    assert 0.0 <= estimator.slope <= 10.0
    assert np.all(np.abs(estimator.intercepts) <= 20.0)
    assert np.all(found > 0.99) if accept_all else np.all(found < 0.1)


def test_only_judged_drafts_count():
    """Drafts behind the first rejected one, and those not verified, say nothing."""
    one, other = ConfidenceEstimator(3), ConfidenceEstimator(3)
    generator = np.random.default_rng(3)
    for _ in range(STEPS):
        features = generator.normal(size=(4, 3))
        one.observe(features, np.array([3, 2, 1, 0]), np.array([1, 0, 1, 0]))
        features[0, 2:], features[1, 1:], features[2, 1:], features[3] = 9.0, np.nan, -9.0, 5.0
        other.observe(features, np.array([2, 1, 1, 0]), np.array([1, 0, 1, 0]))
    assert one.slope == pytest.approx(other.slope)
    assert one.intercepts == pytest.approx(other.intercepts)
    assert one.slope != 0.5


def test_what_is_not_a_number_gives_no_confidence_and_no_label():
    estimator = ConfidenceEstimator(2)
    features = np.array([[np.nan, np.inf], [-np.inf, 1.0]])
    found = estimator.confidences(features)
    assert found[0, 0] == 0.0
    assert found[0, 1] > 0.99999
    for _ in range(STEPS):
        estimator.observe(np.full((2, 2), np.nan), np.array([2, 2]), np.array([2, 0]))
    assert (estimator.slope, estimator.intercepts.tolist()) == (0.5, [-0.2, -0.2])


def test_impossible_outcomes_are_refused():
    estimator = ConfidenceEstimator(2)
    for verified, accepted in ((1, 2), (3, 1)):
        with pytest.raises(InternalError, match="more drafts accepted than verified"):
            estimator.observe(np.zeros((1, 2)), np.array([verified]), np.array([accepted]))
