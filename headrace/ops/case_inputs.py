"""What cases of operators are made of: one call's arguments, seeded inputs, and cache views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.core.kv import RecordFormat
from headrace.ops.records import RecordView
from headrace.ops.reference.quant import write_records


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


# name -> (format, width, rope width, scales apart from the data)
RECORDS = {
    "plain": (RecordFormat.PLAIN, 24, 0, False),
    "fp4_e4m3": (RecordFormat.FP4_E4M3_16, 32, 0, False),
    "fp4_e4m3_released": (RecordFormat.FP4_E4M3_16, 512, 0, False),
    "fp8": (RecordFormat.FP8_UE8M0_32, 64, 0, False),
    "fp8_released": (RecordFormat.FP8_UE8M0_32, 512, 0, False),
    "fp4_ue8m0": (RecordFormat.FP4_UE8M0_32, 32, 0, False),
    "fp4_ue8m0_planar": (RecordFormat.FP4_UE8M0_32, 128, 0, True),
    "fp8_nope": (RecordFormat.FP8_NOPE_64, 48, 16, False),
    "fp8_nope_released": (RecordFormat.FP8_NOPE_64, 512, 64, False),
}


def record_view(i: Inputs, name: str, majors: int, minors: int) -> RecordView:
    """A view into a strided arena full of 0xFF bytes (NaN in every format)."""
    kind, width, rope, planar = RECORDS[name]
    if kind is RecordFormat.PLAIN:
        arena = torch.full((majors, 8 + minors * width), torch.nan, dtype=i.dtype)
        return RecordView(arena[:, 8:].unflatten(1, (minors, width)), kind, width)
    nope = width - rope
    size = {
        RecordFormat.FP4_E4M3_16: width // 2 + width // 16,
        RecordFormat.FP8_UE8M0_32: width + width // 32,
        RecordFormat.FP4_UE8M0_32: width // 2 + width // 32,
        RecordFormat.FP8_NOPE_64: nope + 2 * rope + -(-nope // 64),
    }[kind]
    size += size % 2 if kind is RecordFormat.FP8_NOPE_64 else 0
    arena = torch.full((majors, 32 + minors * size), 0xFF, dtype=torch.uint8)
    if not planar:
        return RecordView(arena[:, 32:].unflatten(1, (minors, size)), kind, width, rope)
    border = 32 + minors * (width // 2)
    data = arena[:, 32:border].unflatten(1, (minors, width // 2))
    scales = arena[:, border:].unflatten(1, (minors, width // 32))
    return RecordView(data, kind, width, rope, scales)


def written_view(i: Inputs, name: str, majors: int, minors: int) -> RecordView:
    """A view whose rows are written, but for the last major, which stays NaN."""
    view = record_view(i, name, majors, minors)
    major = torch.arange(majors - 1).unsqueeze(1).expand(-1, minors)
    minor = torch.arange(minors).expand(majors - 1, -1)
    write_records(view, major, minor, i.normal(majors - 1, minors, view.width))
    return view
