"""RMSNorm and rotary embedding, one pass over the rows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.compiled import kernels
from headrace.ops.cpu.compiled.kernel import dense
from headrace.ops.cpu.decode import norm as decode
from headrace.ops.cpu.decode.arrays import FEW, Array, array, tensor

_NO_WEIGHT = {np.dtype(kind): np.empty(0, kind) for kind in (np.float32, np.float64)}


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Array:
    v = dense(x)
    out = np.empty_like(v)
    width = v.shape[-1]
    if weight is None:
        w = _NO_WEIGHT[v.dtype]
    else:
        w = array(weight if weight.dtype == x.dtype else weight.to(x.dtype))
    kernels.norm(v.reshape(-1, width), w, eps, out.reshape(-1, width))
    return out


def _turned(v: Array, turn: Tensor, inverse: bool) -> Tensor:
    kernels.turn(v.reshape(v.shape[0], -1, v.shape[-1]), dense(turn), -1 if inverse else 1)
    return tensor(v)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`reference.rms_norm`."""
    if not 0 < x.numel() <= FEW:
        return decode.rms_norm(x, weight, eps)
    return tensor(_normed(x, weight, eps))


def rope(x: Tensor, turn: Tensor, inverse: bool = False) -> Tensor:
    """`reference.rope`."""
    if not 0 < x.numel() <= FEW:
        return decode.rope(x, turn, inverse)
    return _turned(array(x).copy(), turn, inverse)


def norm_rope(x: Tensor, weight: Tensor | None, eps: float, turn: Tensor) -> Tensor:
    """`reference.norm_rope`."""
    if not 0 < x.numel() <= FEW:
        return decode.norm_rope(x, weight, eps, turn)
    return _turned(_normed(x, weight, eps), turn, False)
