"""Tensors as NumPy arrays and back, without copies, and the sizes up to which that pays off.

`array` and `tensor` keep the array on the tensor: weights, cache views, indices of a step and what
one operator hands to the next are converted once. Called by the other modules of this package,
which take fp32 and fp64 only: NumPy has no bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

# Most numbers of an operand for which the NumPy path is taken. torch splits element-wise work over
# threads from 32,768 numbers on; with one thread both cost the same there.
FEW = 1 << 16

# Multiplications of a matrix product above which NumPy's BLAS takes threads of its own.
LARGE_PRODUCT = 1 << 18

_KEPT = "_headrace_array"


class Kept:
    """Something derived from a tensor's memory, as an attribute of the tensor.

    A copy of the tensor has memory of its own, so that copies of this are None.
    """

    __slots__ = ("value",)
    value: Any

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def array(t: Tensor) -> Array:
    """The array over the memory of `t`, made once per tensor: `Tensor.numpy` costs four calls."""
    kept: Kept | None = getattr(t, _KEPT, None)
    if kept is None:
        kept = Kept()
        kept.value = t.numpy()
        setattr(t, _KEPT, kept)
    found: Array = kept.value
    return found


def tensor(a: Array) -> Tensor:
    """The tensor over the memory of `a`."""
    t = torch.from_numpy(a)
    kept = Kept()
    kept.value = a
    setattr(t, _KEPT, kept)
    return t


def as_dtype(a: Array, dtype: torch.dtype) -> Tensor:
    """Tensor over the memory of `a`, converted where its dtype is another one."""
    t = tensor(a)
    return t if t.dtype == dtype else t.to(dtype)


def _squares(v: Array) -> Array:
    return np.einsum("...i,...i->...", v, v)


def _squares_by_vecdot(v: Array) -> Array:
    return np.vecdot(v, v)


# sum(v^2) over the last axis; vecdot came with NumPy 2 and is twice as fast.
sum_of_squares = _squares_by_vecdot if hasattr(np, "vecdot") else _squares


def inverse_rms(v: Array, eps: float) -> Array:
    """1 / sqrt(mean(v^2) + eps) over the last axis, which stays as one of size 1."""
    n = v.shape[-1]
    s: Array = sum_of_squares(v)[..., None]
    s += n * eps
    np.sqrt(s, out=s)
    return np.divide(n**0.5, s, out=s)


def normed(v: Array, weight: Tensor | None, eps: float) -> Array:
    """RMSNorm over the last axis, a new contiguous array."""
    y = np.empty(v.shape, v.dtype)
    np.multiply(v, inverse_rms(v, eps), out=y)
    if weight is not None:
        y *= array(weight if weight.dtype != torch.bfloat16 else weight.float())
    return y


def double_sigmoid(x: Array) -> Array:
    """2 * sigmoid(x) = 1 + tanh(x / 2), which cannot overflow."""
    s = x * 0.5
    np.tanh(s, out=s)
    s += 1.0
    return s


def product(x: Array, weight: Array, out: Array | None = None) -> Array:
    """x [n, K] @ weight [N, K]^T; a large product is left to torch, whose threads are ours."""
    if x.shape[0] * weight.size <= LARGE_PRODUCT:
        return x.dot(weight.T, out)
    if out is None:
        out = np.empty((x.shape[0], weight.shape[0]), x.dtype)
    torch.mm(torch.from_numpy(x), torch.from_numpy(weight).T, out=torch.from_numpy(out))
    return out
