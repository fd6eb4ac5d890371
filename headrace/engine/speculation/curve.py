"""What a step costs by its size: a monotone curve of seconds, measured at start-up.

Contract: pure NumPy, no clock: `measure` takes a callable that runs one step and returns its
seconds. Sizes are rows (verification) or requests (drafting, sampling). Corrected while
serving by `cost.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_CURVE_POINTS = 4096


class Curve:
    """Seconds by size.

    sizes int64 [n]: >= 0, strictly increasing. seconds float64 [n]: >= 0; made monotone (a larger
    step that seems faster was measured in a lucky moment). stepped: sizes are those of captured
    graphs, a step costs what the next size costs; otherwise linear between the sizes. Below the
    first size the first value holds, above the last one the slope of the last two goes on (one
    size: constant). Raises ConfigError.
    """

    def __init__(
        self, sizes: Sequence[int], seconds: Sequence[float], *, stepped: bool = False
    ) -> None:
        given = np.asarray(sizes)
        times = np.asarray(seconds, dtype=np.float64)
        if given.ndim != 1 or times.shape != given.shape or not 1 <= given.size <= MAX_CURVE_POINTS:
            raise _wrong(
                f"sizes and seconds must be lists of one length, 1 .. {MAX_CURVE_POINTS}, got "
                f"shapes {given.shape} and {times.shape}"
            )
        if given.dtype.kind not in "iu":
            raise _wrong(f"sizes must be integers, got {given.dtype}")
        points = given.astype(np.int64)
        if points[0] < 0 or points[-1] >= 2**31 or np.any(np.diff(points) <= 0):
            raise _wrong(f"sizes must increase within 0 .. 2^31 - 1, got {_shown(given)}")
        if not np.all(np.isfinite(times)) or times.min() < 0:
            raise _wrong(f"seconds must be finite and >= 0, got {_shown(times)}")
        self.sizes: Ints = points
        self.seconds: Floats = np.maximum.accumulate(times)
        self.stepped = stepped
        rise = 0.0 if points.size < 2 else float(self.seconds[-1] - self.seconds[-2])
        run = 1 if points.size < 2 else int(points[-1] - points[-2])
        self._slope = rise / run
        self._last = int(points[-1])
        self._points: tuple[list[int], list[float]] = (points.tolist(), self.seconds.tolist())

    @classmethod
    def linear(cls, base_s: float, per_unit_s: float) -> Curve:
        """base_s + per_unit_s * size."""
        return cls((0, 1), (base_s, base_s + per_unit_s))

    def at(self, sizes: Ints) -> Floats:
        """Seconds of steps of these sizes, int64 [m] -> float64 [m]."""
        if self.stepped:
            place = np.searchsorted(self.sizes, sizes)
            inside = self.seconds[np.minimum(place, self.sizes.size - 1)]
        else:
            inside = np.interp(sizes, self.sizes, self.seconds)
        if self._slope == 0.0:
            return inside
        return inside + self._slope * np.maximum(sizes - self._last, 0)

    def of(self, size: int) -> float:
        """Seconds of one step of this size; the same numbers as `at`, without arrays."""
        sizes, seconds = self._points
        above = bisect_left(sizes, size)
        if above == len(sizes):
            return seconds[-1] + self._slope * (size - sizes[-1])
        if self.stepped or above == 0 or sizes[above] == size:
            return seconds[above]
        rise = (seconds[above] - seconds[above - 1]) / (sizes[above] - sizes[above - 1])
        return rise * (size - sizes[above - 1]) + seconds[above - 1]

    def rounded(self, sizes: Ints) -> Ints:
        """Rows that a step really computes: of a stepped curve the next captured size."""
        if not self.stepped:
            return sizes
        place = np.minimum(np.searchsorted(self.sizes, sizes), self.sizes.size - 1)
        return np.maximum(self.sizes[place], sizes)


def measure(
    run_step: Callable[[int], float],
    sizes: Iterable[int],
    *,
    stepped: bool = False,
    warmup: int = 1,
    repeats: int = 5,
    budget_s: float = math.inf,
) -> Curve:
    """The curve of `run_step`, which runs one step of n rows (or requests) and returns its seconds.

    Each size runs `warmup` times unmeasured and `repeats` >= 1 times measured; of three or more the
    fastest and the slowest are dropped, the rest is averaged. Sizes are taken sorted, once each,
    until `budget_s` is used up, but two of them at least.
    Raises ConfigError, also if `run_step` returns what is no duration.
    """
    if repeats < 1 or warmup < 0:
        raise _wrong(f"repeats must be >= 1 and warmup >= 0, got {repeats} and {warmup}")
    asked = sorted(set(sizes))
    means: list[float] = []
    for size in asked:
        if budget_s <= 0 and len(means) >= 2:
            break
        warming = [run_step(size) for _ in range(warmup)]
        times = sorted(run_step(size) for _ in range(repeats))
        budget_s -= sum(warming) + sum(times)
        kept = times[1:-1] if repeats >= 3 else times
        means.append(sum(kept) / len(kept))
    return Curve(asked[: len(means)], means, stepped=stepped)


def default_sizes(most: int) -> list[int]:
    """Sizes worth measuring up to `most`: powers of two and the middle between them, and `most`."""
    if most < 1:
        raise _wrong(f"the largest size must be >= 1, got {most}")
    powers = [2**k for k in range(most.bit_length())]
    return sorted({n for p in powers for n in (p, p + p // 2) if n <= most} | {most})


def _shown(values: NDArray[np.generic]) -> str:
    listed = values.tolist()
    return f"{listed[:8]}..." if len(listed) > 8 else str(listed)


def _wrong(reason: str) -> ConfigError:
    return ConfigError(f"Throughput curve: {reason}.", param="engine.speculation")
