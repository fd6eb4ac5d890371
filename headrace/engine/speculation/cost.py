"""How long a step takes: start-up curves, corrected by what the steps of the day really took.

Contract: pure NumPy, no clock: seconds come in through `observe`. Memory is bounded (a window of
steps). A start-up curve does not know how long contexts are or how busy the machine is; the
correction is a slope per row that adds what it misses (the rule of DeepInfer 0.1.0).
"""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

from headrace.engine.speculation.curve import Curve, Floats
from headrace.errors import ConfigError

WINDOW_STEPS = 5000
LEAST_PER_SIZE = 10
LEAST_STEP_S = 1e-9  # so that speeds stay finite
REFRESH_STEPS = 32  # the slope is computed again after this many observed steps
SAMPLER_SAMPLES = 9
LEAST_SAMPLER_SAMPLES = 5


class StepCost:
    """Seconds of a step: verification by rows, drafting and sampling by requests.

    verify: forward of the target, by rows of the step. draft: one draft pass, by requests drafted
    for. sampler: what sampling and acceptance take, by requests that sample, until enough steps
    were observed; leave it out if `verify` was measured with it.
    """

    def __init__(
        self, verify: Curve, draft: Curve | None = None, sampler: Curve | None = None
    ) -> None:
        self.verify = verify
        self.draft = draft if draft is not None else Curve.linear(0.0, 0.0)
        self.sampler = sampler if sampler is not None else Curve.linear(0.0, 0.0)
        self.slope_s_per_row = 0.0
        self._table: Floats = np.empty(0)  # verify_s by rows, at the present slope
        self._places = np.zeros(WINDOW_STEPS, dtype=np.int64)
        self._residuals = np.zeros(WINDOW_STEPS)
        self._observed = 0
        self._sampled: deque[float] = deque(maxlen=SAMPLER_SAMPLES)
        self._sampled_by_size = [deque[float](maxlen=SAMPLER_SAMPLES) for _ in range(_buckets())]

    def verify_s(self, first_rows: int, count: int) -> Floats:
        """Forward seconds of steps of first_rows, first_rows + 1, ...: float64 [count],
        read-only."""
        end = first_rows + count
        if end > self._table.size:
            # Doubled, so that a growing step seldom pays; bounded by the rows that a step may have.
            rows = np.arange(max(end, 2 * self._table.size))
            seconds = self.verify.at(rows) + self.slope_s_per_row * self.verify.rounded(rows)
            self._table = np.maximum(seconds, LEAST_STEP_S)
            self._table.flags.writeable = False
        return self._table[first_rows:end]

    def draft_s(self, requests: int) -> float:
        """Seconds of one draft pass; 0 for nobody."""
        return self.draft.of(requests) if requests else 0.0

    def sampler_s(self, requests: int) -> float:
        """Seconds of sampling: median of the latest steps of about this size, else of all steps,
        else the start-up curve."""
        for samples in (self._sampled_by_size[_bucket(requests)], self._sampled):
            if len(samples) >= LEAST_SAMPLER_SAMPLES:
                return median(samples)
        return self.sampler.of(requests)

    def observe(
        self, rows: int, forward_s: float, *, requests: int = 0, sampler_s: float | None = None
    ) -> None:
        """Take in what a step of `rows` rows took. Only steps of decoding requests without prompt
        chunks belong here, and only what `verify` was measured with.

        Raises ConfigError for what is no duration.
        """
        for seconds in (forward_s, 0.0 if sampler_s is None else sampler_s):
            if not 0.0 <= seconds < float("inf"):
                raise ConfigError(f"A step cannot take {seconds} s.", param="engine.speculation")
        if rows > 0:
            self._observe_forward(rows, forward_s)
        if sampler_s is not None:
            self._sampled.append(sampler_s)
            self._sampled_by_size[_bucket(requests)].append(sampler_s)

    def _observe_forward(self, rows: int, forward_s: float) -> None:
        size = int(self.verify.rounded(np.array([rows]))[0])
        at = self._observed % WINDOW_STEPS
        self._places[at] = np.searchsorted(self.verify.sizes, size)
        self._residuals[at] = (forward_s - self.verify.of(rows)) / size
        self._observed += 1
        if self._observed % REFRESH_STEPS == 0:
            self.slope_s_per_row = self._slope()
            self._table = np.empty(0)

    def _slope(self) -> float:
        """Median over sizes of each size's median residual per row; 0 where the curve is too
        pessimistic, since one lucky stretch must not talk the policy into long steps."""
        count = min(self._observed, WINDOW_STEPS)
        places, residuals = self._places[:count], self._residuals[:count]
        medians = [
            float(np.median(residuals[places == place]))
            for place in np.flatnonzero(np.bincount(places) >= LEAST_PER_SIZE)
        ]
        return max(0.0, median(medians)) if medians else 0.0


def _bucket(requests: int) -> int:
    """Sampling times are kept for each number of requests up to 8, then for each eighth of a
    power of two: few enough to be bounded, close enough to be alike."""
    if requests < 8:
        return requests
    power = requests.bit_length() - 4
    return min(8 * power + (requests >> power), _buckets() - 1)


def _buckets() -> int:
    return 8 * 18  # up to 2^20 requests
