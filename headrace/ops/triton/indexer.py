"""Index scores straight from the cache: keys are found by block table and decoded as they are read.

A program scores `KEYS` entries of one sequence for up to `ROWS` of its rows. The keys of the tile
are decoded once, then every row is one product of the same shape [keys, d] x [d, heads], so that a
row's bits do not depend on the rows beside it. Tiles of which no row may have an entry are filled
with -inf and read no key. Rounding is that of `reference.index_scores`: dot products, what they are
after the head's weight, and their sum are rounded to the dtype of the queries; sums are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.core.kv import RecordFormat
from headrace.ops.cpu import fixed_tile
from headrace.ops.records import RecordView
from headrace.ops.triton.records import e2m1_to_float, ue8m0_to_float

ROWS = 16
# Entries of a tile: tensor cores take 128 at once, fp32 products are made by the other cores.
KEYS = {torch.bfloat16: 128, torch.float32: 32}
_FP4_GROUP: tl.constexpr = tl.constexpr(32)


@triton.jit
def _plain_keys(data, at, known, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers at offsets `at` [keys] -> [keys, COLUMNS], 0 if not `known`."""
    column = tl.arange(0, COLUMNS)[None, :]
    return tl.load(data + at[:, None] + column, mask=known[:, None] & (column < WIDTH), other=0.0)


@triton.jit
def _fp4_keys(data, scales, at, scale_at, known, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """E2M1 pairs at offsets `at`, UE8M0 scales at `scale_at` [keys] -> fp32 [keys, COLUMNS]."""
    # [keys, groups, bytes]: each byte and each scale is read once.
    group = tl.arange(0, COLUMNS // _FP4_GROUP)
    byte = tl.arange(0, _FP4_GROUP // 2)
    inside = known[:, None] & (group[None, :] < WIDTH // _FP4_GROUP)
    scale = tl.load(scales + scale_at[:, None] + group[None, :], mask=inside, other=0)
    column = (group[:, None] * (_FP4_GROUP // 2) + byte[None, :])[None, :, :]
    pair = tl.load(data + at[:, None, None] + column, mask=inside[:, :, None], other=0)
    pair = pair.to(tl.int32)
    factor = ue8m0_to_float(scale.to(tl.int32))[:, :, None]
    both = tl.join(e2m1_to_float(pair & 15) * factor, e2m1_to_float(pair >> 4) * factor)
    return tl.reshape(both, (at.shape[0], COLUMNS))


# What differs from step to step must not compile it again.
@triton.jit(do_not_specialize=["each", "count", "block_row"])
def _score(
    q_ptr,
    weights_ptr,
    data_ptr,
    scales_ptr,
    blocks_ptr,
    visible_ptr,
    allowed_ptr,
    out_ptr,
    heads,
    each,
    count,
    minors,
    block_row,
    allowed_row,
    data_major,
    data_minor,
    scale_major,
    scale_minor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    FP4: tl.constexpr,
    RESTRICTED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (rows of a sequence, tile of entries); each: rows of a sequence; strides in elements.

    COLUMNS, HEADS: WIDTH and heads up to a power of two.
    """
    groups = tl.cdiv(each, ROWS)
    sequence = (tl.program_id(0) // groups).to(tl.int64)
    first = tl.program_id(0) % groups * ROWS
    rows = tl.minimum(each - first, ROWS)
    base = sequence * each + first
    start = tl.program_id(1) * KEYS
    entry = start + tl.arange(0, KEYS)
    row = tl.arange(0, ROWS)
    most = tl.max(tl.load(visible_ptr + base + row, mask=row < rows, other=0))
    some = start < most
    if RESTRICTED:
        flags = allowed_ptr + (base + row)[:, None] * allowed_row + entry[None, :]
        exists = (row < rows)[:, None] & (entry < count)[None, :]
        allowed = tl.load(flags, mask=exists, other=0).to(tl.int32)
        some = some & (tl.max(tl.max(allowed, 1)) > 0)
    if not some:
        hidden = tl.full((KEYS,), float("-inf"), out_ptr.dtype.element_ty)
        for r in range(0, rows):
            tl.store(out_ptr + (base + r) * count + entry, hidden, mask=entry < count)
    else:
        known = (entry < most) & (entry < count)
        block = tl.load(blocks_ptr + sequence * block_row + entry // minors, mask=known, other=0)
        minor = entry % minors
        at = block * data_major + minor * data_minor
        if FP4:
            scale_at = block * scale_major + minor * scale_minor
            keys = _fp4_keys(data_ptr, scales_ptr, at, scale_at, known, WIDTH, COLUMNS)
        else:
            keys = _plain_keys(data_ptr, at, known, WIDTH, COLUMNS)
        keys = keys.to(q_ptr.dtype.element_ty)
        head = tl.arange(0, HEADS)
        column = tl.arange(0, COLUMNS)
        inside = (head[:, None] < heads) & (column[None, :] < WIDTH)
        for r in range(0, rows):
            t = base + r
            place = (t * heads + head[:, None]) * WIDTH + column[None, :]
            q = tl.load(q_ptr + place, mask=inside, other=0.0)
            weight = tl.load(weights_ptr + t * heads + head, mask=head < heads, other=0.0)
            dots = tl.dot(keys, tl.trans(q), input_precision="ieee")
            dots = tl.where(dots < 0.0, 0.0, dots)  # keeps NaN
            dots = dots.to(q.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
            dots = tl.where(head[None, :] < heads, dots.to(q.dtype).to(tl.float32), 0.0)
            seen = entry < tl.load(visible_ptr + t)
            if RESTRICTED:
                flag = allowed_ptr + t * allowed_row + entry
                seen = seen & (tl.load(flag, mask=entry < count, other=0) != 0)
            score = tl.where(seen, tl.sum(dots, 1), float("-inf"))
            tl.store(out_ptr + t * count + entry, score.to(q.dtype), mask=entry < count)


def entry_scores(
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    blocks: Tensor,
    visible: Tensor,
    count: int | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """`reference.entry_scores` of keys in FP4_UE8M0_32 or PLAIN; others go to `fixed_tile`, whose
    rows do not depend on each other either."""
    if keys.format not in (RecordFormat.PLAIN, RecordFormat.FP4_UE8M0_32):
        return fixed_tile.entry_scores(q, weights, keys, blocks, visible, count, allowed)
    rows, heads, width = q.shape
    sequences, minors = blocks.shape[0], keys.data.shape[1]
    count = blocks.shape[1] * minors if count is None else count
    out = torch.empty((rows, count), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, weights, blocks, visible = (x.contiguous() for x in (q, weights, blocks, visible))
    data, scales = keys.data, keys.scales
    is_fp4 = keys.format is RecordFormat.FP4_UE8M0_32
    if scales is None:
        data, scales = (data[..., : width // 2], data[..., width // 2 :]) if is_fp4 else (data,) * 2
    mask = out if allowed is None else allowed.contiguous().view(torch.uint8)
    each = rows // sequences
    tile = KEYS[q.dtype]
    with torch.cuda.device_of(q):
        _score[(sequences * triton.cdiv(each, ROWS), triton.cdiv(count, tile))](
            q,
            weights,
            data,
            scales,
            blocks,
            visible,
            mask,
            out,
            heads,
            each,
            count,
            minors,
            blocks.stride(0),
            mask.stride(0),
            data.stride(0),
            data.stride(1),
            scales.stride(0),
            scales.stride(1),
            WIDTH=width,
            COLUMNS=max(16, triton.next_power_of_2(width)),
            HEADS=max(16, triton.next_power_of_2(heads)),
            FP4=is_fp4,
            RESTRICTED=allowed is not None,
            ROWS=ROWS,
            KEYS=tile,
        )
    return out
