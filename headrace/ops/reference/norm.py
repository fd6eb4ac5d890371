"""Reference RMSNorm, rotary embedding, linear layers and Hadamard rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.ops.stored_weights import Weight, dense


def wide(x: Tensor) -> Tensor:
    """x in the dtype of the steps that the released path computes in fp32 (fp64 stays fp64)."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dim, in fp32, result in x's dtype."""
    v = wide(x)
    y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., K] @ weight [N, K]^T -> [..., N] in x's dtype."""
    return x @ dense(weight, x.dtype).T


def rope(x: Tensor, turn: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2*R dims of x [T, ..., d] as interleaved pairs by (cos, sin) turn [T, R, 2].

    fp32 arithmetic, result in x's dtype; `inverse` rotates back.
    """
    rows, pairs_count, _ = turn.shape
    dims = 2 * pairs_count
    c, s = turn.view(rows, *(1,) * (x.ndim - 2), pairs_count, 2).unbind(-1)
    s = -s if inverse else s
    pairs = wide(x[..., -dims:]).unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)
    return torch.cat((x[..., :-dims], rotated.to(x.dtype)), dim=-1)


def norm_rope(x: Tensor, weight: Tensor | None, eps: float, turn: Tensor) -> Tensor:
    """`rope` of `rms_norm`, rounded to x's dtype between them."""
    return rope(rms_norm(x, weight, eps), turn)


def hadamard(x: Tensor) -> Tensor:
    """x [..., n] times H, H[i][j] = (-1)^popcount(i & j) * n^-0.5 (natural order), n a power of 2.

    fp32 arithmetic, result in x's dtype (V4 index queries and keys).
    """
    n = x.shape[-1]
    v = wide(x)
    span = 1
    while span < n:
        pairs = v.unflatten(-1, (n // (2 * span), 2, span))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        span *= 2
    return (v * n**-0.5).to(x.dtype)
