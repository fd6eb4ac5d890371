"""Tile choices of the kernels that depend on the card, by compute capability.

One row a kind of card; kernels take theirs with `of` at each call, which asks a device once. What
no row names gets the smallest tiles, which fit every card from SM80 on. Where several are given,
the operator takes one by the number of rows, or the same for all when its bits must not depend on
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

KIB = 1024


class AttentionTile(NamedTuple):
    """Heads and keys of a tile, and how it is computed."""

    heads: int
    keys: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The choices for one kind of card."""

    # What a block may take when it asks for more than the default.
    shared_bytes: int
    # Sparse attention: what fits every dtype and format, at widths of up to 1,024.
    attention: AttentionTile
    # In bf16 over FP4 records or plain rows of up to 512 numbers, by heads, ascending from 16.
    attention_bf16: tuple[AttentionTile, ...]


_ANY = AttentionTile(16, 32, 3, 4)
_FEW_HEADS = AttentionTile(16, 32, 2, 4)
_SOME_HEADS = AttentionTile(32, 32, 2, 4)
CARDS = {
    (8, 0): Tiles(163 * KIB, _ANY, (_FEW_HEADS,)),
    (9, 0): Tiles(227 * KIB, _ANY, (_FEW_HEADS, _SOME_HEADS, AttentionTile(64, 64, 2, 8))),
    # Its matrix products take 64 keys of 64 heads to 257 KiB.
    (10, 0): Tiles(227 * KIB, _ANY, (_FEW_HEADS, _SOME_HEADS, AttentionTile(64, 32, 2, 8))),
    (12, 0): Tiles(99 * KIB, AttentionTile(16, 16, 3, 4), (_FEW_HEADS,)),
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
