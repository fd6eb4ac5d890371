"""CPU operators for steps of many rows: prompts.

Rows that lie side by side in a prompt see nearly the same keys. `sparse_attention` therefore works
on tiles of rows: each distinct key of a tile is read and decoded once and multiplied with all rows
of the tile in one matrix product, and a mask says who sees what; where the rows of a tile share
little, each gathers its own. `index_scores` makes its scores in tiles that stay in the processor's
cache, and `select_top_k` finds the smallest score that is taken instead of sorting all of them.
Called by `decode` above its sizes, for fp32 and fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.ops.cpu.decode import quant
from headrace.ops.cpu.decode.arrays import Array, array, tensor
from headrace.ops.records import RecordView
from headrace.ops.reference import attention, indexer

# Most numbers of the entries that are decoded at once (16 MB in fp32), but for one tile's at least.
_ENTRIES = 1 << 22
# From so many distinct keys per key of a row on, the rows of a tile gather their own.
_SHARED = 5
# From so many heads on, the products of each row alone are as fast (docs/bench/prefill_ops.jsonl).
_HEADS = 48
# Longest range of numbers that is looked through instead of sorting them.
_RANGE = 1 << 20
# Scores of all heads made at once (1 MB in fp32).
_SCORES = 1 << 18


class _Keys(NamedTuple):
    """Keys of a tile of rows: [U, d] shared by all or [rows, K, d]; absent bool [rows, U or K]."""

    keys: Tensor
    absent: Array

    def dots(self, q: Tensor) -> Tensor:
        """q [rows, H, d] . keys -> [rows, H, U or K]."""
        if self.keys.ndim == 2:
            return (q.flatten(0, 1) @ self.keys.T).view(*q.shape[:2], -1)
        return torch.bmm(q, self.keys.transpose(1, 2))

    def sums(self, p: Tensor) -> Tensor:
        """Weights p [rows, H, U or K] over the keys -> [rows, H, d]."""
        if self.keys.ndim == 2:
            return (p.flatten(0, 1) @ self.keys).view(*p.shape[:2], -1)
        return torch.bmm(p, self.keys)


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
    """`reference.sparse_attention`; no row names a key twice."""
    rows, heads, width = q.shape
    if heads >= _HEADS:
        return attention.sparse_attention(
            q, window, window_index, entries, major, minor, sink, scale
        )
    near, far = array(window_index), array(major)
    wanted = far.shape[1] if entries is not None else 0
    step = attention.ROW_TILE
    at_once = max(1, _ENTRIES // max(1, wanted * width * step)) * step
    out = torch.empty_like(q)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        table, place = window[:0], far[part, :0]
        if entries is not None and wanted:
            table, place = _distinct_entries(entries, far[part], array(minor)[part], q.dtype)
        for start in range(part.start, part.stop, step):
            tile = slice(start, min(start + step, part.stop))
            within = slice(tile.start - first, tile.stop - first)
            found = [_keys(window, near[tile]), _keys(table, place[within])]
            result = _attend(q[tile], found, sink, scale)
            if result is None:  # a key is not finite: only its own rows may notice
                result = attention.sparse_attention(
                    *(q[tile], window, window_index[tile], entries, major[tile], minor[tile]),
                    sink,
                    scale,
                )
            out[tile] = result
    return out


def _distinct_entries(
    view: RecordView, major: Array, minor: Array, dtype: torch.dtype
) -> tuple[Tensor, Array]:
    """(the different entries [U, d], the place of each one in them [rows, K], -1 = none)."""
    minors = view.data.shape[1]
    present = major >= 0
    ids, number = _distinct((major * minors + minor)[present])
    table = quant.read_records(view, tensor(ids // minors), tensor(ids % minors), dtype)
    place = np.full(major.shape, -1, np.int64)
    place[present] = number
    return table, place


def _distinct(ids: Array) -> tuple[Array, Array]:
    """(the different numbers of ids [n] in order, the place of each of ids in them)."""
    first = int(ids.min(initial=_RANGE))
    span = int(ids.max(initial=first)) - first + 1
    if span > _RANGE:
        return np.unique(ids, return_inverse=True)
    seen = np.zeros(span, np.bool_)
    seen[ids - first] = True
    return np.flatnonzero(seen) + first, (seen.cumsum() - 1)[ids - first]


def _keys(table: Tensor, place: Array) -> _Keys:
    """The keys of table [N, d] at place [rows, K] (-1 = none)."""
    rows, count = place.shape
    present = place >= 0
    distinct, number = _distinct(place[present])
    if distinct.size > _SHARED * max(1, count):
        absent = ~present
        keys = table[torch.from_numpy(np.where(present, place, 0))]
        return _Keys(keys.masked_fill_(torch.from_numpy(absent).unsqueeze(-1), 0.0), absent)
    absent = np.ones((rows, distinct.size), np.bool_)
    absent[np.nonzero(present)[0], number] = False
    return _Keys(table[torch.from_numpy(distinct)], absent)


def _attend(q: Tensor, found: list[_Keys], sink: Tensor, scale: float) -> Tensor | None:
    """One softmax over all keys and the sink; None where a key is NaN or infinite.

    A key that is masked has weight 0, but 0 times NaN is NaN.
    """
    if not all(bool(torch.isfinite(part.keys.sum())) for part in found):
        return None
    rows, heads, _ = q.shape
    sizes = [part.absent.shape[1] for part in found]
    logits = torch.empty((rows, heads, sum(sizes) + 1), dtype=q.dtype)
    absent = np.zeros((rows, 1, sum(sizes) + 1), np.bool_)
    start = 0
    for part, size in zip(found, sizes, strict=True):
        torch.mul(part.dots(q), scale, out=logits[..., start : start + size])
        absent[:, 0, start : start + size] = part.absent
        start += size
    logits[..., -1] = sink
    logits.masked_fill_(torch.from_numpy(absent), -torch.inf)
    # Divided at the end, as the reference does: rounding to codes follows its last bits.
    weights = torch.sub(logits, logits.amax(-1, keepdim=True), out=logits).exp_()
    total = weights.sum(-1, keepdim=True)
    out = found[0].sums(weights[..., : sizes[0]])
    if sizes[1]:
        out += found[1].sums(weights[..., sizes[0] : -1])
    return out.div_(total)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`reference.index_scores`, the sum over the heads as a matrix product."""
    b, n, h, d = q.shape
    total = keys.shape[1]
    out = torch.empty((b, n, total), dtype=q.dtype)
    if out.numel() == 0:
        return out
    step = max(1, _SCORES // (h * total))
    for sequence in range(b):
        transposed = keys[sequence].T
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            dots = torch.relu_(q[sequence, rows].reshape(-1, d) @ transposed)
            dots = dots.view(-1, h, total)
            torch.bmm(weights[sequence, rows].unsqueeze(1), dots, out=out[sequence, rows, None])
    return out


def select_top_k(scores: Tensor, top_k: int) -> Tensor:
    """`reference.select_top_k`; equal scores are won by the lowest position there too."""
    rows, places = scores.shape
    if not 0 < top_k < places or rows == 0:
        return indexer.select_top_k(scores, top_k)
    least = torch.topk(scores, top_k, dim=-1, sorted=False)[0].amin(-1, keepdim=True)
    if bool(torch.isnan(least).any()):
        return indexer.select_top_k(scores, top_k)
    s, limit = array(scores), array(least)
    chosen = (s >= limit) & (s > -np.inf)
    count = chosen.sum(1)
    for row in np.flatnonzero(count > top_k).tolist():  # ties at the limit: the last ones go
        tied = np.flatnonzero(s[row] == limit[row])
        chosen[row, tied[tied.size - (int(count[row]) - top_k) :]] = False
    found = np.full((rows, top_k), -1, np.int64)
    found[np.arange(top_k) < count[:, None]] = np.nonzero(chosen)[1]
    return tensor(found)
