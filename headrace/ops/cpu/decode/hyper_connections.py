"""Hyper-connections of few rows: the Sinkhorn iterations are two calls per normalisation.

The 16 coefficients of a row lie in a column of [hc * hc + 1, T], above a one. A constant matrix
times that column gives, at every coefficient's place, the sum of its row (or column) plus eps.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from headrace.ops.cpu.decode.arrays import (
    FEW,
    LARGE_PRODUCT,
    Array,
    array,
    double_sigmoid,
    inverse_rms,
    normed,
    tensor,
)
from headrace.ops.reference import hyper_connections as reference

# Rows up to which a small product per row costs less than one batched call of torch.
_ROW_BY_ROW = 4


@cache
def _sum_matrices(hc: int, eps: float, dtype: str) -> tuple[Array, Array, Array]:
    """Row sums [hc * hc, hc * hc], and row sums and column sums with eps in one more column."""
    same, any_ = np.eye(hc), np.ones((hc, hc))
    rows, columns = np.kron(same, any_), np.kron(any_, same)
    added = np.full((hc * hc, 1), eps)
    return (
        rows.astype(dtype),
        np.hstack((rows, added)).astype(dtype),
        np.hstack((columns, added)).astype(dtype),
    )


def sinkhorn(logits: Array, hc: int, iterations: int, eps: float) -> Array:
    """`reference.sinkhorn` of logits [hc * hc, T], row-major -> [hc * hc, T]."""
    plain_rows, rows, columns = _sum_matrices(hc, eps, logits.dtype.str)
    c = np.empty((hc * hc + 1, logits.shape[1]), logits.dtype)
    c[-1] = 1.0
    body, total = c[:-1], np.empty_like(logits)
    # Bound methods: np.dot looks for overriding types first.
    sum_rows, sum_columns, divide = rows.dot, columns.dot, np.divide
    square = logits.reshape(hc, hc, -1)
    np.subtract(square, np.maximum.reduce(square, axis=1, keepdims=True), square)
    np.exp(logits, body)
    plain_rows.dot(body, total)
    divide(body, total, body)
    np.add(body, eps, body)
    sum_columns(c, total)
    divide(body, total, body)
    for _ in range(iterations - 1):
        sum_rows(c, total)
        divide(body, total, body)
        sum_columns(c, total)
        divide(body, total, body)
    return body


def _project(v: Array, fn: Tensor, base: Tensor, scale: Tensor, eps: float) -> Array:
    """`reference.hc_project` times scale plus base, transposed: [fn rows, T]; v [T, hc * D]."""
    weight = array(fn)
    if v.shape[0] * weight.size <= LARGE_PRODUCT:
        m: Array = weight.dot(v.T)
    else:
        m = torch.mm(fn, torch.from_numpy(v).T).numpy()
    m *= inverse_rms(v, eps).T
    m *= array(scale)[:, None]
    m += array(base)[:, None]
    return m


def _rows(a: Array) -> Array:
    """[n, T] -> [T, n], row by row in memory: products with strided operands are slow."""
    return np.ascontiguousarray(a.T)


def hc_enter(
    streams: Tensor,
    pre: Tensor | None,
    fn: Tensor,
    base: Tensor,
    scales: Tensor,
    norm: Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.hc_enter`."""
    if streams.numel() > FEW:
        return reference.hc_enter(
            streams,
            pre,
            fn,
            base,
            scales,
            norm,
            rms_eps=rms_eps,
            hc_eps=hc_eps,
            iterations=iterations,
        )
    v = array(streams)
    rows, hc, width = v.shape
    m = _project(v.reshape(rows, hc * width), fn, base, scales, rms_eps)
    gates = double_sigmoid(m[: 2 * hc])
    own, post = _rows(gates[:hc]), _rows(gates[hc:])
    own *= 0.5
    own += hc_eps
    comb = _rows(sinkhorn(m[2 * hc :], hc, iterations, hc_eps)).reshape(rows, hc, hc)
    collapsed = np.matmul((own if pre is None else array(pre))[:, None, :], v)[:, 0]
    return tensor(normed(collapsed, norm, rms_eps)), tensor(own), tensor(post), tensor(comb)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float
) -> Tensor:
    """`reference.hc_head`."""
    if streams.numel() > FEW:
        return reference.hc_head(streams, fn, base, scale, rms_eps, hc_eps)
    v = array(streams)
    gates = double_sigmoid(_project(v.reshape(v.shape[0], fn.shape[1]), fn, base, scale, rms_eps))
    pre = _rows(gates)
    pre *= 0.5
    pre += hc_eps
    return tensor(pre)


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """`reference.hc_collapse`."""
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1)


def hc_merge(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`reference.hc_merge`."""
    if streams.shape[0] > _ROW_BY_ROW:
        added = post.unsqueeze(-1) * y.unsqueeze(-2)
        return torch.baddbmm(added, comb.transpose(1, 2), streams)
    merged = np.matmul(array(comb).swapaxes(1, 2), array(streams))
    merged += array(post)[:, :, None] * array(y)[:, None]
    return tensor(merged)
