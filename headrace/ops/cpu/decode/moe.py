"""Router and experts of few rows: rows are sorted by expert, activations share their calls."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.ops.cpu.decode import quant
from headrace.ops.cpu.decode.arrays import FEW, LARGE_PRODUCT, Array, array, product, tensor
from headrace.ops.reference import moe as reference

# softplus(x) is x above this, as in torch.
_SOFTPLUS_LINEAR = 20.0
_ROUTER_EPS = 1e-20
# Numbers from which one call of torch costs less than four of NumPy.
_MANY = 512


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
    rows, count = x.shape[0], gate.shape[0]
    if rows * count > FEW:
        return reference.router(x, gate, bias, chosen, top_k, normalise, scaling)
    logits: Array = product(array(x), array(gate))
    scores = np.minimum(logits, _SOFTPLUS_LINEAR)
    np.exp(scores, out=scores)
    np.log1p(scores, out=scores)
    np.maximum(scores, logits, out=scores)
    np.sqrt(scores, out=scores)
    if chosen is not None:
        experts: Array = array(chosen)
    elif bias is not None:
        # Ties go to the lowest expert.
        keys = scores + array(bias)
        experts = np.negative(keys, out=keys).argsort(axis=1, kind="stable")[:, :top_k]
    else:
        return reference.router(x, gate, bias, chosen, top_k, normalise, scaling)
    weights = scores.take(experts + np.arange(0, rows * count, count)[:, None])
    if normalise:
        weights /= np.add.reduce(weights, axis=1, keepdims=True) + _ROUTER_EPS
    weights *= scaling
    return tensor(experts), tensor(weights)


def _activation(both: Array, limit: float) -> Array:
    """`reference.swiglu` of gate | up [n, 2I] -> [n, I]; overwrites its argument."""
    inner = both.shape[1] // 2
    np.minimum(both, limit, out=both)
    gate, up = both[:, :inner], both[:, inner:]
    np.maximum(up, -limit, out=up)
    if gate.size > _MANY:
        return np.multiply(torch.nn.functional.silu(torch.from_numpy(gate)).numpy(), up)
    # silu(g) = h * (1 + tanh(h)) with h = g / 2: exp(-g) could overflow.
    half = gate * 0.5
    a: Array = np.tanh(half)
    a += 1.0
    a *= half
    a *= up
    return a


def _by_expert(experts: Array) -> tuple[Array, list[tuple[int, slice]]]:
    """Order of the places [T * k] by expert, and the slices of that order that belong to each."""
    chosen = experts.reshape(-1)
    start, spans = 0, []
    for e, count in enumerate(np.bincount(chosen + 1).tolist(), start=-1):
        if count:
            spans.append((e, slice(start, start + count)))
            start += count
    return chosen.argsort(kind="stable"), spans


def _products(x: Array, weights: Array, spans: list[tuple[int, slice]], out: Array) -> None:
    """out[span] = x[span] @ weights[e]^T for the slices of each expert."""
    longest = max((span.stop - span.start for _, span in spans), default=0)
    small = longest * weights.shape[1] * weights.shape[2] <= LARGE_PRODUCT
    for e, span in spans:
        if e < 0:
            continue
        if small:
            x[span].dot(weights[e].T, out[span])
        else:
            product(x[span], weights[e], out[span])


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
    """`reference.moe`: the rows of all experts, the shared one last, share their activation."""
    rows, k = experts.shape
    hidden, inner = shared2.shape
    if rows * (k + 1) * max(hidden, 2 * inner) > 1 << 18 or k == 0:
        return reference.moe(x, experts, weights, w13, w2, shared13, shared2, limit, act_group)
    order, spans = _by_expert(array(experts))
    up_weights, down_weights = array(w13), array(w2)
    inputs: Array = array(quant.fake_fp8(x, act_group) if act_group else x)
    by_expert = inputs.take(order // k, axis=0)
    routed = len(order)
    both = np.zeros((routed + rows, 2 * inner), inputs.dtype)
    _products(by_expert, up_weights, spans, both)
    product(inputs, array(shared13), both[routed:])
    a = _activation(both, limit)
    a[:routed] *= array(weights).take(order)[:, None]
    if act_group:
        a = array(quant.fake_fp8(tensor(a), act_group))
    y = np.zeros((routed, hidden), inputs.dtype)
    _products(a, down_weights, spans, y)
    parts = np.empty((rows, k, hidden), inputs.dtype)
    parts.reshape(routed, hidden)[order] = y
    out = parts[:, 0].copy()
    for place in range(1, k):
        out += parts[:, place]
    out += product(a[routed:], array(shared2))
    return tensor(out)
