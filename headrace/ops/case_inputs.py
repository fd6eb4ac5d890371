"""What cases of operators are made of: arguments of one call, and seeded random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of one call.

    rows: positional arguments whose dim 0 is the batch row (so is dim 0 of every result).
    in_place: the positional argument (a RecordView) that the call writes, for operators that do.
    """

    args: tuple[Any, ...]
    rows: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    in_place: int | None = None


class Inputs:
    """Seeded random inputs in one dtype. `wide` numbers are fp32 (fp64 in the fp64 mode)."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers in the compute dtype."""
        return self.wide(*shape, scale=scale).to(self.dtype)

    def wide(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers in fp32 (fp64)."""
        numbers = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return (numbers * scale).to(self.wide_dtype)

    def weight(self, *shape: int) -> Tensor:
        """A linear weight [.., out, in] in the compute dtype, of gain one."""
        return self.normal(*shape, scale=shape[-1] ** -0.5)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator)

    def turn(self, rows: int, pairs: int) -> Tensor:
        """(cos, sin) [rows, pairs, 2] of some angles, fp32 (fp64)."""
        angle = self.wide(rows, pairs, scale=3.0)
        return torch.stack((angle.cos(), angle.sin()), dim=-1)

    def distinct(self, rows: int, count: int, total: int) -> Tensor:
        """int64 [rows, count], distinct numbers below `total` in each row."""
        return torch.rand((rows, total), generator=self._generator).argsort(-1)[:, :count]

    def edges(self, *shape: int) -> Tensor:
        """Numbers on which quantisers go wrong: zeros of both signs, ties, tiny and huge groups."""
        kinds = torch.tensor((0.0, -0.0, 0.25, -0.75, 1.25, 2.5, 17.0, 19.0, 448.0, 2.0**-10))
        base = kinds[self.integers(0, len(kinds), *shape)]
        powers = 2.0 ** self.integers(-30, 20, *shape[:-1], 1).to(torch.float64)
        return (base * powers).to(self.dtype)


Builder = Callable[[Inputs, int], Case]
