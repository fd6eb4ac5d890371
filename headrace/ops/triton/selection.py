"""The best of many scores: top-k and candidate blocks, exact and without sorting.

Scores become integers of the same order (`_order`). A program keeps a chunk of a row in registers
and finds the k-th largest of it bit by bit, from the top: one count of "at least this" per bit. A
running sum then puts what is taken in order of position. Rows longer than a chunk are a tournament:
the best k of every chunk, then the best k of those, until one chunk is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.reference import indexer as reference

# Numbers of a chunk: the first size that holds a row, else the last. Few sizes, since each is
# compiled when it is first met; both running sums of `_select` must fit into 16 bits.
CHUNKS = (1 << 10, 1 << 12, 1 << 14)
# Maxima that a program of `_block_maxima` makes, times their block size.
MAXIMA = 1 << 12
# Bits that tell scores apart: a bf16 number is the upper half of an fp32 number.
_BITS = {torch.bfloat16: 16, torch.float32: 32}


@triton.jit
def _order(x, BITS: tl.constexpr):
    """int32 of BITS bits in the order of x; -0.0 equals 0.0, NaN of any sign is above infinity."""
    if BITS == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -magnitude - 1, bits)
    order = tl.where(magnitude == 0, 0, order)
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, order) >> (32 - BITS)


@triton.jit
def _block_maxima(
    scores_ptr,
    visible_ptr,
    out_ptr,
    n,
    blocks,
    size,
    scores_row,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Program (row, tile of blocks): order of each block's best score, the newest one infinite."""
    NOTHING: tl.constexpr = -2139095041 >> (32 - BITS)  # -inf
    FORCED: tl.constexpr = 0x7F800000 >> (32 - BITS)  # inf
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    within = tl.arange(0, SIZE)[None, :]
    place = block[:, None] * size + within
    known = (within < size) & (place < n)
    x = tl.load(scores_ptr + row * scores_row + place, mask=known, other=float("-inf"))
    best = tl.max(_order(x, BITS), 1)
    visible = tl.load(visible_ptr + row)
    best = tl.where(block == (visible - 1) // size, FORCED, best)
    best = tl.where(visible > 0, best, NOTHING)
    tl.store(out_ptr + row * blocks + block, best, mask=block < blocks)


@triton.jit
def _select(
    scores_ptr,
    places_ptr,
    out_ptr,
    scores_row,
    given,
    k,
    out_row,
    ORDERED: tl.constexpr,
    NESTED: tl.constexpr,
    LAST: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Program (row, chunk): positions of the best k of a chunk, ascending, -1 at the end.

    ORDERED: scores are integers of `_order` already. NESTED: the numbers are those at `places`
    [T, given], else the first `given` of the row. LAST: NaN takes its place but is not given.
    """
    NOTHING: tl.constexpr = -2139095041 >> (32 - BITS)  # -inf
    NAN: tl.constexpr = 0x7FFFFFFF >> (32 - BITS)
    LEAST: tl.constexpr = -(1 << (BITS - 1))
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if NESTED:
        place = tl.load(places_ptr + row * given + at, mask=at < given, other=-1).to(tl.int32)
    else:
        place = tl.where(at < given, at, -1)
    source = scores_ptr + row * scores_row + place
    if ORDERED:
        order = tl.load(source, mask=place >= 0, other=NOTHING)
    else:
        order = _order(tl.load(source, mask=place >= 0, other=float("-inf")), BITS)
    # The largest number that at least k are not below, from its sign to its lowest bit.
    limit = tl.where(tl.sum((order >= 0).to(tl.int32)) >= k, 0, LEAST)
    for i in range(0, BITS - 1):
        higher = limit | (1 << (BITS - 2 - i))
        limit = tl.where(tl.sum((order >= higher).to(tl.int32)) >= k, higher, limit)
    above = order > limit
    need = k - tl.sum(above.to(tl.int32))
    above = above & (order > NOTHING)
    equal = (order == limit) & (order > NOTHING)
    if LAST:
        above = above & (order < NAN)
        equal = equal & (order < NAN)
    both = tl.cumsum(above.to(tl.int32) | (equal.to(tl.int32) << 16), 0)
    equals = both >> 16
    taken = above | (equal & (equals <= need))
    slot = (both & 0xFFFF) + tl.minimum(equals, need) - 1
    out_ptr += row * out_row + tl.program_id(1) * k
    tl.store(out_ptr + slot, place.to(tl.int64), mask=taken)
    count = tl.sum(taken.to(tl.int32))
    free = tl.arange(0, SLOTS)
    none = tl.full((SLOTS,), -1, tl.int64)
    tl.store(out_ptr + free, none, mask=(free >= count) & (free < k))


@triton.jit
def _mark(places_ptr, out_ptr, k, n, size, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Program (row, tile of k): set the `size` bytes of each block at places [T, k]."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * TILE + tl.arange(0, TILE)
    block = tl.load(places_ptr + row * k + number, mask=number < k, other=-1)[:, None]
    within = tl.arange(0, SIZE)[None, :]
    place = block * size + within
    known = (block >= 0) & (within < size) & (place < n)
    yes = tl.full((TILE, SIZE), 1, tl.uint8)
    tl.store(out_ptr + row * n + place, yes, mask=known)


def _best(scores: Tensor, k: int, bits: int) -> Tensor:
    """int64 [T, k]: `select_top_k` of scores [T, N], or of their `_order`, 0 < k <= N, T > 0."""
    rows, given = scores.shape
    places = scores  # not read by the first round
    nested = False
    while True:
        chunk = next((size for size in CHUNKS if given <= size), CHUNKS[-1])
        chunks = triton.cdiv(given, chunk)
        out = torch.empty((rows, chunks * k), dtype=torch.int64, device=scores.device)
        _select[(rows, chunks)](
            scores,
            places,
            out,
            scores.stride(0),
            given,
            k,
            out.stride(0),
            ORDERED=scores.dtype == torch.int32,
            NESTED=nested,
            LAST=chunks == 1,
            BITS=bits,
            CHUNK=chunk,
            SLOTS=triton.next_power_of_2(k),
            num_warps=max(1, min(16, chunk // 512)),
        )
        if chunks == 1:
            return out
        places, given, nested = out, chunks * k, True


def select_top_k(scores: Tensor, top_k: int) -> Tensor:
    """`reference.select_top_k`, also of NaN: it counts as largest and leaves a -1.

    Rows longer than a chunk of which more than half a chunk is wanted go to the reference: a
    tournament of theirs would not get smaller.
    """
    rows, n = scores.shape
    k = min(top_k, n)
    if n > CHUNKS[-1] < 2 * k:
        return reference.select_top_k(scores, top_k)
    if rows == 0 or k < 1:
        return torch.empty((rows, max(k, 0)), dtype=torch.int64, device=scores.device)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    with torch.cuda.device_of(scores):
        return _best(scores, k, _BITS[scores.dtype])


def candidate_mask(scores: Tensor, visible: Tensor, block: int, keep: int) -> Tensor:
    """`reference.candidate_mask`."""
    rows, n = scores.shape
    blocks = triton.cdiv(n, block)
    k = min(keep, blocks)
    if blocks > CHUNKS[-1] < 2 * k:
        return reference.candidate_mask(scores, visible, block, keep)
    out = torch.zeros((rows, n), dtype=torch.bool, device=scores.device)
    if out.numel() == 0 or k < 1:
        return out
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    best = torch.empty((rows, blocks), dtype=torch.int32, device=scores.device)
    size = triton.next_power_of_2(block)
    tile = max(1, min(MAXIMA // size, triton.next_power_of_2(blocks)))
    bits = _BITS[scores.dtype]
    with torch.cuda.device_of(scores):
        _block_maxima[(rows, triton.cdiv(blocks, tile))](
            scores,
            visible.contiguous(),
            best,
            n,
            blocks,
            block,
            scores.stride(0),
            SIZE=size,
            TILE=tile,
            BITS=bits,
        )
        places = _best(best, k, bits)
        _mark[(rows, triton.cdiv(k, tile))](
            places, out.view(torch.uint8), k, n, block, SIZE=size, TILE=tile
        )
    return out
