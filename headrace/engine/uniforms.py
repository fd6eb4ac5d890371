"""The numbers of `core.rng` for many rows at once.

Contract: bit for bit those of `rng.word`, `rng.uniform` and `rng.draft_seed`; `core` itself loads
no NumPy. Arguments are arrays of equal shape. Used by `engine/sampler.py` and `engine/gumbel.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.core.rng import COUNTER_FACTOR, KEY_INCREMENT, Purpose

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]


def words(seeds: Words, positions: Ids, purpose: Purpose = Purpose.TARGET) -> Words:
    """64 random bits for each (seed, position)."""
    key = mixed(seeds + np.uint64(KEY_INCREMENT))
    counter = positions.astype(np.uint64) * np.uint64(len(Purpose)) + np.uint64(purpose + 1)
    return mixed(key ^ mixed(counter * np.uint64(COUNTER_FACTOR)))


def uniforms(
    seeds: Words, positions: Ids, purpose: Purpose = Purpose.TARGET
) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position)."""
    return (words(seeds, positions, purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draft_seeds(seeds: Words, anchors: Ids) -> Words:
    """Seeds of the numbers that draw the drafts behind the tokens at positions `anchors`."""
    after = anchors.astype(np.uint64) + np.uint64(1)
    return mixed(seeds ^ mixed(after * np.uint64(COUNTER_FACTOR)))


def mixed(z: Words) -> Words:
    """`rng.mix64` of an array; unsigned arrays wrap around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
