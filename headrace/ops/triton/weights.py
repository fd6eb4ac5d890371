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
    column = start + tl.arange(0, DEPTH)
    inside = known[:, None] & (column < columns)[None, :]
    far = row.to(tl.int64)[:, None]
    if FORMAT == 0:
        place = far * code_row + column[None, :]
        return tl.load(codes + place, mask=inside, other=0.0).to(DTYPE)
    else:
        if FORMAT == 1:
            code = tl.load(codes + far * code_row + column[None, :], mask=inside, other=0)
            number = e4m3_to_float(code.to(tl.int32))
        else:
            byte = start // 2 + tl.arange(0, DEPTH // 2)
            stored = known[:, None] & (byte < columns // 2)[None, :]
            pair = tl.load(codes + far * code_row + byte[None, :], mask=stored, other=0)
            code = tl.reshape(tl.join(pair & 15, pair >> 4), (ROWS, DEPTH))
            number = e2m1_to_float(code.to(tl.int32))
        # A whole number of scales a tile: each is loaded once.
        if DEPTH % BLOCK_COLUMNS == 0:
            COUNT: tl.constexpr = DEPTH // BLOCK_COLUMNS
            block = start // BLOCK_COLUMNS + tl.arange(0, COUNT)
            stored = known[:, None] & (block < columns // BLOCK_COLUMNS)[None, :]
            place = (far // BLOCK_ROWS) * scale_row + block[None, :]
            scale = ue8m0_to_float(tl.load(scales + place, mask=stored, other=0).to(tl.int32))
            number = tl.reshape(number, (ROWS, COUNT, BLOCK_COLUMNS)) * scale[:, :, None]
            number = tl.reshape(number, (ROWS, DEPTH))
        elif BLOCK_COLUMNS % DEPTH == 0:
            place = (far // BLOCK_ROWS) * scale_row + start // BLOCK_COLUMNS
            scale = tl.load(scales + place, mask=known[:, None], other=0).to(tl.int32)
            number = number * ue8m0_to_float(scale)
        else:
            place = (far // BLOCK_ROWS) * scale_row + column[None, :] // BLOCK_COLUMNS
            scale = tl.load(scales + place, mask=inside, other=0).to(tl.int32)
            number = number * ue8m0_to_float(scale)
        return number.to(DTYPE)


def compute_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """bf16 if all are, else fp32: what products of these numbers are formed in."""
    return tl.bfloat16 if all(dtype == torch.bfloat16 for dtype in dtypes) else tl.float32
