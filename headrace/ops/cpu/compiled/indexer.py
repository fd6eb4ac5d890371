"""Compressor pooling and selection of the best entries."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.compiled import kernels
from headrace.ops.cpu.compiled.kernel import dense
from headrace.ops.cpu.decode import indexer as decode
from headrace.ops.cpu.decode.arrays import FEW, array, tensor

_NO_APE = {np.dtype(kind): np.empty((0, 0), kind) for kind in (np.float32, np.float64)}


def pool_entries(rows: Tensor, tokens: Tensor, ape: Tensor | None, overlap: bool) -> Tensor:
    """`reference.pool_entries`."""
    if tokens.numel() * rows.shape[1] > FEW or tokens.numel() == 0:
        return decode.pool_entries(rows, tokens, ape, overlap)
    r = dense(rows)
    out = np.empty((tokens.shape[0], r.shape[1] // (4 if overlap else 2)), r.dtype)
    kernels.pool(r, dense(tokens), _NO_APE[r.dtype] if ape is None else array(ape), overlap, out)
    return tensor(out)


def select_top_k(scores: Tensor, top_k: int) -> Tensor:
    """`reference.select_top_k`."""
    rows, n = scores.shape
    if not 0 < scores.numel() <= FEW or top_k < 1:
        return decode.select_top_k(scores, top_k)
    out = np.empty((rows, min(top_k, n)), np.int64)
    kernels.best(dense(scores), out)
    return tensor(out)
