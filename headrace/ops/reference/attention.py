"""Reference sparse attention: one softmax over window keys, selected entries and a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.ops.records import RecordView
from headrace.ops.reference.norm import wide
from headrace.ops.reference.quant import read_records
from headrace.ops.stored_weights import Weight, dense

# Rows attended at a time: bounds the gathered keys to rows * (window + top-k) * width numbers.
ROW_TILE = 64


def attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [T, H, d] over its own keys [T, K, d] (also the values) where valid [T, K] -> [T, H, d].

    logit = q.k * scale; the denominator also holds exp(sink_h), sink [H] unscaled; a row without
    any valid key gives 0. fp32 arithmetic (fp64 in the fp64 mode), probabilities rounded to the
    dtype of q before the product with the values, as the released path does.
    """
    k = wide(keys)
    logits = (wide(q) @ k.transpose(-1, -2)) * scale
    logits = logits.masked_fill(~valid.unsqueeze(-2), -torch.inf)
    s = sink.to(logits.dtype).view(1, -1, 1)
    top = torch.maximum(logits.amax(-1, keepdim=True), s)
    p = torch.exp(logits - top)
    total = p.sum(-1, keepdim=True) + torch.exp(s - top)
    out = p.to(q.dtype).to(k.dtype) @ k
    return (out / total).to(q.dtype)


def gather_keys(
    window: Tensor,
    window_index: Tensor,
    entries: RecordView | None,
    major: Tensor,
    minor: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys [T, W + K, d] and their validity for some rows: window keys first, then entries.

    window [M, d] with window_index [T, W]; entries at (major, minor) [T, K]; -1 = no key.
    Invalid places hold zeros: what lies in unused cache rows (even NaN) must not leak.
    """
    parts = [window[window_index.clamp_min(0)].to(dtype)]
    masks = [window_index >= 0]
    if entries is not None:
        parts.append(read_records(entries, major.clamp_min(0), minor.clamp_min(0), dtype))
        masks.append(major >= 0)
    valid = torch.cat(masks, dim=1)
    keys = torch.cat(parts, dim=1).masked_fill(~valid.unsqueeze(-1), 0.0)
    return keys, valid


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: RecordView | None,
    major: Tensor,
    minor: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """q [T, H, d] over window keys and the selected entries of the cache -> [T, H, d].

    window [M, d], window_index int64 [T, W]; entries with (major, minor) int64 [T, K]; -1 = none.
    """
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], ROW_TILE):
        rows = slice(start, start + ROW_TILE)
        keys, valid = gather_keys(
            window, window_index[rows], entries, major[rows], minor[rows], q.dtype
        )
        out[rows] = attend(q[rows], keys, valid, sink, scale)
    return out


def grouped_projection(o: Tensor, wo_a: Weight, groups: int) -> Tensor:
    """o [T, H, d], heads in `groups` consecutive groups, wo_a [groups * R, H * d / groups].

    Group g's heads go through rows [g * R, (g + 1) * R) -> [T, groups * R].
    """
    x = o.flatten(1).unflatten(-1, (groups, -1)).transpose(0, 1)
    w = dense(wo_a, o.dtype).unflatten(0, (groups, -1))
    return (x @ w.transpose(-1, -2)).transpose(0, 1).flatten(1)
