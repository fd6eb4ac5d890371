"""How well the confidence of a draft module holds, and the temperatures that mend it.

Outcomes come from rounds in which all drafts were verified (`train.rounds`), under the coupling
that is served. Places behind the end of an answer are not observed and count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from train.rounds import Round

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
GRID = np.logspace(-1, 1, 41)
BINS = 15
LARGEST = 60.0


def outcomes(rounds: Sequence[Round]) -> tuple[Numbers, Flags, Flags]:
    """(confidence, accepted, observed), each [rounds, n]."""
    return (
        np.stack([one.confidence for one in rounds]),
        np.stack([one.accepted for one in rounds]),
        np.stack([one.observed for one in rounds]),
    )


def survival(confidence: Numbers, temperatures: Sequence[float]) -> Numbers:
    """Predicted probability [rounds, n] that a draft and all before it are accepted."""
    z = np.clip(confidence / np.asarray(temperatures), -LARGEST, LARGEST)
    return np.cumprod(1.0 / (1.0 + np.exp(-z)), axis=-1)


def calibration_error(predicted: Numbers, happened: Flags) -> float:
    """Expected calibration error of probabilities [m] against outcomes [m], in 15 equal bins:
    sum over the bins of |sum of predictions - sum of outcomes| / m."""
    if not len(predicted):
        return 0.0
    place = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    gap = np.bincount(place, weights=predicted - happened, minlength=BINS)
    return float(np.abs(gap).sum() / len(predicted))


def fit_temperatures(confidence: Numbers, accepted: Flags, observed: Flags) -> list[float]:
    """One temperature per place, each with the smallest error of the product up to its place while
    those before it stay (sequential temperature scaling). All arrays [rounds, n]."""
    fitted: list[float] = []
    before = np.ones(len(confidence))
    for place in range(confidence.shape[1]):
        seen = observed[:, place]
        products = [before * survival(confidence[:, place : place + 1], [t])[:, 0] for t in GRID]
        errors = [calibration_error(p[seen], accepted[seen, place]) for p in products]
        best = int(np.argmin(errors))
        before = products[best]
        fitted.append(round(float(GRID[best]), 6))
    return fitted


def survival_error(
    rounds: Sequence[Round], temperatures: Sequence[float]
) -> tuple[float, list[float]]:
    """Calibration error of the cumulative products: over all places, and of each."""
    confidence, accepted, observed = outcomes(rounds)
    predicted = survival(confidence, temperatures)
    places = range(confidence.shape[1])
    single = [
        calibration_error(predicted[observed[:, k], k], accepted[observed[:, k], k]) for k in places
    ]
    return calibration_error(predicted[observed], accepted[observed]), single
