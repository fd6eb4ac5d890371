"""Confidence learned while serving: for checkpoints without a confidence head, or to correct one.

Contract: pure NumPy, memory independent of the number of steps. c_k = sigmoid(w * f + b_k), f a
number known before draft k is drawn: the logit of the draft's top probability (`top_logit`), or the
raw output of a confidence head. Labels are what verification showed: 1 accepted, 0 first rejected,
later drafts unknown. Every `STEPS` observed steps one damped Newton step is made, in which earlier
labels count as curvature and fade. Parameters depend on past rounds only, so decisions stay causal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.engine.speculation.confidence import sigmoid
from headrace.engine.speculation.curve import Floats, Ints
from headrace.errors import InternalError

Flags = NDArray[np.bool_]
STEPS = 100
MOST_FEATURE = 40.0
HEADLESS_START = (0.5, -0.2)  # slope, intercept for `top_logit`
HEAD_START = (1.0, 0.0)  # trust the head
# L2 towards the start values, as prior variances. Intercepts differ less from each other than all
# of them may be off together: places that are never verified follow those that are, else a head
# that is too timid would never be found out.
SLOPE_VARIANCE, COMMON_VARIANCE, OWN_VARIANCE = 1.0, 1.0, 0.1
MEMORY = 0.8  # what earlier curvature still weighs at the next Newton step
# Features reach 40, so the slope moves in smaller steps than the intercepts; it stays >= 0: a surer
# draft is never less likely accepted.
MOST_CHANGE = (0.25, 1.0)  # of slope and intercepts in one Newton step
MOST_SLOPE, MOST_INTERCEPT = 10.0, 20.0


def top_logit(logits: Floats) -> Floats:
    """Logit of the top probability of each row: log p - log(1 - p), [..., V] -> [...], clamped to
    +-40. A function of the drafts before, not of the drawn one."""
    top = logits.max(axis=-1, keepdims=True)
    mass = np.exp(logits - top).sum(axis=-1)
    # Without the top itself: mass - 1, exact for ties, and never below what fp64 resolves.
    rest = np.maximum(mass - 1.0, np.exp(-MOST_FEATURE))
    return np.asarray(np.clip(-np.log(rest), -MOST_FEATURE, MOST_FEATURE), dtype=np.float64)


class ConfidenceEstimator:
    """draft_length: G. start: slope and intercept before anything was observed."""

    def __init__(self, draft_length: int, start: tuple[float, float] = HEADLESS_START) -> None:
        self._start = np.array([start[0]] + [start[1]] * draft_length)
        self._theta = self._start.copy()
        variance = np.zeros((self._theta.size, self._theta.size))
        variance[0, 0] = SLOPE_VARIANCE
        variance[1:, 1:] = COMMON_VARIANCE + OWN_VARIANCE * np.eye(draft_length)
        self._prior = np.linalg.inv(variance)
        self._gradient = np.zeros_like(self._theta)
        self._curvature = np.zeros((self._theta.size, self._theta.size))
        self._past = np.zeros_like(self._curvature)
        self._steps = 0

    @property
    def slope(self) -> float:
        """w."""
        return float(self._theta[0])

    @property
    def intercepts(self) -> Floats:
        """b, float64 [G]."""
        return self._theta[1:].copy()

    def confidences(self, features: Floats) -> Floats:
        """c [R, G] of features [R, G]; what is not a number gives 0."""
        theta = self._theta  # read once: another thread may refit
        logits = theta[0] * _clamped(features) + theta[1:]
        return sigmoid(np.nan_to_num(logits, nan=-np.inf))

    def observe(self, features: Floats, verified: Ints, accepted: Ints) -> tuple[Flags, Floats]:
        """What one step showed: features [R, G] of the verified drafts, how many drafts of each
        request were verified [R] and accepted [R]. Gives which drafts were judged [R, G] (verified,
        and all before them accepted), and their confidences [R, G].

        Leave out requests whose rounds say nothing (cut by a stop token, placeholder drafts).
        """
        places = np.arange(features.shape[-1])
        if (accepted > verified).any() or (verified > places.size).any():
            raise InternalError("more drafts accepted than verified, or verified than drafted")
        c = self.confidences(features)
        judged = places < np.minimum(accepted + 1, verified)[:, None]
        used = judged & ~np.isnan(features)
        f = np.where(used, _clamped(features), 0.0)
        error = ((places < accepted[:, None]) - c) * used
        weight = np.maximum(c * (1.0 - c), 1e-6) * used
        self._gradient[0] += np.vdot(error, f)
        self._gradient[1:] += error.sum(axis=0)
        weighted = weight * f
        cross = weighted.sum(axis=0)
        self._curvature[0, 0] += np.vdot(weighted, f)
        self._curvature[0, 1:] += cross
        self._curvature[1:, 0] += cross
        self._curvature[1:, 1:] += np.diag(weight.sum(axis=0))
        self._steps += 1
        if self._steps % STEPS == 0:
            self._refit()
        return judged, c

    def _refit(self) -> None:
        """One Newton step on the penalised log likelihood of the labels since the last one; the
        faded curvature of earlier labels damps it."""
        self._past = MEMORY * self._past + self._curvature
        gradient = self._gradient + self._prior @ (self._start - self._theta)
        matrix = self._past + self._prior
        step = np.clip(np.linalg.solve(matrix, gradient)[0], -MOST_CHANGE[0], MOST_CHANGE[0])
        slope = np.clip(self._theta[0] + step, 0.0, MOST_SLOPE)
        # The intercepts that go best with the slope as it was bounded.
        rest = gradient[1:] - matrix[1:, 0] * (slope - self._theta[0])
        change = np.clip(np.linalg.solve(matrix[1:, 1:], rest), -MOST_CHANGE[1], MOST_CHANGE[1])
        intercepts = np.clip(self._theta[1:] + change, -MOST_INTERCEPT, MOST_INTERCEPT)
        # Replaced as a whole: another thread may be reading.
        self._theta = np.concatenate(([slope], intercepts))
        self._gradient[:] = 0.0
        self._curvature[:] = 0.0


def _clamped(features: Floats) -> Floats:
    return np.minimum(np.maximum(features, -MOST_FEATURE), MOST_FEATURE)
