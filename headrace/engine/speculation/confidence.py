"""From what the confidence head says to how likely a draft survives, and how well that holds.

Contract: pure NumPy. z is the head's raw output for a draft given the drafts before it; survival is
the probability that it and all before it are accepted. `fit_temperatures` (Sequential Temperature
Scaling) is run offline by training; the engine corrects what is left online (`estimator.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.errors import ConfigError

Floats = NDArray[np.float64]
Survivals = NDArray[np.float32] | NDArray[np.float64]
LEAST_TEMPERATURE = 1e-5
MOST_LOGIT = 60.0  # beyond it a sigmoid is 0 or 1 in fp64 for all purposes
TEMPERATURE_GRID = np.logspace(-1.0, 1.0, 41)
BINS = 15


def confidences(z: ArrayLike, temperatures: ArrayLike = 1.0) -> Floats:
    """sigmoid(z / T), float64 of the shape of z [..., G]; temperatures: one, or G of them.

    z / T is clamped to +-60 and T to >= 1e-5. What is not a number gives 0: a draft whose
    confidence could not be computed is not worth a row.
    """
    scaled = np.asarray(z, dtype=np.float64) / np.maximum(temperatures, LEAST_TEMPERATURE)
    return sigmoid(np.nan_to_num(np.clip(scaled, -MOST_LOGIT, MOST_LOGIT), nan=-np.inf))


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) without overflow for x >= -700 or -inf."""
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-x)), dtype=np.float64)


def survivals(confidence: ArrayLike) -> Floats:
    """Cumulative products along the last axis, [..., G], non-increasing and within [0, 1]."""
    known = np.nan_to_num(np.asarray(confidence, dtype=np.float64), nan=0.0)
    return np.asarray(np.cumprod(np.clip(known, 0.0, 1.0), axis=-1), dtype=np.float64)


def ece(predicted: ArrayLike, happened: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error of probabilities [n] against outcomes [n] (0 or 1).

    sum over `bins` equal bins of [0, 1] of (share of the samples) * |mean predicted - mean
    happened|. Raises ConfigError for shapes that differ or no samples.
    """
    p = np.asarray(predicted, dtype=np.float64)
    y = np.asarray(happened, dtype=np.float64)
    if p.ndim != 1 or p.shape != y.shape or p.size == 0 or bins < 1:
        raise _wrong(f"predictions {p.shape} and outcomes {y.shape} must be [n], n >= 1, bins >= 1")
    place = np.clip((p * bins).astype(np.int64), 0, bins - 1)
    gaps = np.bincount(place, weights=p - y, minlength=bins)
    return float(np.abs(gaps).sum() / p.size)


def fit_temperatures(z: ArrayLike, prefix: ArrayLike, observed: ArrayLike | None = None) -> Floats:
    """Temperatures float64 [G], by Sequential Temperature Scaling.

    z [n, G]: raw outputs of the confidence head, T = 1. prefix [n, G]: whether the first k drafts
    were all accepted, from rounds in which ALL drafts were verified, under the coupling that is
    served. observed [n, G]: which of these are known (not behind the end of an answer); None: all.
    For k = 1 .. G in order, T_k is the value of a grid (41 from 0.1 to 10, logarithmic) with the
    least `ece` of S_{k-1} * sigmoid(z_k / T_k); of equal ones the nearest to 1; 1 where nothing was
    observed. Source: temperature scaling (Guo et al. 2017), one position after the other. Raises
    ConfigError.
    """
    logits = np.asarray(z, dtype=np.float64)
    accepted = np.asarray(prefix, dtype=np.float64)
    seen = np.ones(logits.shape, dtype=bool) if observed is None else np.asarray(observed) != 0
    if logits.ndim != 2 or not logits.shape == accepted.shape == seen.shape or not logits.size:
        raise _wrong(
            f"z {logits.shape}, prefix {accepted.shape} and observed {seen.shape} must all be "
            "[n, G], not empty"
        )
    if not np.all(np.isfinite(logits)):
        raise _wrong("z holds values that are not finite")
    rises = (np.diff(accepted, axis=1) > 0) & seen[:, 1:] & seen[:, :-1]
    if not np.all((accepted == 0.0) | (accepted == 1.0)) or np.any(rises):
        raise _wrong("prefix must hold 0 and 1, and no 1 after a 0 in its row")
    order = np.argsort(np.abs(np.log(TEMPERATURE_GRID)), kind="stable")
    survival = np.ones(len(logits))
    fitted = np.ones(logits.shape[1])
    for k in np.flatnonzero(seen.any(axis=0)):
        known = seen[:, k]
        products = [survival * confidences(logits[:, k], t) for t in TEMPERATURE_GRID[order]]
        errors = [ece(product[known], accepted[known, k]) for product in products]
        best = int(np.argmin(errors))
        fitted[k], survival = TEMPERATURE_GRID[order][best], products[best]
    return fitted


def _wrong(reason: str) -> ConfigError:
    return ConfigError(f"Calibration: {reason}.", param="calibration")
