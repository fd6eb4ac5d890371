"""Tiles of weights inside Triton kernels: plain numbers, or stored codes that are decoded.

A tile comes in the dtype that is multiplied in, with the bits of `StoredWeight.numbers`: codes are
put in place as bits of fp32 and multiplied by powers of two, so that cards without FP8 can do it.
`layout` says on the host what a kernel has to know of a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.stored_weights import StoredWeight, Weight, WeightFormat
from headrace.ops.triton.records import e2m1_to_float, e4m3_to_float, ue8m0_to_float

# How many numbers a byte holds.
_FORMATS = {WeightFormat.FP8: 1, WeightFormat.FP4: 2}


class Layout(NamedTuple):
    """A weight as kernels take it: plain numbers have FORMAT 0 and no scales.

    Strides are in elements of `codes` and `scales`, those of E matrices first (0 for one matrix).
    """

    codes: Tensor
    scales: Tensor
    code_strides: tuple[int, int]
    scale_strides: tuple[int, int]
    constants: dict[str, int]


def layout(weight: Weight) -> Layout:
    """Of [N, K] or [E, N, K]."""
    if isinstance(weight, StoredWeight):
        codes, scales = _packed(weight.codes), _packed(weight.scales)
        form, block = _FORMATS[weight.format], weight.block
    else:
        codes = scales = _packed(weight)
        form, block = 0, (1, 1)
    constants = {"FORMAT": form, "BLOCK_ROWS": block[0], "BLOCK_COLUMNS": block[1]}
    return Layout(codes, scales, _strides(codes), _strides(scales), constants)


def _packed(x: Tensor) -> Tensor:
    """x with its last dim in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int]:
    return (x.stride(0) if x.dim() == 3 else 0), x.stride(-2)


@triton.jit
def weight_tile(
    codes,
    scales,
    row,
    known,
    start,
    columns,
    code_row,
    scale_row,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Numbers [rows, DEPTH] of the rows `row` [rows], columns from `start`, a multiple of DEPTH.

    0 where not `known` [rows] and beyond `columns`. code_row and scale_row: strides of rows.
    """
    ROWS: tl.constexpr = row.shape[0]
    far = row.to(tl.int64)[:, None]
    if FORMAT == 0:
        column = (start + tl.arange(0, DEPTH))[None, :]
        inside = known[:, None] & (column < columns)
        return tl.load(codes + far * code_row + column, mask=inside, other=0.0).to(DTYPE)
    else:
        # COUNT scales a row, each for STEP columns, whose codes are WIDTH bytes.
        WHOLE: tl.constexpr = DEPTH if BLOCK_COLUMNS % DEPTH == 0 else FORMAT
        STEP: tl.constexpr = BLOCK_COLUMNS if DEPTH % BLOCK_COLUMNS == 0 else WHOLE
        COUNT: tl.constexpr = DEPTH // STEP
        WIDTH: tl.constexpr = STEP // FORMAT
        byte = (start // FORMAT + tl.arange(0, COUNT * WIDTH))[None, :]
        inside = known[:, None] & (byte < columns // FORMAT)
        code = tl.load(codes + far * code_row + byte, mask=inside, other=0)
        code = tl.reshape(code, (ROWS, COUNT, WIDTH)).to(tl.int32)
        column = (start + tl.arange(0, COUNT) * STEP)[None, :]
        inside = known[:, None] & (column < columns)
        place = (far // BLOCK_ROWS) * scale_row + column // BLOCK_COLUMNS
        scale = tl.load(scales + place, mask=inside, other=0).to(tl.int32)
        scale = ue8m0_to_float(scale)[:, :, None]
        if FORMAT == 1:
            number = (e4m3_to_float(code) * scale).to(DTYPE)
        else:
            even = (e2m1_to_float(code & 15) * scale).to(DTYPE)
            number = tl.join(even, (e2m1_to_float(code >> 4) * scale).to(DTYPE))
        return tl.reshape(number, (ROWS, DEPTH))


def compute_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """bf16 if all are, else fp32: what products of these numbers are formed in."""
    return tl.bfloat16 if all(dtype == torch.bfloat16 for dtype in dtypes) else tl.float32
