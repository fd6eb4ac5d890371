"""RMSNorm, rotary embedding, both in one, and Hadamard rotation: one kernel a call.

A program computes some whole rows, as many as fit a tile by their width; no row sees another.
Rotation and Hadamard multiply and add in the order of the reference, without fused operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.rows import as_rows, tile_rows, warps


@triton.jit
def _places(rows, inner, outer_stride, inner_stride, ROWS: tl.constexpr):
    """(row [r], its first dim, its offset, whether it exists) of this program's rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outer = row // inner
    start = outer.to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    return row, outer, start, row < rows


@triton.jit
def inverse_rms(v, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean square + eps) of rows [r, columns], 0 beyond WIDTH -> [r].

    Not by `rsqrt`, which takes subnormal numbers for 0.
    """
    root = tl.sqrt_rn(tl.sum(v * v, 1) / WIDTH + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    eps,
    rows,
    inner,
    x_outer,
    x_inner,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, _, start, exists = _places(rows, inner, x_outer, x_inner, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = exists[:, None] & (column < WIDTH)
    v = tl.load(x_ptr + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    y = v * inverse_rms(v, eps, WIDTH)[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    out = out_ptr + row.to(tl.int64)[:, None] * WIDTH + column
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rope(
    x_ptr,
    weight_ptr,
    turn_ptr,
    out_ptr,
    eps,
    rows,
    inner,
    x_outer,
    x_inner,
    turn_outer,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The last 2 * PAIRS columns rotated; NORM: of the normalised row, rounded to its dtype."""
    row, outer, start, exists = _places(rows, inner, x_outer, x_inner, ROWS)
    first: tl.constexpr = WIDTH - 2 * PAIRS
    # If `first` is odd columns begin at -1, so that pairs lie at even places of the tile.
    column = tl.arange(0, COLUMNS)[None, :] - first % 2
    inside = exists[:, None] & (column >= 0) & (column < WIDTH)
    x = tl.load(x_ptr + start[:, None] + column, mask=inside, other=0.0)
    if NORM:
        v = x.to(tl.float32)
        v *= inverse_rms(v, eps, WIDTH)[:, None]
        if weight_ptr is not None:
            known = (column >= 0) & (column < WIDTH)
            v *= tl.load(weight_ptr + column, mask=known, other=0.0).to(tl.float32)
        x = v.to(x.dtype)
    # (cos, sin) of a pair lie side by side as its numbers do.
    turn = turn_ptr + outer.to(tl.int64)[:, None] * turn_outer + (column - first)
    turn = tl.load(turn, mask=inside & (column >= first), other=0.0).to(tl.float32)
    c, s = tl.split(tl.reshape(turn, (ROWS, COLUMNS // 2, 2)))
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (ROWS, COLUMNS // 2, 2)))
    turned = tl.arange(0, COLUMNS // 2)[None, :] * 2 >= first
    if INVERSE:
        left, right = even * c + odd * s, odd * c - even * s
    else:
        left, right = even * c - odd * s, odd * c + even * s
    left, right = tl.where(turned, left, even), tl.where(turned, right, odd)
    y = tl.reshape(tl.join(left, right), (ROWS, COLUMNS)).to(x.dtype)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * WIDTH + column, y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _hadamard(
    x_ptr,
    out_ptr,
    scale,
    rows,
    inner,
    x_outer,
    x_inner,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A butterfly per stage: numbers whose places differ in one bit become sum and difference."""
    row, _, start, exists = _places(rows, inner, x_outer, x_inner, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    v = tl.load(x_ptr + start[:, None] + column, mask=exists[:, None], other=0.0).to(tl.float32)
    whole = tl.broadcast_to(column, (ROWS, WIDTH))
    for stage in tl.static_range(STAGES):
        other = tl.gather(v, whole ^ (1 << stage), 1)
        v = tl.where((whole >> stage) % 2 == 1, other - v, v + other)
    out = out_ptr + row.to(tl.int64)[:, None] * WIDTH + column
    tl.store(out, (v * scale).to(out_ptr.dtype.element_ty), mask=exists[:, None])


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`reference.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = as_rows(x)
    width = x.shape[-1]
    columns = triton.next_power_of_2(width)
    tile = tile_rows(columns)
    count = rows.shape[0] * rows.shape[1]
    with torch.cuda.device_of(x):
        _rms_norm[(triton.cdiv(count, tile),)](
            rows,
            None if weight is None else weight.contiguous(),
            out,
            float(eps),
            count,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            WIDTH=width,
            COLUMNS=columns,
            ROWS=tile,
            num_warps=warps(tile * columns),
        )
    return out


def rope(x: Tensor, turn: Tensor, inverse: bool = False) -> Tensor:
    """`reference.rope`."""
    return _turned(x, None, None, turn, inverse)


def norm_rope(x: Tensor, weight: Tensor | None, eps: float, turn: Tensor) -> Tensor:
    """`reference.norm_rope`."""
    return _turned(x, weight, eps, turn, False)


def _turned(
    x: Tensor, weight: Tensor | None, eps: float | None, turn: Tensor, inverse: bool
) -> Tensor:
    """x [T, .., d], normalised unless `eps` is None, then rotated."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = as_rows(x)
    angles = turn if turn.stride(2) == 1 and turn.stride(1) == 2 else turn.contiguous()
    width = x.shape[-1]
    columns = triton.next_power_of_2(width + width % 2)
    tile = tile_rows(columns)
    count = rows.shape[0] * rows.shape[1]
    with torch.cuda.device_of(x):
        _rope[(triton.cdiv(count, tile),)](
            rows,
            None if weight is None else weight.contiguous(),
            angles,
            out,
            0.0 if eps is None else float(eps),
            count,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            angles.stride(0),
            WIDTH=width,
            PAIRS=turn.shape[1],
            NORM=eps is not None,
            INVERSE=bool(inverse),
            COLUMNS=columns,
            ROWS=tile,
            num_warps=warps(tile * columns),
            enable_fp_fusion=False,
        )
    return out


def hadamard(x: Tensor) -> Tensor:
    """`reference.hadamard`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = as_rows(x)
    width = x.shape[-1]
    tile = tile_rows(width)
    count = rows.shape[0] * rows.shape[1]
    with torch.cuda.device_of(x):
        _hadamard[(triton.cdiv(count, tile),)](
            rows,
            out,
            width**-0.5,
            count,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            WIDTH=width,
            STAGES=width.bit_length() - 1,
            ROWS=tile,
            num_warps=warps(tile * width),
            enable_fp_fusion=False,
        )
    return out
