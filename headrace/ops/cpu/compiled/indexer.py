"""Compressor pooling and selection of the best entries."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.compiled.kernel import dense, kernel
from headrace.ops.cpu.decode import indexer as decode
from headrace.ops.cpu.decode.arrays import FEW, Array, array, tensor


@kernel
def _pool(rows: Array, tokens: Array, ape: Array, overlap: bool, out: Array) -> None:
    """`reference.pool_entries`; an empty ape counts as zeros."""
    entries, n = tokens.shape
    half = rows.shape[1] // 2
    width = out.shape[1]
    top, total = np.empty(width, out.dtype), np.empty(width, out.dtype)
    for e in range(entries):
        top[:] = -np.inf
        total[:] = 0
        out[e] = 0
        for step in range(2):  # maxima, then sums
            for i in range(n):
                if tokens[e, i] < 0:
                    continue
                first = width if overlap and i >= n // 2 else 0
                row = rows[tokens[e, i]]
                kv, score = row[first : first + width], row[half + first : half + first + width]
                for d in range(width):
                    s = score[d]
                    if ape.size:
                        s += ape[i % ape.shape[0], first + d]
                    if step == 0:
                        top[d] = max(top[d], s)
                    else:
                        weight = np.exp(s - top[d])
                        total[d] += weight
                        out[e, d] += weight * kv[d]
        for d in range(width):
            out[e, d] /= total[d]


@kernel
def _sift(values: Array, places: Array, size: int, start: int) -> None:
    """Restore the heap below `start`: the smallest value first, of equal ones the last place."""
    at = start
    while True:
        least, left = at, 2 * at + 1
        for child in (left, left + 1):
            if child < size and (
                values[child] < values[least]
                or (values[child] == values[least] and places[child] > places[least])
            ):
                least = child
        if least == at:
            return
        values[at], values[least] = values[least], values[at]
        places[at], places[least] = places[least], places[at]
        at = least


@kernel
def _best(scores: Array, out: Array) -> None:
    """out [T, k]: the k best places of each row, ascending, -1 at the end."""
    rows, n = scores.shape
    k = out.shape[1]
    values = np.empty(k, scores.dtype)
    places = np.empty(k, np.int64)
    for t in range(rows):
        held = 0
        for i in range(n):
            s = scores[t, i]
            if not s > -np.inf:
                continue
            if held < k:
                values[held], places[held] = s, i
                held += 1
                if held == k:
                    for start in range(k // 2 - 1, -1, -1):
                        _sift(values, places, k, start)
            elif s > values[0]:
                values[0], places[0] = s, i
                _sift(values, places, k, 0)
        out[t, :held] = np.sort(places[:held])
        out[t, held:] = -1


_NO_APE = {np.dtype(kind): np.empty((0, 0), kind) for kind in (np.float32, np.float64)}


def pool_entries(rows: Tensor, tokens: Tensor, ape: Tensor | None, overlap: bool) -> Tensor:
    """`reference.pool_entries`."""
    if tokens.numel() * rows.shape[1] > FEW or tokens.numel() == 0:
        return decode.pool_entries(rows, tokens, ape, overlap)
    r = dense(rows)
    out = np.empty((tokens.shape[0], r.shape[1] // (4 if overlap else 2)), r.dtype)
    _pool(r, dense(tokens), _NO_APE[r.dtype] if ape is None else array(ape), overlap, out)
    return tensor(out)


def select_top_k(scores: Tensor, top_k: int) -> Tensor:
    """`reference.select_top_k`."""
    rows, n = scores.shape
    if not 0 < scores.numel() <= FEW:
        return decode.select_top_k(scores, top_k)
    out = np.empty((rows, min(top_k, n)), np.int64)
    _best(dense(scores), out)
    return tensor(out)
