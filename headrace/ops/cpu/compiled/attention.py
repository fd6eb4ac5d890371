"""Sparse attention: logits and weighted sums in two kernels, the exponentials between them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.compiled import kernels
from headrace.ops.cpu.compiled.kernel import dense
from headrace.ops.cpu.decode import attention as decode
from headrace.ops.cpu.decode import quant
from headrace.ops.cpu.decode.arrays import array, tensor
from headrace.ops.records import RecordView

# Multiplications of the logits above which torch's products over gathered keys are faster.
_MOST = 1 << 22


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
    kernels.logits(queries, keys, near, read, far, array(sink), number, logits)
    np.exp(logits, out=logits)
    out = np.empty_like(queries)
    kernels.sums(logits, keys, near, read, far, out)
    return tensor(out)
