"""Sparse attention over window keys and selected cache records: one softmax, one pass.

A program computes some heads of one row over tiles of keys (`tiles`): window keys first, then
records, which are decoded as they are read. Tiles without a valid key change nothing, and no
program sees another row. By default few rows take tiles of fewer heads and have their keys cut into
parts, so that they fill a card; with `fixed_tile` all row counts are computed alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.core.kv import RecordFormat
from headrace.ops.cpu import fixed_tile as cpu_fixed_tile
from headrace.ops.records import RecordView
from headrace.ops.triton import tiles
from headrace.ops.triton.records import FORMATS, e2m1_to_float, e4m3_to_float, ue8m0_to_float
from headrace.ops.triton.weights import DECODE_FP4

# What `_records` does not read: index keys, which nothing attends to.
_OTHERS = (RecordFormat.FP4_UE8M0_32,)


@triton.jit
def _records(
    data, row, column, known, WIDTH: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr
):
    """Records that begin at offsets `row` [keys, 1] -> fp32 [keys, columns], 0 if not `known`."""
    if FORMAT == 0:
        return tl.load(data + row + column, mask=known, other=0.0).to(tl.float32)
    elif FORMAT == 1:
        code = tl.load(data + row + column, mask=known, other=0).to(tl.int32)
        scale = tl.load(data + row + WIDTH + column // 32, mask=known, other=0).to(tl.int32)
        return e4m3_to_float(code) * ue8m0_to_float(scale)
    elif FORMAT == 4:
        # Codes of the columns without rope, bf16 of the others byte by byte, scales of 64 columns.
        nope: tl.constexpr = WIDTH - ROPE
        coded, plain = known & (column < nope), known & (column >= nope)
        code = tl.load(data + row + column, mask=coded, other=0).to(tl.int32)
        scale = data + row + nope + 2 * ROPE + column // 64
        scale = tl.load(scale, mask=coded, other=0).to(tl.int32)
        pair = data + row + nope + 2 * (column - nope)
        low = tl.load(pair, mask=plain, other=0).to(tl.int32)
        high = tl.load(pair + 1, mask=plain, other=0).to(tl.int32)
        number = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
        return tl.where(column < nope, e4m3_to_float(code) * ue8m0_to_float(scale), number)
    else:
        pair = tl.load(data + row + column // 2, mask=known, other=0).to(tl.int32)
        code = (pair >> (4 * (column % 2))) & 15
        scale = tl.load(data + row + WIDTH // 2 + column // 16, mask=known, other=0).to(tl.int32)
        return e2m1_to_float(code) * e4m3_to_float(scale)


@triton.jit
def _fp4_records(
    data, row, present, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr
):
    """`_records` of FORMAT 2 in DTYPE, exact in both: each byte and each scale is read once."""
    KEYS: tl.constexpr = row.shape[0]
    GROUPS: tl.constexpr = COLUMNS // 16
    byte = tl.arange(0, COLUMNS // 2)[None, :]
    known = present[:, None] & (byte < WIDTH // 2)
    code = tl.reshape(tl.load(data + row + byte, mask=known, other=0), (KEYS, GROUPS, 8))
    group = tl.arange(0, GROUPS)[None, :]
    known = present[:, None] & (group < WIDTH // 16)
    scale = tl.load(data + row + WIDTH // 2 + group, mask=known, other=0).to(tl.int32)
    scale = e4m3_to_float(scale)[:, :, None]
    if tl.bfloat16 == DTYPE:
        even, odd = tl.inline_asm_elementwise(
            DECODE_FP4,
            "=r,=r,=r,=r,r,r,r",
            [code, tl.broadcast_to(scale.to(tl.bfloat16), (KEYS, GROUPS, 8))],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        code = code.to(tl.int32)
        even, odd = e2m1_to_float(code & 15) * scale, e2m1_to_float(code >> 4) * scale
    return tl.reshape(tl.join(even, odd), (KEYS, COLUMNS)).to(DTYPE)


@triton.jit
def _add_keys(q, keys, valid, top, total, out, scale):
    """One tile of the online softmax. q [h, d], keys [k, d], valid [k]; top, total [h]."""
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    logits = tl.where(valid[None, :], logits, float("-inf"))
    highest = tl.maximum(top, tl.max(logits, 1))
    p = tl.exp(logits - highest[:, None])
    shrink = tl.exp(top - highest)
    total = total * shrink + tl.sum(p, 1)
    p = p.to(keys.dtype)
    out = out * shrink[:, None] + tl.dot(p, keys, input_precision="ieee")
    return highest, total, out


@triton.jit
def _attend(
    q_ptr,
    window_ptr,
    index_ptr,
    data_ptr,
    major_ptr,
    minor_ptr,
    sink_ptr,
    out_ptr,
    scale,
    heads,
    windows,
    entries,
    q_row,
    window_row,
    index_row,
    major_row,
    minor_row,
    data_major,
    data_minor,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Program (row, head tile, part); strides in elements. COLUMNS: WIDTH up to a power of two.

    Part p takes every PARTS-th tile of keys. PARTS > 1: sums fp32 [PARTS, rows, heads, WIDTH], and
    behind them [2, PARTS, rows, heads], what `_merge_parts` needs of each part: its highest logit
    and its total.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head[:, None] < heads) & (column < WIDTH)
    place = row * q_row + head[:, None] * WIDTH + column
    q = tl.load(q_ptr + place, mask=inside, other=0.0)
    sink = tl.load(sink_ptr + head, mask=head < heads, other=0.0).to(tl.float32)
    top = sink
    # The sink itself, once.
    part = tl.program_id(2)
    total = tl.zeros((HEADS,), tl.float32) + tl.where(part == 0, 1.0, 0.0)
    out = tl.zeros((HEADS, COLUMNS), tl.float32)
    for start in range(part * KEYS, windows, PARTS * KEYS):
        key = start + tl.arange(0, KEYS)
        at = tl.load(index_ptr + row * index_row + key, mask=key < windows, other=-1)
        known = (at >= 0)[:, None] & (column < WIDTH)
        keys = tl.load(window_ptr + at[:, None] * window_row + column, mask=known, other=0.0)
        top, total, out = _add_keys(q, keys.to(q.dtype), at >= 0, top, total, out, scale)
    for start in range(part * KEYS, entries, PARTS * KEYS):
        key = start + tl.arange(0, KEYS)
        major = tl.load(major_ptr + row * major_row + key, mask=key < entries, other=-1)
        minor = tl.load(minor_ptr + row * minor_row + key, mask=key < entries, other=-1)
        known = (major >= 0)[:, None] & (column < WIDTH)
        at = (major * data_major + minor * data_minor)[:, None]
        if GROUPED and FORMAT == 2:
            keys = _fp4_records(data_ptr, at, major >= 0, WIDTH, COLUMNS, q.dtype)
        else:
            keys = _records(data_ptr, at, column, known, WIDTH, ROPE, FORMAT)
        top, total, out = _add_keys(q, keys.to(q.dtype), major >= 0, top, total, out, scale)
    place = row * heads + head
    if PARTS > 1:
        count = tl.num_programs(0).to(tl.int64) * heads
        place += part * count
        more = out_ptr + PARTS * count * WIDTH + place
        tl.store(more, top, mask=head < heads)
        tl.store(more + PARTS * count, total, mask=head < heads)
    else:
        out /= total[:, None]
    tl.store(out_ptr + place[:, None] * WIDTH + column, out, mask=inside)


@triton.jit
def _merge_parts(sum_ptr, out_ptr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Program (row and head): the softmax over all PARTS of `_attend`."""
    count = tl.num_programs(0).to(tl.int64)
    place = tl.program_id(0)
    more = sum_ptr + PARTS * count * WIDTH + place
    highest = tl.load(more)
    for part in tl.static_range(1, PARTS):
        highest = tl.maximum(highest, tl.load(more + part * count))
    column = tl.arange(0, COLUMNS)
    total = 0.0
    out = tl.zeros((COLUMNS,), tl.float32)
    for part in tl.static_range(PARTS):
        share = tl.exp(tl.load(more + part * count) - highest)
        total += share * tl.load(more + (PARTS + part) * count)
        at = sum_ptr + (part * count + place) * WIDTH + column
        out += share * tl.load(at, mask=column < WIDTH, other=0.0)
    tl.store(out_ptr + place.to(tl.int64) * WIDTH + column, out / total, mask=column < WIDTH)


class Choice(NamedTuple):
    """Heads and keys of a tile, parts of the keys; grouped: see `_fp4_records`."""

    heads: int
    keys: int
    stages: int
    warps: int
    parts: int = 1
    grouped: bool = False


# So many warps of such programs run at once on an H200; fewer rows are cut into parts for it.
_WARPS = 1056
_MAX_PARTS = 8
# Whose tiles take few registers, so that more heads or keys fit.
_SMALL = (RecordFormat.PLAIN, RecordFormat.FP4_E4M3_16)


def choose(
    q: Tensor, window_index: Tensor, entries: RecordView | None, minor: Tensor, fixed: bool
) -> Choice:
    """By rows, or the same for all rows if `fixed`; arguments as those of `sparse_attention`."""
    (rows, heads, width), tile = q.shape, tiles.of(q.device)
    form = RecordFormat.PLAIN if entries is None else entries.format
    small = q.dtype == torch.bfloat16 and width <= 512 and form in _SMALL
    candidates = tile.attention_bf16 if small else (tile.attention,)
    # No more heads at a time than there are.
    candidates = candidates[: 1 + sum(shape.heads < heads for shape in candidates)]
    grouped = small and form is RecordFormat.FP4_E4M3_16
    if fixed or q.dtype == torch.float32:
        return Choice(*candidates[-1], grouped=grouped)
    keys = max(window_index.shape[1], 0 if entries is None else minor.shape[1])
    for shape in candidates:
        programs = rows * triton.cdiv(heads, shape.heads)
        parts = 1
        while parts < _MAX_PARTS and 2 * parts * shape.keys <= keys:
            parts *= 2
        if programs * parts * shape.warps <= _WARPS:
            break
    while parts > 1 and programs * parts * shape.warps > _WARPS:
        parts //= 2
    return Choice(*shape, parts, grouped)


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: RecordView | None,
    major: Tensor,
    minor: Tensor,
    sink: Tensor,
    scale: float,
    *,
    fixed_tile: bool = False,
) -> Tensor:
    """`reference.sparse_attention`; entries stored as index keys go to it."""
    if entries is not None and entries.format in _OTHERS:
        return cpu_fixed_tile.sparse_attention(
            q, window, window_index, entries, major, minor, sink, scale
        )
    choice = choose(q, window_index, entries, minor, fixed_tile)
    return attend(q, window, window_index, entries, major, minor, sink, scale, choice)


def attend(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: RecordView | None,
    major: Tensor,
    minor: Tensor,
    sink: Tensor,
    scale: float,
    choice: Choice,
) -> Tensor:
    """`sparse_attention` of no index keys, as chosen."""
    rows, heads, width = q.shape
    q, window = _packed(q), _packed(window)
    window_index, major, minor = (_packed(x) for x in (window_index, major, minor))
    out = torch.empty((rows, heads, width), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    parts, columns = choice.parts, triton.next_power_of_2(width)
    size = parts * rows * heads * (width + 2)
    sums = out if parts == 1 else torch.empty(size, dtype=torch.float32, device=q.device)
    data = window if entries is None else entries.data
    with torch.cuda.device_of(q):
        _attend[(rows, triton.cdiv(heads, choice.heads), parts)](
            q,
            window,
            window_index,
            data,
            major,
            minor,
            sink.contiguous(),
            sums,
            scale,
            heads,
            window_index.shape[1],
            0 if entries is None else major.shape[1],
            q.stride(0),
            window.stride(0),
            window_index.stride(0),
            major.stride(0),
            minor.stride(0),
            data.stride(0),
            data.stride(-2),
            WIDTH=width,
            COLUMNS=columns,
            ROPE=0 if entries is None else entries.rope_width,
            FORMAT=0 if entries is None else FORMATS[entries.format],
            HEADS=choice.heads,
            KEYS=choice.keys,
            PARTS=parts,
            GROUPED=choice.grouped,
            num_stages=choice.stages,
            num_warps=choice.warps,
        )
        if parts > 1:
            _merge_parts[(rows * heads,)](sums, out, WIDTH=width, COLUMNS=columns, PARTS=parts)
    return out


def _packed(x: Tensor) -> Tensor:
    """x [T, .., n] with everything behind its first dim in one piece; rows may be apart."""
    whole = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if whole else x.contiguous()
