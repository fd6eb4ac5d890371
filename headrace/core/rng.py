"""Counter-based random numbers: pure functions of (seed, absolute position, purpose).

No row, step or batch index enters, so a request draws the same numbers alone, in any batch, after
preemption and on another engine. The generator is SplitMix64's finaliser over a keyed counter.
"""

from __future__ import annotations

import math
from enum import IntEnum

KEY_INCREMENT = 0x9E3779B97F4A7C15
# Another odd constant than for the key, so that key and counter never cancel.
COUNTER_FACTOR = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a number is used for; streams of different purposes are independent."""

    TARGET = 0
    RESIDUAL = 1
    ACCEPT = 2
    DRAFT = 3


def mix64(value: int) -> int:
    """SplitMix64 finaliser, uint64 -> uint64."""
    z = value & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def word(seed: int, position: int, purpose: Purpose = Purpose.TARGET) -> int:
    """64 random bits. `position` counts from the first prompt token."""
    key = mix64(seed + KEY_INCREMENT)
    counter = (position * len(Purpose) + int(purpose) + 1) & _MASK
    return mix64(key ^ mix64(counter * COUNTER_FACTOR))


def uniform(seed: int, position: int, purpose: Purpose = Purpose.TARGET) -> float:
    """A number in [0, 1) with 53 bits."""
    return (word(seed, position, purpose) >> 11) * 2.0**-53


def gumbel(seed: int, position: int, token: int) -> float:
    """Gumbel noise of one id at one position: -log(-log(1 - v)), v in (0, 1) with 52 bits.

    Ids continue the word of (seed, position) like a SplitMix64 stream. v is never 0 or 1, so the
    noise is finite: between -3.7 and 36.8.
    """
    bits = mix64(word(seed, position) + (token + 1) * KEY_INCREMENT) >> 12
    return -math.log(-math.log1p(-(bits + 0.5) * 2.0**-52))


def draft_seed(seed: int, anchor: int) -> int:
    """Seed of the numbers that draw the drafts behind the token at position `anchor`.

    A position is drafted again when an earlier draft of the round was rejected. How much is
    verified then may depend on the first round's drafts (through their confidences), so the second
    round must not draw with the same numbers (docs/decisions/0010-two-couplings.md).
    """
    return mix64(seed ^ mix64((anchor + 1) * COUNTER_FACTOR))


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice number `choice` of a request with several choices; choice 0 keeps `seed`."""
    return seed if choice == 0 else mix64(seed ^ mix64(choice * KEY_INCREMENT))
