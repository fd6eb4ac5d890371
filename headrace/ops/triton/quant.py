"""Numbers rounded as quantised activations and cache rows are: one kernel a call, bit for bit.

A program takes some groups, each with its scale; a group is whole in one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.core.kv import RecordFormat
from headrace.ops.records import RecordView
from headrace.ops.triton.records import FORMATS, GROUPS, bfloat16_bits, decode, encode
from headrace.ops.triton.rows import as_rows, tile_rows


@triton.jit
def group_tile(
    pairs,
    WIDTH: tl.constexpr,
    CODED: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """This program's groups of rows whose first CODED numbers have scales, the others none.

    (row [g], number of the group in its row [g], columns [g, n], whether they exist [g, n], whether
    the group has a scale [g]). A group has GROUP numbers, n = SIZE is that up to a power of two.
    """
    coded: tl.constexpr = (CODED + GROUP - 1) // GROUP
    groups: tl.constexpr = coded + (WIDTH - CODED + GROUP - 1) // GROUP
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, group = pair // groups, pair % groups
    place = tl.arange(0, SIZE)[None, :]
    if CODED == WIDTH:
        column = group[:, None] * GROUP + place
        end = WIDTH
        scaled = pair < pairs
    else:
        first = tl.where(group < coded, group * GROUP, CODED + (group - coded) * GROUP)
        column = first[:, None] + place
        end = tl.where(group < coded, CODED, WIDTH)[:, None]
        scaled = (pair < pairs) & (group < coded)
    inside = (pair < pairs)[:, None] & (column < end) & (place < GROUP)
    return row, group, column, inside, scaled


@triton.jit(do_not_specialize=["pairs"])
def _round(
    x_ptr,
    stored_ptr,
    out_ptr,
    pairs,
    inner,
    x_outer,
    x_inner,
    WIDTH: tl.constexpr,
    CODED: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """What is stored is not written: `stored_ptr` says the dtype of plain rows."""
    row, _, column, inside, scaled = group_tile(pairs, WIDTH, CODED, GROUP, SIZE, TILE)
    start = (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    x = tl.load(x_ptr + start[:, None] + column, mask=inside, other=0.0)
    if FORMAT == 0:
        y = x.to(stored_ptr.dtype.element_ty)
    else:
        v = x.to(tl.float32)
        codes, scale = encode(v, FORMAT)
        y = decode(codes, scale, FORMAT)
        if CODED < WIDTH:
            half = (bfloat16_bits(v) << 16).to(tl.float32, bitcast=True)
            y = tl.where(scaled[:, None], y, half)
    out = out_ptr + row.to(tl.int64)[:, None] * WIDTH + column
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)


def coded_width(view: RecordView) -> int:
    """How many numbers of a row have a scale; the others are bf16."""
    return view.width - (view.rope_width if view.format is RecordFormat.FP8_NOPE_64 else 0)


def groups_per_row(width: int, coded: int, group: int) -> int:
    """Groups that `group_tile` makes of a row."""
    return triton.cdiv(coded, group) + triton.cdiv(width - coded, group)


def fake_fp8(x: Tensor, group: int) -> Tensor:
    """`reference.fake_fp8`."""
    return _rounded(x, x, RecordFormat.FP8_UE8M0_32, group, x.shape[-1])


def fake_fp4_ue8m0(x: Tensor) -> Tensor:
    """`reference.fake_fp4_ue8m0`."""
    kind = RecordFormat.FP4_UE8M0_32
    return _rounded(x, x, kind, GROUPS[kind], x.shape[-1])


def round_rows(x: Tensor, view: RecordView) -> Tensor:
    """`reference.round_rows`."""
    return _rounded(x, view.data, view.format, GROUPS[view.format], coded_width(view))


def _rounded(x: Tensor, stored: Tensor, kind: RecordFormat, group: int, coded: int) -> Tensor:
    """x [.., n] with groups of `group` numbers of the first `coded` rounded as `kind` stores them,
    the others to bf16."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = as_rows(x)
    width = x.shape[-1]
    size = triton.next_power_of_2(group)
    tile = tile_rows(size, 1024)
    pairs = rows.shape[0] * rows.shape[1] * groups_per_row(width, coded, group)
    with torch.cuda.device_of(x):
        _round[(triton.cdiv(pairs, tile),)](
            rows,
            stored,
            out,
            pairs,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            WIDTH=width,
            CODED=coded,
            GROUP=group,
            FORMAT=FORMATS[kind],
            SIZE=size,
            TILE=tile,
            enable_fp_fusion=False,
        )
    return out
