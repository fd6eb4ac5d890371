"""Router and experts of few rows: the products of each pair of row and expert one by one."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.compiled.kernel import dense, kernel, product_kernel
from headrace.ops.cpu.decode import moe as decode
from headrace.ops.cpu.decode import quant
from headrace.ops.cpu.decode.arrays import Array, array, product, tensor

_ROUTER_EPS = 1e-20
# Rows up to which the router is one kernel: vectorised exponentials win above.
_MOST_ROWS = 64
# Pairs of row and expert up to which products row by row beat BLAS calls per expert; more of them
# where the weights of an expert stay in the cache of a core.
_FEW_PAIRS = 8
_SOME_PAIRS = 128
_CACHED_BYTES = 1 << 17


@kernel
def _scores(logits: Array) -> None:
    """sqrt(softplus(x)), in place."""
    flat = logits.reshape(-1)
    for i in range(flat.size):
        x = flat[i]
        flat[i] = np.sqrt(x if x > 20 else np.log1p(np.exp(x)))


@kernel
def _route(scores: Array, bias: Array, experts: Array) -> None:
    """The best experts of each row by scores + bias, ties to the lowest expert."""
    rows, count = scores.shape
    taken = np.empty(count, np.bool_)
    for t in range(rows):
        taken[:] = False
        for k in range(experts.shape[1]):
            best = -1
            for e in range(count):
                if not taken[e] and (
                    best < 0 or scores[t, e] + bias[e] > scores[t, best] + bias[best]
                ):
                    best = e
            taken[best] = True
            experts[t, k] = best


@kernel
def _weigh(scores: Array, experts: Array, normalise: bool, scaling: float, out: Array) -> None:
    for t in range(experts.shape[0]):
        total = out.dtype.type(0)
        for k in range(experts.shape[1]):
            out[t, k] = scores[t, experts[t, k]]
            total += out[t, k]
        total += out.dtype.type(_ROUTER_EPS)
        for k in range(experts.shape[1]):
            out[t, k] = (out[t, k] / total if normalise else out[t, k]) * scaling


@kernel
def _activate(both: Array, weights: Array, limit: float, out: Array) -> None:
    """out [n, I] = SwiGLU of gate | up [n, 2I], times weights [n]."""
    inner, one = out.shape[1], out.dtype.type(1)
    for n in range(out.shape[0]):
        for i in range(inner):
            gate = min(both[n, i], limit)
            up = max(min(both[n, inner + i], limit), -limit)
            out[n, i] = gate / (one + np.exp(-gate)) * up * weights[n]


@product_kernel
def _times(weight: Array, x: Array, out: Array) -> None:
    """out = weight @ x."""
    for n in range(weight.shape[0]):
        total = out.dtype.type(0)
        for d in range(x.shape[0]):
            total += weight[n, d] * x[d]
        out[n] = total


@product_kernel
def _products(x: Array, experts: Array, w: Array, shared: Array, out: Array) -> None:
    """out [T * k + T, n]: w[e] @ x of each pair of row and expert, then shared @ x of each row.

    x [T, D] holds the inputs, or [T * k + T, D] one for each of those products.
    """
    rows, k = experts.shape
    each = x.shape[0] != rows
    for t in range(rows):
        for j in range(k):
            pair = t * k + j
            if experts[t, j] >= 0:
                _times(w[experts[t, j]], x[pair if each else t], out[pair])
            else:
                out[pair] = 0
        pair = rows * k + t
        _times(shared, x[pair if each else t], out[pair])


@kernel
def _add_up(parts: Array, k: int, out: Array) -> None:
    """out [T, D]: the k parts of each row in order, then its shared one."""
    rows = out.shape[0]
    for t in range(rows):
        for d in range(out.shape[1]):
            out[t, d] = parts[t * k, d]
        for j in range(1, k):
            for d in range(out.shape[1]):
                out[t, d] += parts[t * k + j, d]
        for d in range(out.shape[1]):
            out[t, d] += parts[rows * k + t, d]


def router(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    top_k: int,
    normalise: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """`reference.router`."""
    rows = x.shape[0]
    if not 0 < rows <= _MOST_ROWS or (bias is None and chosen is None):
        return decode.router(x, gate, bias, chosen, top_k, normalise, scaling)
    scores: Array = product(dense(x), array(gate))
    _scores(scores)
    if chosen is not None:
        experts = dense(chosen)
    elif bias is not None:
        experts = np.empty((rows, top_k), np.int64)
        _route(scores, array(bias), experts)
    weights = np.empty(experts.shape, scores.dtype)
    _weigh(scores, experts, normalise, scores.dtype.type(scaling), weights)
    return tensor(experts), tensor(weights)


def moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared13: Tensor,
    shared2: Tensor,
    limit: float,
    act_group: int,
) -> Tensor:
    """`reference.moe`: the pairs of row and expert, then the shared expert's rows."""
    rows, k = experts.shape
    hidden, inner = shared2.shape
    pairs = rows * (k + 1)
    cached = w13[0].numel() * w13.element_size() <= _CACHED_BYTES
    if k == 0 or not 0 < pairs <= (_SOME_PAIRS if cached else _FEW_PAIRS):
        return decode.moe(x, experts, weights, w13, w2, shared13, shared2, limit, act_group)
    chosen = dense(experts)
    inputs = dense(quant.fake_fp8(x, act_group) if act_group else x)
    both = np.empty((pairs, 2 * inner), inputs.dtype)
    _products(inputs, chosen, array(w13), array(shared13), both)
    scale = np.ones(pairs, inputs.dtype)
    scale[: rows * k] = array(weights).reshape(-1)
    a = np.empty((pairs, inner), inputs.dtype)
    _activate(both, scale, inputs.dtype.type(limit), a)
    if act_group:
        a = array(quant.fake_fp8(tensor(a), act_group))
    parts = np.empty((pairs, hidden), inputs.dtype)
    _products(a, chosen, array(w2), array(shared2), parts)
    out = np.empty((rows, hidden), inputs.dtype)
    _add_up(parts, k, out)
    return tensor(out)
