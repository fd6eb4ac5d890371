"""Reference hyper-connections (mHC): the mixing coefficients, the collapse and the merge.

`streams` are hc copies of the residual stream, [T, hc, D]. Coefficients are fp32 (fp64 in the
fp64 mode) and stay so; collapse and merge compute in fp32 and return the stream's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.ops.reference.norm import rms_norm, wide


def hc_project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """m = (fn @ v) * rsqrt(mean(v^2) + eps), v = streams flattened copy-major; -> [T, fn rows]."""
    v = wide(streams.flatten(-2))
    return (v @ fn.to(v.dtype).T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Rows softmax + eps, then alternate column and row normalisation; logits [T, hc, hc].

    `iterations` counts the column normalisations.
    """
    c = torch.softmax(logits, dim=-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def hc_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one sublayer: pre [T, hc], post [T, hc], comb [T, hc, hc].

    fn [(2 + hc) * hc, hc * D], base [(2 + hc) * hc], scale [3]; order pre, post, comb row-major.
    """
    projected = hc_project(streams, fn, rms_eps)
    hc = streams.shape[-2]
    return coefficients(projected, base, row_scales(scale, hc), hc, hc_eps, iterations)


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
    """Input x [T, D] of a sublayer and its coefficients (pre, post, comb), see `hc_mix`.

    scales [(2 + hc) * hc]: see `row_scales`. x = RMSNorm of the streams collapsed with `pre`
    [T, hc], None: with the pre of this sublayer.
    """
    projected = hc_project(streams, fn, rms_eps)
    own, post, comb = coefficients(projected, base, scales, streams.shape[-2], hc_eps, iterations)
    x = hc_collapse(streams, own if pre is None else pre)
    return rms_norm(x, norm, rms_eps), own, post, comb


def row_scales(scale: Tensor, hc: int) -> Tensor:
    """scale [3] of pre, post and comb as one number per row of fn, [(2 + hc) * hc]."""
    return scale.repeat_interleave(torch.tensor((hc, hc, hc * hc), device=scale.device))


def coefficients(
    m: Tensor, base: Tensor, scales: Tensor, hc: int, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre, post, comb) from the projections m [T, (2 + hc) * hc]; scales: see `row_scales`."""
    b, s = base.to(m.dtype), scales.to(m.dtype)
    pre = torch.sigmoid(m[:, :hc] * s[:hc] + b[:hc]) + eps
    post = 2.0 * torch.sigmoid(m[:, hc : 2 * hc] * s[hc : 2 * hc] + b[hc : 2 * hc])
    comb = (m[:, 2 * hc :] * s[2 * hc :] + b[2 * hc :]).unflatten(-1, (hc, hc))
    return pre, post, sinkhorn(comb, iterations, eps)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float
) -> Tensor:
    """V4's collapse weights before the final norm: sigmoid(m * scale + base) + eps, [T, hc]."""
    m = hc_project(streams, fn, rms_eps)
    return torch.sigmoid(m * scale.to(m.dtype) + base.to(m.dtype)) + hc_eps


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_j pre[j] * streams[j] -> [T, D]."""
    return (wide(streams) * pre.unsqueeze(-1)).sum(-2).to(streams.dtype)


def hc_merge(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams'[k] = post[k] * y + sum_j comb[j, k] * streams[j]: comb is applied transposed."""
    mixed = (comb.unsqueeze(-1) * wide(streams).unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * wide(y).unsqueeze(-2) + mixed).to(streams.dtype)
