"""Hyper-connections: entering a sublayer in two kernels, V4's head too, collapse and merge in one.

`_project` multiplies tiles of rows with a fixed piece of the columns and leaves partial sums, which
the second kernel adds in order. A row has the same bits beside any others: how columns are cut
depends on their number only, and one binary serves all row counts (`do_not_specialize`). All
arithmetic is fp32. The formulas: `ops/reference/hyper_connections.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of a program that projects or balances; 16 is the least that tensor cores take.
ROW_TILE = 16
# Columns of a program that projects, and how many at a time; more columns where there were more
# than MOST_PARTS parts, which the second kernel reads in one unrolled sum.
PART = 512
STEP = 64
MOST_PARTS = 64
COLUMN_TILE = 1024


@triton.jit
def _leading(x):
    """The leading 11 bits of fp32 numbers, which TF32 keeps."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _project(
    streams_ptr,
    fn_ptr,
    parts_ptr,
    rows,
    columns,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (row tile, part): sums [rows, parts, SLOTS] of v * fn, at COUNT the sum of v * v.

    bf16 numbers are exact in TF32, and so are the three pieces of an fp32 weight: their products
    are those of fp32, on tensor cores.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, SLOTS)
    part = tl.program_id(1)
    sums = tl.zeros((ROWS, SLOTS), tl.float32)
    # Of their own, so that no product waits for the one before it.
    middle = tl.zeros((ROWS, SLOTS), tl.float32)
    low = tl.zeros((ROWS, SLOTS), tl.float32)
    squares = tl.zeros((ROWS, STEP), tl.float32)
    for start in range(0, PART, STEP):
        column = part * PART + start + tl.arange(0, STEP)
        inside = (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        v = tl.load(streams_ptr + place, mask=(row < rows)[:, None] & inside, other=0.0)
        v = v.to(tl.float32)
        place = slot[:, None] * columns + column[None, :]
        f = tl.load(fn_ptr + place, mask=(slot < COUNT)[:, None] & inside, other=0.0)
        f = tl.trans(f.to(tl.float32))
        squares += v * v
        if streams_ptr.dtype.element_ty == tl.bfloat16:
            first = _leading(f)
            second = _leading(f - first)
            sums = tl.dot(v, first, sums, input_precision="tf32")
            middle = tl.dot(v, second, middle, input_precision="tf32")
            low = tl.dot(v, f - first - second, low, input_precision="tf32")
        else:
            sums = tl.dot(v, f, sums, input_precision="ieee")
    sums += middle + low
    sums = tl.where((slot == COUNT)[None, :], tl.sum(squares, 1)[:, None], sums)
    place = (row[:, None] * tl.num_programs(1) + part) * SLOTS + slot[None, :]
    tl.store(parts_ptr + place, sums, mask=(row < rows)[:, None])


@triton.jit
def _total(parts_ptr, place, known, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    """Sum over the parts, in order, of the slots at `place`; 0 where not `known`."""
    total = tl.load(parts_ptr + place, mask=known, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + place + part * SLOTS, mask=known, other=0.0)
    return total


@triton.jit
def _squeezed(sums, factor, scale_ptr, base_ptr, slot, known):
    """sigmoid(sums * factor * scale + base), scale and base of `slot`."""
    scale = tl.load(scale_ptr + slot, mask=known, other=0.0).to(tl.float32)
    base = tl.load(base_ptr + slot, mask=known, other=0.0).to(tl.float32)
    return tl.sigmoid(sums * factor * scale + base)


@triton.jit
def _balanced(logits, j, k, iterations, eps, HC: tl.constexpr):
    """`reference.sinkhorn` of logits [rows, j, k]; lanes behind HC are an identity of their own."""
    valid = (j < HC) & (k < HC)
    logits = tl.where(valid, logits, tl.where(j == k, 0.0, float("-inf")))
    c = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    c = c / tl.sum(c, 2, keep_dims=True)
    c = tl.where(valid, c + eps, c)
    c = c / (tl.sum(c, 1, keep_dims=True) + eps)
    for _ in range(1, iterations):
        c = c / (tl.sum(c, 2, keep_dims=True) + eps)
        c = c / (tl.sum(c, 1, keep_dims=True) + eps)
    return c


@triton.jit
def _coefficients(
    row,
    parts_ptr,
    base_ptr,
    scales_ptr,
    own_ptr,
    post_ptr,
    comb_ptr,
    rows,
    columns,
    rms_eps,
    hc_eps,
    iterations,
    HC: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """pre, post and comb of the rows [ROWS]."""
    start = row * (PARTS * SLOTS)
    squares = _total(parts_ptr, start + (2 + HC) * HC, row < rows, PARTS, SLOTS)
    factor = tl.rsqrt(squares / columns + rms_eps)

    k = tl.arange(0, LANES)[None, :]
    known = (row < rows)[:, None] & (k < HC)
    sums = _total(parts_ptr, start[:, None] + k, known, PARTS, SLOTS)
    pre = _squeezed(sums, factor[:, None], scales_ptr, base_ptr, k, k < HC) + hc_eps
    tl.store(own_ptr + row[:, None] * HC + k, pre, mask=known)
    sums = _total(parts_ptr, start[:, None] + HC + k, known, PARTS, SLOTS)
    post = _squeezed(sums, factor[:, None], scales_ptr, base_ptr, HC + k, k < HC)
    tl.store(post_ptr + row[:, None] * HC + k, 2.0 * post, mask=known)

    j = tl.arange(0, LANES)[None, :, None]
    k = tl.arange(0, LANES)[None, None, :]
    valid = (j < HC) & (k < HC)
    known = (row < rows)[:, None, None] & valid
    slot = 2 * HC + j * HC + k
    sums = _total(parts_ptr, start[:, None, None] + slot, known, PARTS, SLOTS)
    scale = tl.load(scales_ptr + slot, mask=valid, other=0.0).to(tl.float32)
    base = tl.load(base_ptr + slot, mask=valid, other=0.0).to(tl.float32)
    logits = sums * factor[:, None, None] * scale + base
    comb = _balanced(logits, j, k, iterations, hc_eps, HC)
    tl.store(comb_ptr + row[:, None, None] * (HC * HC) + j * HC + k, comb, mask=known)


@triton.jit
def _input(
    row,
    streams_ptr,
    pre_ptr,
    parts_ptr,
    base_ptr,
    scales_ptr,
    norm_ptr,
    x_ptr,
    width,
    rms_eps,
    hc_eps,
    OWN: tl.constexpr,
    HC: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """x of one row, collapsed with the pre of this sublayer (OWN) or that at `pre_ptr`."""
    column = tl.arange(0, WIDTH)
    inside = column < width
    x = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(HC):
        if OWN:
            start = row * (PARTS * SLOTS)
            squares = _total(parts_ptr, start + (2 + HC) * HC, True, PARTS, SLOTS)
            factor = tl.rsqrt(squares / (HC * width) + rms_eps)
            sums = _total(parts_ptr, start + j, True, PARTS, SLOTS)
            weight = _squeezed(sums, factor, scales_ptr, base_ptr, j, True) + hc_eps
        else:
            weight = tl.load(pre_ptr + row * HC + j).to(tl.float32)
        place = (row * HC + j) * width + column
        x += weight * tl.load(streams_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / width + rms_eps)
    x *= tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * width + column, x, mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _enter(
    streams_ptr,
    pre_ptr,
    parts_ptr,
    base_ptr,
    scales_ptr,
    norm_ptr,
    x_ptr,
    own_ptr,
    post_ptr,
    comb_ptr,
    rows,
    tiles,
    width,
    rms_eps,
    hc_eps,
    iterations,
    OWN: tl.constexpr,
    HC: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The first `tiles` programs compute the coefficients of ROWS rows, the others x of a row."""
    program = tl.program_id(0)
    if program < tiles:
        _coefficients(
            program.to(tl.int64) * ROWS + tl.arange(0, ROWS),
            parts_ptr,
            base_ptr,
            scales_ptr,
            own_ptr,
            post_ptr,
            comb_ptr,
            rows,
            HC * width,
            rms_eps,
            hc_eps,
            iterations,
            HC,
            LANES,
            PARTS,
            SLOTS,
        )
    else:
        _input(
            (program - tiles).to(tl.int64),
            streams_ptr,
            pre_ptr,
            parts_ptr,
            base_ptr,
            scales_ptr,
            norm_ptr,
            x_ptr,
            width,
            rms_eps,
            hc_eps,
            OWN,
            HC,
            WIDTH,
            PARTS,
            SLOTS,
        )


@triton.jit(do_not_specialize=["rows"])
def _head(
    parts_ptr,
    base_ptr,
    scale_ptr,
    pre_ptr,
    rows,
    columns,
    scale_step,
    rms_eps,
    hc_eps,
    HC: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (row tile); scale_step 0: one scale for all."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * (PARTS * SLOTS)
    squares = _total(parts_ptr, start + HC, row < rows, PARTS, SLOTS)
    factor = tl.rsqrt(squares / columns + rms_eps)
    k = tl.arange(0, LANES)[None, :]
    known = (row < rows)[:, None] & (k < HC)
    sums = _total(parts_ptr, start[:, None] + k, known, PARTS, SLOTS)
    scale = tl.load(scale_ptr + k * scale_step, mask=k < HC, other=0.0).to(tl.float32)
    base = tl.load(base_ptr + k, mask=k < HC, other=0.0).to(tl.float32)
    pre = tl.sigmoid(sums * factor[:, None] * scale + base) + hc_eps
    tl.store(pre_ptr + row[:, None] * HC + k, pre, mask=known)


@triton.jit
def _collapse(streams_ptr, pre_ptr, x_ptr, width, HC: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, column tile)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    x = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(HC):
        stream = tl.load(streams_ptr + (row * HC + j) * width + column, mask=inside, other=0.0)
        x += tl.load(pre_ptr + row * HC + j).to(tl.float32) * stream.to(tl.float32)
    tl.store(x_ptr + row * width + column, x, mask=inside)


@triton.jit
def _merge(
    y_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    width,
    HC: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (row, column tile): all streams of the row, since each needs all others."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    k = tl.arange(0, LANES)
    out = tl.zeros((LANES, COLUMNS), tl.float32)
    for j in tl.static_range(HC):
        stream = tl.load(streams_ptr + (row * HC + j) * width + column, mask=inside, other=0.0)
        weight = tl.load(comb_ptr + (row * HC + j) * HC + k, mask=k < HC, other=0.0)
        out += weight.to(tl.float32)[:, None] * stream.to(tl.float32)[None, :]
    y = tl.load(y_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    post = tl.load(post_ptr + row * HC + k, mask=k < HC, other=0.0).to(tl.float32)
    out += post[:, None] * y[None, :]
    place = (row * HC + k[:, None]) * width + column[None, :]
    tl.store(out_ptr + place, out, mask=(k < HC)[:, None] & inside[None, :])


def _parts(streams: Tensor, fn: Tensor) -> Tensor:
    """Partial sums [T, parts, slots], fp32, of contiguous streams; see `_project`."""
    rows, columns, count = streams.shape[0], streams[:1].numel(), fn.shape[0]
    part = max(PART, triton.next_power_of_2(triton.cdiv(columns, MOST_PARTS)))
    slots = max(16, triton.next_power_of_2(count + 1))
    shape = (rows, triton.cdiv(columns, part), slots)
    parts = torch.empty(shape, dtype=torch.float32, device=streams.device)
    _project[(triton.cdiv(rows, ROW_TILE), shape[1])](
        streams,
        fn.contiguous(),
        parts,
        rows,
        columns,
        COUNT=count,
        SLOTS=slots,
        ROWS=ROW_TILE,
        PART=part,
        STEP=STEP,
    )
    return parts


def hc_enter(
    streams: Tensor,
    pre: Tensor | None,
    fn: Tensor,
    base: Tensor,
    scales: Tensor,
    norm: Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.hc_enter`: x [T, D] in the streams' dtype; pre, post [T, hc], comb fp32."""
    rows, hc, width = streams.shape
    x = torch.empty((rows, width), dtype=streams.dtype, device=streams.device)
    own, post, comb = (
        torch.empty((rows, hc, *more), dtype=torch.float32, device=streams.device)
        for more in ((), (), (hc,))
    )
    if rows == 0:
        return x, own, post, comb
    streams = streams.contiguous()
    columns = triton.next_power_of_2(width)
    with torch.cuda.device_of(streams):
        parts = _parts(streams, fn)
        tiles = triton.cdiv(rows, ROW_TILE)
        _enter[(tiles + rows,)](
            streams,
            own if pre is None else pre.contiguous(),
            parts,
            base.contiguous(),
            scales.contiguous(),
            norm.contiguous(),
            x,
            own,
            post,
            comb,
            rows,
            tiles,
            width,
            rms_eps,
            hc_eps,
            iterations,
            OWN=pre is None,
            HC=hc,
            LANES=triton.next_power_of_2(hc),
            WIDTH=columns,
            PARTS=parts.shape[1],
            SLOTS=parts.shape[2],
            ROWS=ROW_TILE,
            num_warps=8 if columns > 2048 else 4,
        )
    return x, own, post, comb


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float
) -> Tensor:
    """`reference.hc_head`: [T, hc] fp32; scale [1] or [hc]."""
    rows, hc, width = streams.shape
    pre = torch.empty((rows, hc), dtype=torch.float32, device=streams.device)
    if rows == 0:
        return pre
    streams = streams.contiguous()
    with torch.cuda.device_of(streams):
        parts = _parts(streams, fn)
        _head[(triton.cdiv(rows, ROW_TILE),)](
            parts,
            base.contiguous(),
            scale.contiguous(),
            pre,
            rows,
            hc * width,
            0 if scale.numel() == 1 else 1,
            rms_eps,
            hc_eps,
            HC=hc,
            LANES=triton.next_power_of_2(hc),
            PARTS=parts.shape[1],
            SLOTS=parts.shape[2],
            ROWS=ROW_TILE,
        )
    return pre


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """`reference.hc_collapse`: [T, D] in the streams' dtype."""
    rows, hc, width = streams.shape
    x = torch.empty((rows, width), dtype=streams.dtype, device=streams.device)
    if rows == 0:
        return x
    with torch.cuda.device_of(streams):
        _collapse[(rows, triton.cdiv(width, COLUMN_TILE))](
            streams.contiguous(), pre.contiguous(), x, width, HC=hc, COLUMNS=COLUMN_TILE
        )
    return x


def hc_merge(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`reference.hc_merge`: [T, hc, D] in the streams' dtype."""
    rows, hc, width = streams.shape
    out = torch.empty((rows, hc, width), dtype=streams.dtype, device=streams.device)
    if rows == 0:
        return out
    with torch.cuda.device_of(streams):
        _merge[(rows, triton.cdiv(width, COLUMN_TILE))](
            y.contiguous(),
            streams.contiguous(),
            post.contiguous(),
            comb.contiguous(),
            out,
            width,
            HC=hc,
            LANES=triton.next_power_of_2(hc),
            COLUMNS=COLUMN_TILE,
        )
    return out
