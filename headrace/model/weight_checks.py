"""What the numbers of a checkpoint must satisfy, checked tile by tile while they are read.

A single NaN or infinite weight turns every answer into noise, so loading refuses it by name. Called
by `weights`; raises CheckpointError and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.stored_formats import NAN_SCALE

# Bytes looked at at once: far below any limit of memory, far above the overhead of a call.
TILE_BYTES = 2**20
# On a device a call costs more, and memory is plenty.
DEVICE_TILE_BYTES = 2**27


def check_finite(name: str, numbers: Tensor) -> None:
    """Refuse NaN and infinite numbers of tensor `name`."""
    if not bool(torch.isfinite(numbers).all()):
        kind = "NaN" if bool(torch.isnan(numbers).any()) else "infinite numbers"
        raise CheckpointError(f"{name} holds {kind}.")


def check_mapped_finite(name: str, stored: Tensor) -> None:
    """As `check_finite` for a mapped tensor, without copying it."""
    flat = stored.reshape(-1)
    for tile in flat.split(TILE_BYTES // flat.element_size()):
        check_finite(name, tile)


def check_codes(name: str, codes: Tensor) -> None:
    """Refuse E4M3 codes, uint8, that are NaN (0x7F and 0xFF)."""
    for tile in codes.view(-1).split(DEVICE_TILE_BYTES):
        if bool(((tile & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{name} holds NaN.")


def check_scales(name: str, scales: Tensor, done: Callable[[int], None] | None = None) -> None:
    """Refuse UE8M0 scales that are NaN; `done` hears the bytes of every tile looked at."""
    for tile in scales.view(torch.uint8).reshape(-1).split(TILE_BYTES):
        if tile.numel() and int(tile.max()) == NAN_SCALE:
            raise CheckpointError(f"{name} holds NaN (byte {NAN_SCALE}).")
        if done is not None:
            done(tile.numel())


def check_expert_ids(name: str, table: Tensor, num_experts: int) -> None:
    """Refuse rows of int64 [tokens, k] that are not k different experts."""
    low, high = (int(limit) for limit in table.aminmax())
    if low < 0 or high >= num_experts:
        raise CheckpointError(
            f"{name} names expert {low if low < 0 else high}, allowed are 0 to {num_experts - 1}."
        )
    ordered = table.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    if bool(twice.any()):
        row = int(twice.nonzero()[0, 0])
        raise CheckpointError(f"{name} names an expert twice for token {row}.")
