"""RMSNorm and rotary embedding, one pass over the rows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.compiled.kernel import dense, kernel
from headrace.ops.cpu.decode import norm as decode
from headrace.ops.cpu.decode.arrays import FEW, Array, array, tensor


@kernel
def inverse_rms(row: Array, eps: float) -> float:
    """rsqrt(mean(row^2) + eps), summed in fp64, then rounded as the reference does."""
    number = row.dtype.type
    total = 0.0
    for d in range(row.size):
        total += row[d] * row[d]
    return number(1) / np.sqrt(number(number(total / row.size) + number(eps)))


@kernel
def norm_row(row: Array, weight: Array, eps: float, out: Array) -> None:
    """RMSNorm of one row; an empty weight counts as ones."""
    inverse = inverse_rms(row, eps)
    if weight.size:
        for d in range(row.size):
            out[d] = row[d] * inverse * weight[d]
    else:
        for d in range(row.size):
            out[d] = row[d] * inverse


@kernel
def _norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """RMSNorm of the rows of x [n, width]."""
    for t in range(x.shape[0]):
        norm_row(x[t], weight, eps, out[t])


@kernel
def _turn(x: Array, turn: Array, sign: int) -> None:
    """Rotate the last pairs of x [T, n, d] in place by turn [T, R, 2]; sign -1 turns back."""
    # An integer times an fp32 number would be fp64.
    factor = turn.dtype.type(sign)
    pairs = turn.shape[1]
    first = x.shape[2] - 2 * pairs
    for t in range(x.shape[0]):
        for row in x[t]:
            for r in range(pairs):
                even, odd = row[first + 2 * r], row[first + 2 * r + 1]
                c, s = turn[t, r, 0], factor * turn[t, r, 1]
                row[first + 2 * r] = even * c - odd * s
                row[first + 2 * r + 1] = even * s + odd * c


_NO_WEIGHT = {np.dtype(kind): np.empty(0, kind) for kind in (np.float32, np.float64)}


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Array:
    v = dense(x)
    out = np.empty_like(v)
    width = v.shape[-1]
    if weight is None:
        w = _NO_WEIGHT[v.dtype]
    else:
        w = array(weight if weight.dtype == x.dtype else weight.to(x.dtype))
    _norm(v.reshape(-1, width), w, eps, out.reshape(-1, width))
    return out


def _turned(v: Array, turn: Tensor, inverse: bool) -> Tensor:
    _turn(v.reshape(v.shape[0], -1, v.shape[-1]), dense(turn), -1 if inverse else 1)
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
