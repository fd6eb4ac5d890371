"""Mixture of experts without a host that knows who was chosen: all launches have fixed shapes.

Places (row, choice) are numbered row by row. `_count` and `_place` sort them by expert into tiles
of rows, an expert's last tile padded with -1; the tables are as long as they can become. Then one
kernel computes w1, w3 and the activation of a tile, one w2, both over places in any order, and one
adds up each row's results in ascending expert order. Neighbouring programs share an expert's
weights. Tiles follow the rows of an expert, or are the same for all row counts, see
`product_tiles`. What changes with the number of rows is not specialised on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.stored_weights import Weight, halves
from headrace.ops.triton.product_tiles import Tile, routed_tiles, shared_tile
from headrace.ops.triton.products import multiply
from headrace.ops.triton.records import round_fp8
from headrace.ops.triton.weights import compute_dtype, in_order, layout, weight_tile

# Rows computed at a time, so that the scratch memory of long prompts stays bounded.
MAX_ROWS = 8192
# Places that `_count` and `_place` look at in one go.
_PLACES = 1024


@triton.jit(do_not_specialize=["places"])
def _count(expert_ptr, count_ptr, places, PLACES: tl.constexpr):
    """Program e: how many places chose expert e, int32."""
    found = tl.zeros((PLACES,), tl.int32)
    for start in range(0, places, PLACES):
        place = start + tl.arange(0, PLACES)
        expert = tl.load(expert_ptr + place, mask=place < places, other=-1)
        found += (expert == tl.program_id(0)).to(tl.int32)
    tl.store(count_ptr + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["places", "tiles"])
def _place(
    expert_ptr,
    count_ptr,
    owner_ptr,
    place_ptr,
    places,
    experts,
    tiles,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Program e < experts: its tiles of ROWS places each, in order; the last one: unused tiles.

    owner_ptr int32 [tiles]: the expert of a tile, -1 unused; place_ptr int32 [tiles * ROWS].
    """
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.load(count_ptr + expert, mask=expert < experts, other=0)
    needed = (count + ROWS - 1) // ROWS
    first = tl.sum(tl.where(expert < own, needed, 0), 0)
    end = tl.where(own < experts, first + tl.sum(tl.where(expert == own, needed, 0), 0), tiles)
    for start in range(first, end, PLACES):
        tile = start + tl.arange(0, PLACES)
        tl.store(owner_ptr + tile, tl.where(own < experts, own, -1), mask=tile < end)
    if own < experts:
        at = first * ROWS
        for start in range(0, places, PLACES):
            place = start + tl.arange(0, PLACES)
            chosen = tl.load(expert_ptr + place, mask=place < places, other=-1) == own
            before = tl.cumsum(chosen.to(tl.int32), 0)
            tl.store(place_ptr + at + before - 1, place, mask=chosen)
            at += tl.sum(chosen.to(tl.int32), 0)
        rest = at + tl.arange(0, ROWS)
        tl.store(place_ptr + rest, -1 + 0 * rest, mask=rest < end * ROWS)


@triton.jit
def _swiglu(gate, up, limit, DTYPE: tl.constexpr):
    """fp32 of both sums, which are rounded to the compute dtype, as two linear layers would."""
    # tl.minimum would hide a NaN.
    g, u = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return g / (1.0 + tl.exp(-g)) * u


@triton.jit(do_not_specialize=["rows", "part_size"])
def _activate(
    x_ptr,
    code_ptr,
    scale_ptr,
    owner_ptr,
    place_ptr,
    weight_ptr,
    out_ptr,
    rows,
    inner,
    columns,
    top_k,
    limit,
    part_size,
    x_row,
    code_expert,
    code_row,
    scale_expert,
    scale_row,
    ROUTED: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Program (tile of places, of outputs, part): out [places, inner] = weight * swiglu(w1x, w3x).

    Not ROUTED: one expert, whose places are the rows, without weights. GROUP > 0: the result is
    rounded as `fake_fp8` does. PARTS > 1: sums of a part of the columns each, fp32 [PARTS, 2,
    places, inner], for `_finish`.
    """
    codes, scales = code_ptr, scale_ptr
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ROUTED:
        expert = tl.load(owner_ptr + tl.program_id(0)).to(tl.int64)
        if expert < 0:
            return
        codes += expert * code_expert
        scales += expert * scale_expert
        place = tl.load(place_ptr + place)
        present = place >= 0
        row = place // top_k
    else:
        present = place < rows
        row = place
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < inner
    x_place = x_ptr + row.to(tl.int64)[None, :] * x_row
    gate = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(tl.program_id(2) * DEPTH, columns, PARTS * DEPTH):
        column = start + tl.arange(0, DEPTH)
        inside = (column < columns)[:, None] & present[None, :]
        x = tl.load(x_place + column[:, None], mask=inside, other=0.0).to(DTYPE)
        w1 = weight_tile(
            codes,
            scales,
            output,
            known,
            start,
            columns,
            code_row,
            scale_row,
            DTYPE,
            FORMAT,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            DEPTH,
            PACKED,
        )
        gate = tl.dot(w1, x, gate, input_precision="ieee")
        w3 = weight_tile(
            codes,
            scales,
            inner + output,
            known,
            start,
            columns,
            code_row,
            scale_row,
            DTYPE,
            FORMAT,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            DEPTH,
            PACKED,
        )
        up = tl.dot(w3, x, up, input_precision="ieee")
    at = place.to(tl.int64)[None, :] * inner + output[:, None]
    there = known[:, None] & present[None, :]
    if PARTS > 1:
        at += tl.program_id(2).to(tl.int64) * 2 * part_size
        tl.store(out_ptr + at, gate, mask=there)
        tl.store(out_ptr + part_size + at, up, mask=there)
        return
    a = _swiglu(gate, up, limit, DTYPE)
    if ROUTED:
        a *= tl.load(weight_ptr + place, mask=present, other=0.0).to(tl.float32)[None, :]
    if GROUP > 0:
        groups = tl.reshape(tl.trans(a.to(DTYPE).to(tl.float32)), (ROWS * OUTPUTS // GROUP, GROUP))
        a = tl.trans(tl.reshape(round_fp8(groups), (ROWS, OUTPUTS)))
    tl.store(out_ptr + at, a, mask=there)


@triton.jit(do_not_specialize=["part_size"])
def _finish(
    sum_ptr,
    expert_ptr,
    weight_ptr,
    out_ptr,
    inner,
    limit,
    part_size,
    ROUTED: tl.constexpr,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Program (place, tile of outputs): the parts of `_activate` added in order, its result."""
    place = tl.program_id(0).to(tl.int64)
    if ROUTED:
        expert = tl.load(expert_ptr + place)
        if expert < 0:
            return
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < inner
    at = sum_ptr + place * inner + output
    gate = tl.zeros((OUTPUTS,), tl.float32)
    up = tl.zeros((OUTPUTS,), tl.float32)
    for _ in tl.static_range(PARTS):
        gate += tl.load(at, mask=known, other=0.0)
        at += part_size
        up += tl.load(at, mask=known, other=0.0)
        at += part_size
    a = _swiglu(gate, up, limit, DTYPE)
    if ROUTED:
        a *= tl.load(weight_ptr + place).to(tl.float32)
    tl.store(out_ptr + place * inner + output, a, mask=known)


@triton.jit(do_not_specialize=["part_size"])
def _project(
    x_ptr,
    code_ptr,
    scale_ptr,
    owner_ptr,
    place_ptr,
    out_ptr,
    outputs,
    columns,
    part_size,
    code_expert,
    code_row,
    scale_expert,
    scale_row,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Program (tile of places, of outputs, part): out [places, outputs] = w2 x [places, columns].

    PARTS > 1: sums of a part of the columns each, fp32 [PARTS, places, outputs].
    """
    expert = tl.load(owner_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(place_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    present = place >= 0
    far = place.to(tl.int64)[None, :]
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < outputs
    codes, scales = code_ptr + expert * code_expert, scale_ptr + expert * scale_expert
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(tl.program_id(2) * DEPTH, columns, PARTS * DEPTH):
        column = start + tl.arange(0, DEPTH)
        inside = (column < columns)[:, None] & present[None, :]
        x = tl.load(x_ptr + far * columns + column[:, None], mask=inside, other=0.0)
        weight = weight_tile(
            codes,
            scales,
            output,
            known,
            start,
            columns,
            code_row,
            scale_row,
            DTYPE,
            FORMAT,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            DEPTH,
            PACKED,
        )
        total = tl.dot(weight, x, total, input_precision="ieee")
    at = out_ptr + tl.program_id(2).to(tl.int64) * part_size + far * outputs + output[:, None]
    tl.store(at, total, mask=known[:, None] & present[None, :])


@triton.jit(do_not_specialize=["part_size"])
def _combine(
    expert_ptr,
    routed_ptr,
    shared_ptr,
    out_ptr,
    top_k,
    outputs,
    part_size,
    PARTS: tl.constexpr,
    CHOICES: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Program (row, tile of outputs): its places in ascending expert order, then the shared one.

    The PARTS of a place are added first, and rounded as the whole would be.
    """
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < outputs
    choice = tl.arange(0, CHOICES)
    expert = tl.load(expert_ptr + row * top_k + choice, mask=choice < top_k, other=-1)
    equal = expert[None, :] == expert[:, None]
    earlier = (expert[None, :] < expert[:, None]) | (equal & (choice[None, :] < choice[:, None]))
    rank = tl.sum(earlier.to(tl.int32), 1)
    total = tl.zeros((OUTPUTS,), tl.float32)
    for number in range(CHOICES):
        here = rank == number
        at = row * top_k + tl.sum(tl.where(here, choice, 0), 0)
        chosen = tl.sum(tl.where(here & (expert >= 0), 1, 0), 0) > 0
        found = tl.zeros((OUTPUTS,), tl.float32)
        source = routed_ptr + at * outputs + output
        for _ in tl.static_range(PARTS):
            found += tl.load(source, mask=known & chosen, other=0.0).to(tl.float32)
            source += part_size
        total += found.to(out_ptr.dtype.element_ty).to(tl.float32)
    total += tl.load(shared_ptr + row * outputs + output, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + output, total, mask=known)


@triton.jit(do_not_specialize=["groups"])
def _round(x_ptr, out_ptr, groups, GROUP: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """`fake_fp8` of COUNT groups of GROUP numbers; SIZE: GROUP up to a power of two."""
    group = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    column = tl.arange(0, SIZE)
    inside = (group < groups)[:, None] & (column < GROUP)[None, :]
    place = group[:, None] * GROUP + column[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, round_fp8(x), mask=inside)


class _Tables(NamedTuple):
    """Which tile belongs to whom, see `_place`; without owners: one expert takes every row."""

    owners: Tensor | None
    places: Tensor | None
    tiles: int
    experts: Tensor | None = None


def _sorted_places(experts: Tensor, count: int, rows_per_tile: int) -> _Tables:
    """experts int64 [T, k], contiguous, of `count`."""
    places = experts.numel()
    # Each expert may leave a tile incomplete.
    tiles = places // rows_per_tile + min(places, count)
    counts, owners, sorted_places = (
        torch.empty(size, dtype=torch.int32, device=experts.device)
        for size in (count, tiles, tiles * rows_per_tile)
    )
    _count[(count,)](experts, counts, places, PLACES=_PLACES)
    _place[(count + 1,)](
        experts,
        counts,
        owners,
        sorted_places,
        places,
        count,
        tiles,
        ROWS=rows_per_tile,
        EXPERTS=triton.next_power_of_2(count),
        PLACES=_PLACES,
    )
    return _Tables(owners, sorted_places, tiles, experts)


def _rounded(x: Tensor, group: int) -> Tensor:
    """`reference.fake_fp8` of contiguous x; x itself for group 0."""
    if not group or x.numel() == 0:
        return x
    out, groups = torch.empty_like(x), x.numel() // group
    _round[(triton.cdiv(groups, 32),)](
        x, out, groups, GROUP=group, SIZE=triton.next_power_of_2(group), COUNT=32
    )
    return out


def _activation(
    x: Tensor,
    w13: Weight,
    weights: Tensor | None,
    tables: _Tables,
    tile: Tile,
    limit: float,
    act_group: int,
) -> Tensor:
    """[T * k, I] of the routed experts (w13 [E, 2I, D]), [T, I] of the shared one ([2I, D])."""
    rows, columns = x.shape
    inner, parts = w13.shape[-2] // 2, tile.parts or 1
    count = rows if weights is None else weights.numel()
    out = torch.empty((count, inner), dtype=x.dtype, device=x.device)
    shape = (parts, 2, count, inner)
    sums = out if parts == 1 else torch.empty(shape, dtype=torch.float32, device=x.device)
    x, w = in_order(x, w13, tile.packed), layout(w13)
    # A tile of whole groups is rounded where it is computed.
    at_once = bool(act_group) and tile.outputs % act_group == 0 and parts == 1
    _activate[(tables.tiles, triton.cdiv(inner, tile.outputs), parts)](
        x,
        w.codes,
        w.scales,
        tables.owners,
        tables.places,
        weights,
        sums,
        rows,
        inner,
        columns,
        1 if weights is None else weights.shape[1],
        limit,
        count * inner,
        x.stride(0),
        w.code_strides[0],
        w.code_strides[1],
        w.scale_strides[0],
        w.scale_strides[1],
        ROUTED=weights is not None,
        GROUP=act_group if at_once else 0,
        PARTS=parts,
        DTYPE=compute_dtype(x.dtype),
        **w.constants,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        PACKED=tile.packed,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts > 1:
        _finish[(count, triton.cdiv(inner, 1024))](
            sums,
            tables.experts,
            weights,
            out,
            inner,
            limit,
            count * inner,
            ROUTED=weights is not None,
            DTYPE=compute_dtype(x.dtype),
            PARTS=parts,
            OUTPUTS=1024,
        )
    return out if at_once else _rounded(out, act_group)


def _projection(x: Tensor, w2: Weight, tables: _Tables, tile: Tile) -> Tensor:
    """x [T * k, I], w2 [E, D, I] -> [parts, T * k, D], fp32 if parts > 1.

    Places without an expert are not written.
    """
    places, columns = x.shape
    outputs, parts = w2.shape[-2], tile.parts or 1
    dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty((parts, places, outputs), dtype=dtype, device=x.device)
    x, w = in_order(x, w2, tile.packed), layout(w2)
    _project[(tables.tiles, triton.cdiv(outputs, tile.outputs), parts)](
        x,
        w.codes,
        w.scales,
        tables.owners,
        tables.places,
        out,
        outputs,
        columns,
        places * outputs,
        w.code_strides[0],
        w.code_strides[1],
        w.scale_strides[0],
        w.scale_strides[1],
        PARTS=parts,
        DTYPE=compute_dtype(x.dtype),
        **w.constants,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        PACKED=tile.packed,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _some_rows(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    routed: tuple[Weight, Weight],
    shared: tuple[Weight, Weight],
    limit: float,
    act_group: int,
    out: Tensor,
    fixed: bool,
) -> None:
    rows, top_k = experts.shape
    count, outputs = routed[0].shape[0], out.shape[1]
    rounded = _rounded(x, act_group)
    tile = shared_tile(shared[0], x, fixed)
    alone = _Tables(None, None, triton.cdiv(rows, tile.rows))
    a = _activation(rounded, shared[0], None, alone, tile, limit, act_group)
    common = multiply(a, shared[1], 1, x.dtype, fixed=fixed)
    first, tile = routed_tiles(*routed, triton.cdiv(rows * top_k, count), x, fixed)
    tables = _sorted_places(experts, count, tile.rows)
    a = _activation(rounded, routed[0], weights, tables, first, limit, act_group)
    y = _projection(a, routed[1], tables, tile)
    _combine[(rows, triton.cdiv(outputs, 1024))](
        experts,
        y,
        common,
        out,
        top_k,
        outputs,
        rows * top_k * outputs,
        PARTS=y.shape[0],
        CHOICES=triton.next_power_of_2(top_k),
        OUTPUTS=1024,
    )


def moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    shared13: Weight,
    shared2: Weight,
    limit: float,
    act_group: int,
    *,
    fixed_tile: bool = False,
) -> Tensor:
    """`reference.moe` for x in bf16 or fp32; weights of each kind may be stored in another format.

    Raises InternalError where w1 and w3 do not meet at the border of a block.
    """
    halves(w13), halves(shared13)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
    with torch.cuda.device_of(x):
        for start in range(0, x.shape[0], MAX_ROWS):
            part = slice(start, start + MAX_ROWS)
            _some_rows(
                x[part],
                experts[part],
                weights[part],
                (w13, w2),
                (shared13, shared2),
                limit,
                act_group,
                out[part],
                fixed_tile,
            )
    return out
