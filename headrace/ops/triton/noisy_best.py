"""The best ids of a draw with Gumbel noise: `ops.noisy_best` in one kernel.

A program takes a part of a row: it makes the noise of its ids from the row's stream, adds it to the
scaled logits and keeps the best three: that likely ids lie side by side, and two come close, is
common, a third one is not. Of what all parts keep the best are listed. Nothing as wide as the
vocabulary is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.noisy_best import LISTED, NoisyBest

# Ids of a program. By nothing but this: a row's bits must not depend on other rows.
PART = 4096
KEPT = 3


@triton.jit
def _loss(words):
    """Minus the noise, fp32, of the uint64 bits that `rng.mix64` gets; off by 1e-5 at most.

    See `ops.noisy_best`. For small v the inner logarithm is a series, 2 atanh(v / (2 - v)), cut
    where a term is 2^-26 of the sum: a card's own is not precise enough near 1.
    """
    z = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    odd = ((z >> 11) | 1).to(tl.int64)
    low = odd < 4503599627370496  # 2^52
    near = tl.where(low, odd, 9007199254740992 - odd).to(tl.float32) * 1.1102230246251565e-16
    s = near / (2.0 - near)
    q = s * s
    series = 1.0 / 11.0 + q * (1.0 / 13.0)
    series = 1.0 / 9.0 + q * series
    series = 1.0 / 7.0 + q * series
    series = 1.0 / 5.0 + q * series
    series = 1.0 / 3.0 + q * series
    inner = tl.where(low, 2.0 * s * (1.0 + q * series), -tl.log(near))
    return tl.log(inner)


@triton.jit
def _search(
    logits_ptr,
    highest_ptr,
    temperatures_ptr,
    streams_ptr,
    totals_ptr,
    ids_ptr,
    vocab,
    logits_row,
    PART: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Program (row, part): the best totals of a part and their ids."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    place = tl.arange(0, PART)
    ids = part * PART + place
    x = tl.load(logits_ptr + row * logits_row + ids, mask=ids < vocab, other=float("-inf"))
    highest = tl.load(highest_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    if logits_ptr.dtype.element_ty == tl.float64:
        scaled = (x / temperature - highest / temperature).to(tl.float32)
    else:
        scaled = (x - highest) * (1.0 / temperature).to(tl.float32)
    stream = tl.load(streams_ptr + row).to(tl.uint64, bitcast=True)
    words = (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + stream
    totals = scaled - _loss(words)
    out = (row * tl.num_programs(1) + part) * KEPT
    for i in tl.static_range(KEPT):
        best, at = tl.max(totals, 0, return_indices=True)
        tl.store(totals_ptr + out + i, best)
        # Parts of fewer ids name another one, with -inf.
        tl.store(ids_ptr + out + i, tl.minimum(part * PART + at, vocab - 1).to(tl.int64))
        totals = tl.where(place == at, float("-inf"), totals)


def noisy_best(logits: Tensor, highest: Tensor, temperatures: Tensor, streams: Tensor) -> NoisyBest:
    """`ops.noisy_best.plain`; `rest` may be a listed total, of what a part did not keep."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    totals = torch.empty((rows, parts, KEPT), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, parts, KEPT), dtype=torch.int64, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):
            _search[(rows, parts)](
                logits,
                highest.contiguous(),
                temperatures.contiguous(),
                streams.contiguous(),
                totals,
                ids,
                vocab,
                logits.stride(0),
                PART=PART,
                KEPT=KEPT,
                num_warps=8,
            )
    rest = totals[..., -1].amax(dim=1)  # what a part did not keep is at most its last
    totals, ids = totals.flatten(1), ids.flatten(1)
    if totals.shape[1] > LISTED:
        totals, places = totals.topk(LISTED, dim=1)
        ids, rest = ids.gather(1, places), torch.maximum(rest, totals[:, -1])
    return NoisyBest(totals, ids, rest)
