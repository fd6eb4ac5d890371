"""Weights as a checkpoint stores them, for operators that decode them while they multiply.

Every code times its scale is exact in bf16, so that a product with a stored weight differs from one
with its numbers only by the order of additions. Made by `model/deepseek/parameters`; the operators
that take a weight (`linear`, `grouped_projection`, `moe`) take either kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from headrace.errors import InternalError
from headrace.ops.reference.quant import e2m1_to_float, ue8m0_to_float, unpack_fp4


class WeightFormat(StrEnum):
    """How codes are packed: one E4M3 or two E2M1 (the even column in the low nibble) a byte."""

    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix [N, K], or E of them [E, N, K].

    codes uint8 [.., N, K] (FP8) or [.., N, K / 2] (FP4). scales: UE8M0 bytes uint8
    [.., ceil(N / block[0]), K / block[1]], of blocks of so many rows and columns.
    """

    codes: Tensor
    scales: Tensor
    format: WeightFormat
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        *lead, columns = self.codes.shape
        return (*lead, columns * 2 if self.format is WeightFormat.FP4 else columns)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    def __getitem__(self, expert: int | slice) -> StoredWeight:
        """One or some of E matrices."""
        return StoredWeight(self.codes[expert], self.scales[expert], self.format, self.block)

    def rows(self, start: int, stop: int) -> StoredWeight:
        """These rows of each matrix. Raises InternalError where they cut a block in two."""
        height, count = self.block[0], self.shape[-2]
        if start % height or (stop % height and stop != count):
            raise InternalError(
                f"Rows {start} to {stop} of {count} cut a block of {height} stored rows in two; "
                "keep such a weight as numbers."
            )
        blocks = slice(start // height, -(-stop // height))
        codes, scales = self.codes[..., start:stop, :], self.scales[..., blocks, :]
        return StoredWeight(codes, scales, self.format, self.block)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """All of them in `dtype`, decoded."""
        # fp32 would lose the largest scales of an fp64 model.
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        rows, columns = self.shape[-2:]
        if self.format is WeightFormat.FP4:
            codes = e2m1_to_float(unpack_fp4(self.codes))
        else:
            codes = self.codes.view(torch.float8_e4m3fn).to(compute)
        scales = ue8m0_to_float(self.scales).to(compute)
        scales = scales.repeat_interleave(self.block[0], dim=-2)[..., :rows, :]
        blocks = codes.unflatten(-1, (columns // self.block[1], self.block[1]))
        return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)


Weight = Tensor | StoredWeight


def halves(weight: Weight) -> tuple[Weight, Weight]:
    """The upper and the lower half of the rows. Raises InternalError as `StoredWeight.rows`."""
    middle, rows = weight.shape[-2] // 2, weight.shape[-2]
    if isinstance(weight, StoredWeight):
        return weight.rows(0, middle), weight.rows(middle, rows)
    return weight[..., :middle, :], weight[..., middle:, :]


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight of either kind in `dtype`."""
    return weight.numbers(dtype) if isinstance(weight, StoredWeight) else weight.to(dtype)
