"""Tile choices of the kernels that depend on the card, by compute capability.

One row a kind of card; kernels take theirs with `of` at each call, which asks a device once. What
no row names gets the smallest tiles, which fit every card from SM80 on. A choice never depends on
the number of rows: it must not change a row's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

KIB = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """The choices for one kind of card."""

    # What a block may take when it asks for more than the default.
    shared_bytes: int
    # Sparse attention: heads and keys of a tile, and how they are computed.
    attention_heads: int
    attention_keys: int
    attention_stages: int
    attention_warps: int


CARDS = {
    (8, 0): Tiles(163 * KIB, 16, 32, 3, 4),
    (9, 0): Tiles(227 * KIB, 16, 32, 3, 4),
    (10, 0): Tiles(227 * KIB, 16, 32, 3, 4),
    (12, 0): Tiles(99 * KIB, 16, 16, 3, 4),
}
SMALLEST = CARDS[12, 0]


def for_capability(capability: tuple[int, int]) -> Tiles:
    """The choices for cards of a compute capability such as (9, 0)."""
    return CARDS.get(capability, SMALLEST)


@cache
def of(device: torch.device) -> Tiles:
    """The choices for a device; the smallest off cards, where kernels are interpreted."""
    if device.type != "cuda":
        return SMALLEST
    return for_capability(torch.cuda.get_device_capability(device))
