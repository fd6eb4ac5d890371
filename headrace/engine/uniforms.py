"""The numbers of `core.rng` for many rows at once.

Contract: bit for bit those of `rng.uniform`; `core` itself loads no NumPy. Used by
`engine/sampler.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.core.rng import COUNTER_FACTOR, KEY_INCREMENT, Purpose


def uniforms(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], purpose: Purpose = Purpose.TARGET
) -> NDArray[np.float64]:
    """`uniform` of many (seed, position) pairs at once, bit for bit; arrays of equal shape."""
    key = _mix64s(seeds + np.uint64(KEY_INCREMENT))
    counter = positions.astype(np.uint64) * np.uint64(len(Purpose)) + np.uint64(purpose + 1)
    mixed = _mix64s(key ^ _mix64s(counter * np.uint64(COUNTER_FACTOR)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64s(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of an array; unsigned arrays wrap around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
