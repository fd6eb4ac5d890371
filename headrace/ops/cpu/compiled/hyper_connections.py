"""Hyper-connections: projection by BLAS, everything else of a sublayer's entry in one kernel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.ops.cpu.compiled.kernel import dense, kernel
from headrace.ops.cpu.compiled.norm import inverse_rms, norm_row
from headrace.ops.cpu.decode import hyper_connections as decode
from headrace.ops.cpu.decode.arrays import FEW, LARGE_PRODUCT, Array, array, tensor


@kernel
def _scale_rows(m: Array, flat: Array, scales: Array, base: Array, eps: float) -> None:
    """m [n, T] = m * rsqrt(mean(v^2) + eps) * scales + base; flat [T, hc * D] holds v."""
    for t in range(flat.shape[0]):
        inverse = inverse_rms(flat[t], eps)
        for n in range(m.shape[0]):
            m[n, t] = m[n, t] * inverse * scales[n] + base[n]


@kernel
def _normalise(c: Array, total: Array, eps: float, columns: bool) -> None:
    """c [hc, hc, T] divided by its row or column sums plus eps; T is innermost, for vectors."""
    hc, _, rows = c.shape
    for i in range(hc):
        total[:] = 0
        for j in range(hc):
            part = c[j, i] if columns else c[i, j]
            for t in range(rows):
                total[t] += part[t]
        for t in range(rows):
            total[t] += eps
        for j in range(hc):
            part = c[j, i] if columns else c[i, j]
            for t in range(rows):
                part[t] /= total[t]


@kernel
def _sinkhorn(c: Array, total: Array, eps: float, iterations: int) -> None:
    """`reference.sinkhorn` of logits c [hc, hc, T], in place."""
    hc, _, rows = c.shape
    for i in range(hc):
        total[:] = c[i, 0]
        for j in range(1, hc):
            for t in range(rows):
                total[t] = max(total[t], c[i, j, t])
        for j in range(hc):
            for t in range(rows):
                c[i, j, t] = np.exp(c[i, j, t] - total[t])
        total[:] = 0
        for j in range(hc):
            for t in range(rows):
                total[t] += c[i, j, t]
        for j in range(hc):
            for t in range(rows):
                c[i, j, t] = c[i, j, t] / total[t] + eps
    _normalise(c, total, eps, True)
    for _ in range(iterations - 1):
        _normalise(c, total, eps, False)
        _normalise(c, total, eps, True)


@kernel
def _gates(m: Array, factor: float, eps: float, out: Array) -> None:
    """out [T, n] = factor * sigmoid(m [n, T]) + eps; numbers of m's dtype."""
    one = m.dtype.type(1)
    for n in range(m.shape[0]):
        for t in range(m.shape[1]):
            out[t, n] = factor * (one / (one + np.exp(-m[n, t]))) + eps


@kernel
def _collapse(v: Array, pre: Array, out: Array) -> None:
    """out [T, D] = sum_j pre[j] * v[j]."""
    rows, copies, width = v.shape
    for t in range(rows):
        for d in range(width):
            out[t, d] = pre[t, 0] * v[t, 0, d]
        for j in range(1, copies):
            for d in range(width):
                out[t, d] += pre[t, j] * v[t, j, d]


@kernel
def _merge(y: Array, v: Array, post: Array, comb: Array, out: Array) -> None:
    rows, copies, width = v.shape
    for t in range(rows):
        for k in range(copies):
            for d in range(width):
                out[t, k, d] = comb[t, 0, k] * v[t, 0, d]
            for j in range(1, copies):
                weight = comb[t, j, k]
                for d in range(width):
                    out[t, k, d] += weight * v[t, j, d]
            for d in range(width):
                out[t, k, d] += post[t, k] * y[t, d]


@kernel
def _enter(
    m: Array,
    v: Array,
    given: Array,
    scales: Array,
    base: Array,
    norm: Array,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
    x: Array,
    own: Array,
    post: Array,
    comb: Array,
) -> None:
    """All of `reference.hc_enter` behind the projection m [n, T]; `given` is pre or `own`."""
    rows, hc, width = v.shape
    _scale_rows(m, v.reshape(rows, hc * width), scales, base, rms_eps)
    number = m.dtype.type
    _gates(m[:hc], number(1), hc_eps, own)
    _gates(m[hc : 2 * hc], number(2), number(0), post)
    c = m[2 * hc :].reshape(hc, hc, rows)
    _sinkhorn(c, np.empty(rows, m.dtype), hc_eps, iterations)
    for t in range(rows):
        for i in range(hc):
            for j in range(hc):
                comb[t, i, j] = c[i, j, t]
    _collapse(v, given, x)
    for t in range(rows):
        norm_row(x[t], norm, rms_eps, x[t])


def _project(v: Array, fn: Tensor) -> Array:
    """fn [n, hc * D] @ v^T -> [n, T]."""
    flat, weight = v.reshape(v.shape[0], -1), array(fn)
    if flat.shape[0] * weight.size <= LARGE_PRODUCT:
        found: Array = weight.dot(flat.T)
        return found
    return torch.mm(fn, torch.from_numpy(flat).T).numpy()


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
    if not 0 < streams.numel() <= FEW:
        return decode.hc_enter(
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
    v = dense(streams)
    rows, hc, width = v.shape
    x, own = np.empty((rows, width), v.dtype), np.empty((rows, hc), v.dtype)
    post, comb = np.empty_like(own), np.empty((rows, hc, hc), v.dtype)
    _enter(
        _project(v, fn),
        v,
        own if pre is None else dense(pre),
        array(scales),
        array(base),
        array(norm),
        rms_eps,
        v.dtype.type(hc_eps),
        iterations,
        x,
        own,
        post,
        comb,
    )
    return tensor(x), tensor(own), tensor(post), tensor(comb)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float
) -> Tensor:
    """`reference.hc_head`."""
    if not 0 < streams.numel() <= FEW or scale.numel() not in (1, fn.shape[0]):
        return decode.hc_head(streams, fn, base, scale, rms_eps, hc_eps)
    v = dense(streams)
    m = _project(v, fn)
    flat = v.reshape(v.shape[0], -1)
    _scale_rows(m, flat, np.broadcast_to(array(scale), len(m)).copy(), array(base), rms_eps)
    pre = np.empty((v.shape[0], len(m)), v.dtype)
    _gates(m, v.dtype.type(1), v.dtype.type(hc_eps), pre)
    return tensor(pre)


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """`reference.hc_collapse`."""
    if not 0 < streams.numel() <= FEW:
        return decode.hc_collapse(streams, pre)
    v = dense(streams)
    out = np.empty((v.shape[0], v.shape[2]), v.dtype)
    _collapse(v, dense(pre), out)
    return tensor(out)


def hc_merge(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`reference.hc_merge`."""
    if not 0 < streams.numel() <= FEW:
        return decode.hc_merge(y, streams, post, comb)
    v = dense(streams)
    out = np.empty_like(v)
    _merge(dense(y), v, dense(post), dense(comb), out)
    return tensor(out)
