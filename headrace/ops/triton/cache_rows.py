"""Cache rows to numbers and back, in every record format: one kernel a call, bit for bit.

Groups of numbers are encoded and decoded as in `quant`. Places outside a view are not written and
read as NaN, so that a wrong place neither hurts a neighbour nor goes unseen.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.core.kv import RecordFormat
from headrace.ops.records import RecordView
from headrace.ops.triton.quant import coded_width, group_tile, groups_per_row
from headrace.ops.triton.records import FORMATS, GROUPS, bfloat16_bits, decode, encode
from headrace.ops.triton.rows import as_rows, tile_rows

# Numbers that differ from step to step and tell the compiler nothing: one kernel for all of them.
_COUNTS = ["pairs", "major_outer", "major_inner", "minor_outer", "minor_inner"]


@triton.jit
def _places(
    row,
    inside,
    inner,
    majors,
    minors,
    major_ptr,
    major_outer,
    major_inner,
    minor_ptr,
    minor_outer,
    minor_inner,
):
    """(major [g], minor [g], int64, and which of `inside` [g, n] lie in the view). Below zero they
    count from the end. Without `minor_ptr` a row's minor is its inner dim."""
    exists = tl.max(inside.to(tl.int32), 1) > 0
    i, j = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    major = tl.load(major_ptr + i * major_outer + j * major_inner, mask=exists, other=0)
    if minor_ptr is not None:
        minor = tl.load(minor_ptr + i * minor_outer + j * minor_inner, mask=exists, other=0)
    else:
        minor = j
    major, minor = major.to(tl.int64), minor.to(tl.int64)
    major = tl.where(major < 0, major + majors, major)
    minor = tl.where(minor < 0, minor + minors, minor)
    valid = (major >= 0) & (major < majors) & (minor >= 0) & (minor < minors)
    return major, minor, inside & valid[:, None]


@triton.jit(do_not_specialize=_COUNTS)
def _write(
    x_ptr,
    data_ptr,
    scales_ptr,
    major_ptr,
    minor_ptr,
    pairs,
    inner,
    majors,
    minors,
    x_outer,
    x_inner,
    major_outer,
    major_inner,
    minor_outer,
    minor_inner,
    data_major,
    data_minor,
    data_column,
    scales_major,
    scales_minor,
    scales_column,
    WIDTH: tl.constexpr,
    CODED: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """PAD: a byte of zeros follows the scales."""
    row, group, column, inside, scaled = group_tile(pairs, WIDTH, CODED, GROUP, GROUP, TILE)
    start = (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    x = tl.load(x_ptr + start[:, None] + column, mask=inside, other=0.0)
    major, minor, inside = _places(
        row, inside, inner, majors, minors,
        major_ptr, major_outer, major_inner, minor_ptr, minor_outer, minor_inner,
    )  # fmt: skip
    data = data_ptr + (major * data_major + minor * data_minor)[:, None]
    if FORMAT == 0:
        tl.store(data + column * data_column, x.to(data_ptr.dtype.element_ty), mask=inside)
    else:
        v = x.to(tl.float32)
        code, scale = encode(v, FORMAT)
        if FORMAT == 2 or FORMAT == 3:
            low, high = tl.split(tl.reshape(code, (TILE, GROUP // 2, 2)))
            pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
            both = tl.max(inside.to(tl.int32), 1) > 0
            packed = (low | (high << 4)).to(tl.uint8)
            tl.store(data + pair * data_column, packed, mask=both[:, None])
        else:
            coded = inside & scaled[:, None]
            tl.store(data + column * data_column, code.to(tl.uint8), mask=coded)
        place = scales_ptr + major * scales_major + minor * scales_minor
        has = scaled & (tl.max(inside.to(tl.int32), 1) > 0)
        tl.store(place + group * scales_column, scale.to(tl.uint8), mask=has)
        if CODED < WIDTH:
            # A row may begin at any byte: bf16 numbers are stored byte by byte.
            bits = bfloat16_bits(v)
            tail = data + (CODED + 2 * (column - CODED)) * data_column
            rest = inside & (scaled == 0)[:, None]
            tl.store(tail, (bits & 255).to(tl.uint8), mask=rest)
            tl.store(tail + data_column, (bits >> 8).to(tl.uint8), mask=rest)
        if PAD:
            last: tl.constexpr = (CODED + GROUP - 1) // GROUP
            zero = tl.zeros((TILE,), tl.uint8)
            tl.store(place + last * scales_column, zero, mask=has & (group == 0))


@triton.jit(do_not_specialize=_COUNTS)
def _read(
    data_ptr,
    scales_ptr,
    out_ptr,
    major_ptr,
    minor_ptr,
    pairs,
    inner,
    majors,
    minors,
    major_outer,
    major_inner,
    minor_outer,
    minor_inner,
    data_major,
    data_minor,
    data_column,
    scales_major,
    scales_minor,
    scales_column,
    WIDTH: tl.constexpr,
    CODED: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
):
    row, group, column, wanted, scaled = group_tile(pairs, WIDTH, CODED, GROUP, GROUP, TILE)
    major, minor, inside = _places(
        row, wanted, inner, majors, minors,
        major_ptr, major_outer, major_inner, minor_ptr, minor_outer, minor_inner,
    )  # fmt: skip
    data = data_ptr + (major * data_major + minor * data_minor)[:, None]
    if FORMAT == 0:
        y = tl.load(data + column * data_column, mask=inside, other=float("nan"))
    else:
        place = scales_ptr + major * scales_major + minor * scales_minor
        has = scaled & (tl.max(inside.to(tl.int32), 1) > 0)
        # All bits set are a NaN scale in each format.
        scale = tl.load(place + group * scales_column, mask=has, other=255).to(tl.int32)
        if FORMAT == 2 or FORMAT == 3:
            pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
            both = tl.load(data + pair * data_column, mask=has[:, None], other=255).to(tl.int32)
            code = tl.reshape(tl.join(both & 15, both >> 4), (TILE, GROUP))
        else:
            coded = inside & scaled[:, None]
            code = tl.load(data + column * data_column, mask=coded, other=255).to(tl.int32)
        y = decode(code, scale, FORMAT)
        if CODED < WIDTH:
            tail = data + (CODED + 2 * (column - CODED)) * data_column
            rest = inside & (scaled == 0)[:, None]
            low = tl.load(tail, mask=rest, other=255).to(tl.int32)
            high = tl.load(tail + data_column, mask=rest, other=255).to(tl.int32)
            number = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
            y = tl.where(scaled[:, None], y, number)
    out = out_ptr + row.to(tl.int64)[:, None] * WIDTH + column
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=wanted)


def write_records(view: RecordView, major: Tensor, minor: Tensor, x: Tensor) -> None:
    """`reference.write_records`."""
    shape = torch.broadcast_shapes(major.shape, minor.shape)
    count = shape.numel()
    if count == 0:
        return
    major, minor = _pair(major, shape), _pair(minor, shape)
    rows = as_rows(x.expand(*shape, view.width))
    data, scales, constants = _layout(view)
    pairs = count * _groups(view)
    with torch.cuda.device_of(data):
        _write[(triton.cdiv(pairs, constants["TILE"]),)](
            rows,
            data,
            scales,
            major,
            minor,
            pairs,
            rows.shape[1],
            data.shape[0],
            data.shape[1],
            rows.stride(0),
            rows.stride(1),
            *major.stride(),
            *minor.stride(),
            *data.stride(),
            *scales.stride(),
            PAD=view.format is RecordFormat.FP8_NOPE_64 and scales.shape[-1] > _scales(view),
            enable_fp_fusion=False,
            **constants,
        )


def read_records(view: RecordView, major: Tensor, minor: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.read_records`."""
    shape = torch.broadcast_shapes(major.shape, minor.shape)
    out = torch.empty((*shape, view.width), dtype=dtype, device=view.data.device)
    _fill(view, _pair(major, shape), _pair(minor, shape), out)
    return out


def read_majors(view: RecordView, major: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.read_majors`."""
    minors = view.data.shape[1]
    out = torch.empty((*major.shape, minors, view.width), dtype=dtype, device=view.data.device)
    _fill(view, major.reshape(-1, 1).expand(-1, minors), None, out)
    return out


def _fill(view: RecordView, major: Tensor, minor: Tensor | None, out: Tensor) -> None:
    """Numbers of the places (major, minor) [outer, inner] into `out`; without minor all of them."""
    if out.numel() == 0:
        return
    data, scales, constants = _layout(view)
    pairs = major.numel() * _groups(view)
    with torch.cuda.device_of(data):
        _read[(triton.cdiv(pairs, constants["TILE"]),)](
            data,
            scales,
            out,
            major,
            minor,
            pairs,
            major.shape[1],
            data.shape[0],
            data.shape[1],
            *major.stride(),
            *((0, 0) if minor is None else minor.stride()),
            *data.stride(),
            *scales.stride(),
            **constants,
        )


def _pair(index: Tensor, shape: torch.Size) -> Tensor:
    """An index as [outer, inner] of `shape`, the rows of `as_rows`; a view up to two dims."""
    index = index.expand(shape)
    if index.dim() < 2:
        return index.reshape(-1, 1)
    return index.reshape(shape[0], shape[1:].numel())


def _scales(view: RecordView) -> int:
    """Scales of a row."""
    return triton.cdiv(coded_width(view), GROUPS[view.format])


def _groups(view: RecordView) -> int:
    return groups_per_row(view.width, coded_width(view), GROUPS[view.format])


def _layout(view: RecordView) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(data, scales, constants of the kernels) of a view."""
    group, coded = GROUPS[view.format], coded_width(view)
    scales = view.scales
    if scales is None:
        bits = 4 if view.format in (RecordFormat.FP4_E4M3_16, RecordFormat.FP4_UE8M0_32) else 8
        before = 0 if view.format is RecordFormat.PLAIN else coded * bits // 8
        scales = view.data[..., before + 2 * (view.width - coded) :]
    constants = {
        "WIDTH": view.width,
        "CODED": coded,
        "GROUP": group,
        "FORMAT": FORMATS[view.format],
        "TILE": tile_rows(group, 1024),
    }
    return view.data, scales, constants
