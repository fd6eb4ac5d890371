"""Pooling of tokens into compressed entries: one kernel a call.

A program computes some channels of one entry over all its tokens at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pool(
    rows_ptr,
    tokens_ptr,
    ape_ptr,
    out_ptr,
    row_stride,
    token_outer,
    token_inner,
    TOKENS: tl.constexpr,
    RATIO: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """rows: kv, then score, CHANNELS each. SIZE: TOKENS up to a power of two."""
    entry = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = channel < WIDTH
    token = tokens_ptr + entry * token_outer + place * token_inner
    token = tl.load(token, mask=place < TOKENS, other=-1).to(tl.int64)[:, None]
    if OVERLAP:
        source = channel + tl.where(place < TOKENS // 2, 0, WIDTH)[:, None]
    else:
        source = tl.broadcast_to(channel, (SIZE, COLUMNS))
    # What lies in an absent row, even NaN, is not read.
    known = (token >= 0) & inside
    row = rows_ptr + token * row_stride + source
    kv = tl.load(row, mask=known, other=0.0).to(tl.float32)
    score = tl.load(row + CHANNELS, mask=known, other=float("-inf")).to(tl.float32)
    if ape_ptr is not None:
        ape = ape_ptr + (place % RATIO)[:, None] * CHANNELS + source
        score += tl.load(ape, mask=known, other=0.0).to(tl.float32)
    score = tl.where(inside, score, 0.0)
    top = tl.max(score, 0)[None, :]
    weight = tl.exp(score - top)
    total = tl.sum(weight, 0)
    result = tl.sum(weight * kv, 0) / total
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out_ptr + entry * WIDTH + at, result.to(out_ptr.dtype.element_ty), mask=at < WIDTH)


def pool_entries(rows: Tensor, tokens: Tensor, ape: Tensor | None, overlap: bool) -> Tensor:
    """`reference.pool_entries`."""
    channels = rows.shape[1] // 2
    width = channels // 2 if overlap else channels
    entries, count = tokens.shape
    out = torch.empty((entries, width), dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    size = triton.next_power_of_2(count)
    columns = min(triton.next_power_of_2(width), max(16, 4096 // size), 256)
    with torch.cuda.device_of(rows):
        _pool[(entries, triton.cdiv(width, columns))](
            rows,
            tokens,
            None if ape is None else ape.contiguous(),
            out,
            rows.stride(0),
            *tokens.stride(),
            TOKENS=count,
            RATIO=count if ape is None else ape.shape[0],
            CHANNELS=channels,
            WIDTH=width,
            OVERLAP=bool(overlap),
            SIZE=size,
            COLUMNS=columns,
        )
    return out
