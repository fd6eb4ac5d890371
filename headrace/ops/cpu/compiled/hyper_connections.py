"""Hyper-connections: projection by BLAS, everything else of a sublayer's entry in one kernel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.ops.cpu.compiled import kernels
from headrace.ops.cpu.compiled.kernel import dense
from headrace.ops.cpu.decode import hyper_connections as decode
from headrace.ops.cpu.decode.arrays import FEW, LARGE_PRODUCT, Array, array, tensor


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
    kernels.enter(
        _project(v, fn),
        v,
        own if pre is None else dense(pre),
        array(scales),
        array(base),
        array(norm if norm.dtype == streams.dtype else norm.to(streams.dtype)),
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
    kernels.scale_rows(m, flat, np.broadcast_to(array(scale), len(m)).copy(), array(base), rms_eps)
    pre = np.empty((v.shape[0], len(m)), v.dtype)
    kernels.gates(m, v.dtype.type(1), v.dtype.type(hc_eps), pre)
    return tensor(pre)


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """`reference.hc_collapse`."""
    if not 0 < streams.numel() <= FEW:
        return decode.hc_collapse(streams, pre)
    v = dense(streams)
    out = np.empty((v.shape[0], v.shape[2]), v.dtype)
    kernels.collapse(v, dense(pre), out)
    return tensor(out)


def hc_merge(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`reference.hc_merge`."""
    if not 0 < streams.numel() <= FEW:
        return decode.hc_merge(y, streams, post, comb)
    v = dense(streams)
    out = np.empty_like(v)
    kernels.merge(dense(y), v, dense(post), dense(comb), out)
    return tensor(out)
