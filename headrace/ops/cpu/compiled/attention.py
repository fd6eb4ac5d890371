"""Sparse attention: logits and weighted sums in two kernels, the exponentials between them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.compiled.kernel import dense, product_kernel
from headrace.ops.cpu.decode import attention as decode
from headrace.ops.cpu.decode import quant
from headrace.ops.cpu.decode.arrays import Array, array, tensor
from headrace.ops.records import RecordView

# Multiplications of the logits above which torch's products over gathered keys are faster.
_MOST = 1 << 22


@product_kernel
def _dots(q: Array, key: Array, scale: float, out: Array, place: int) -> None:
    """out[h, place] = q[h] . key * scale."""
    for h in range(q.shape[0]):
        total = q.dtype.type(0)
        for d in range(key.shape[0]):
            total += q[h, d] * key[d]
        out[h, place] = total * scale


@product_kernel
def _logits(
    q: Array,
    window: Array,
    near: Array,
    entries: Array,
    far: Array,
    sink: Array,
    scale: float,
    out: Array,
) -> None:
    """out [T, H, W + K + 1]: logits minus their maximum, -inf for absent keys, the sink last."""
    rows, heads, count = out.shape
    for t in range(rows):
        for k in range(near.shape[1]):
            if near[t, k] < 0:
                out[t, :, k] = -np.inf
            else:
                _dots(q[t], window[near[t, k]], scale, out[t], k)
        for k in range(far.shape[1]):
            if far[t, k] < 0:
                out[t, :, near.shape[1] + k] = -np.inf
            else:
                _dots(q[t], entries[t, k], scale, out[t], near.shape[1] + k)
        for h in range(heads):
            row = out[t, h]
            row[count - 1] = sink[h]
            top = row[0]
            for k in range(1, count):
                top = max(top, row[k])
            for k in range(count):
                row[k] -= top


@product_kernel
def _sums(p: Array, window: Array, near: Array, entries: Array, far: Array, out: Array) -> None:
    """out [T, H, d] = sum of keys weighted by p, divided by the sum of p (the sink's included)."""
    rows, heads, count = p.shape
    for t in range(rows):
        for h in range(heads):
            total = p[t, h, count - 1]
            row = out[t, h]
            row[:] = 0
            for k in range(near.shape[1]):
                if near[t, k] >= 0:
                    weight = p[t, h, k]
                    total += weight
                    key = window[near[t, k]]
                    for d in range(row.shape[0]):
                        row[d] += weight * key[d]
            for k in range(far.shape[1]):
                if far[t, k] >= 0:
                    weight = p[t, h, near.shape[1] + k]
                    total += weight
                    key = entries[t, k]
                    for d in range(row.shape[0]):
                        row[d] += weight * key[d]
            for d in range(row.shape[0]):
                row[d] /= total


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
    """`reference.sparse_attention`."""
    near, far = dense(window_index), dense(major)
    rows, heads, width = q.shape
    count = near.shape[1] + far.shape[1]
    if rows * heads * count * width > _MOST:
        return decode.sparse_attention(q, window, window_index, entries, major, minor, sink, scale)
    queries, keys = dense(q), dense(window)
    if entries is None or far.shape[1] == 0:
        read = np.empty((rows, 0, width), queries.dtype)
        far = far[:, :0]
    else:
        # -1 reads the last row, which no kernel looks at.
        read = array(quant.read_records(entries, major, minor, q.dtype))
    logits = np.empty((rows, heads, count + 1), queries.dtype)
    number = queries.dtype.type(scale)
    _logits(queries, keys, near, read, far, array(sink), number, logits)
    np.exp(logits, out=logits)
    out = np.empty_like(queries)
    _sums(logits, keys, near, read, far, out)
    return tensor(out)
