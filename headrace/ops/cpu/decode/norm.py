"""RMSNorm, rotary embedding, linear layers and Hadamard rotation of few rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from headrace.ops.cpu.decode.arrays import FEW, LARGE_PRODUCT, Array, Kept, array, normed, tensor
from headrace.ops.reference import norm as reference

_KEPT = "_headrace_turn"


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`reference.rms_norm`."""
    if x.numel() > FEW:
        return reference.rms_norm(x, weight, eps)
    return tensor(normed(array(x), weight, eps))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`reference.linear`."""
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    if x.ndim == 2 and x.shape[0] * weight.numel() <= LARGE_PRODUCT:
        return tensor(array(x).dot(array(weight).T))
    return torch.nn.functional.linear(x, weight)


def _complex_turn(turn: Tensor, ndim: int) -> Array:
    """turn [T, R, 2] as complex numbers [T, 1.., R] for operands of `ndim` axes; kept on `turn`."""
    kept: Kept | None = getattr(turn, _KEPT, None)
    if kept is None:
        kept = Kept()
        kept.value = {}
        setattr(turn, _KEPT, kept)
    by_axes: dict[int, Array] = kept.value
    if ndim not in by_axes:
        rows, pairs, _ = turn.shape
        a = array(turn)
        kind = np.complex64 if a.dtype == np.float32 else np.complex128
        by_axes[ndim] = a.view(kind).reshape(rows, *(1,) * (ndim - 2), pairs)
    return by_axes[ndim]


def _turned(v: Array, turn: Tensor, inverse: bool) -> Tensor:
    """v [T, .., d], contiguous, rotated in place: pairs of numbers are complex numbers."""
    angle = _complex_turn(turn, v.ndim)
    tail = v[..., v.shape[-1] - 2 * angle.shape[-1] :].view(angle.dtype)
    tail *= angle.conj() if inverse else angle
    return tensor(v)


def rope(x: Tensor, turn: Tensor, inverse: bool = False) -> Tensor:
    """`reference.rope`."""
    if x.numel() > FEW:
        return reference.rope(x, turn, inverse)
    return _turned(array(x).copy(), turn, inverse)


def norm_rope(x: Tensor, weight: Tensor | None, eps: float, turn: Tensor) -> Tensor:
    """`reference.norm_rope`."""
    if x.numel() > FEW:
        return reference.norm_rope(x, weight, eps, turn)
    return _turned(normed(array(x), weight, eps), turn, False)


@cache
def _hadamard_matrix(n: int, dtype: torch.dtype) -> Tensor:
    numbers = np.arange(n)
    bits = np.array([int(b).bit_count() for b in (numbers[:, None] & numbers).reshape(-1)])
    return torch.from_numpy(1.0 - 2.0 * (bits % 2)).view(n, n).mul(n**-0.5).to(dtype)


def hadamard(x: Tensor) -> Tensor:
    """`reference.hadamard`, as one matrix product: the matrix is symmetric."""
    return torch.nn.functional.linear(x, _hadamard_matrix(x.shape[-1], x.dtype))
