"""Router and experts of few rows: the products of each pair of row and expert one by one."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.compiled import kernels
from headrace.ops.cpu.compiled.kernel import dense
from headrace.ops.cpu.decode import moe as decode
from headrace.ops.cpu.decode import quant
from headrace.ops.cpu.decode.arrays import Array, array, product, tensor

# Rows up to which the router is one kernel: vectorised exponentials win above.
_MOST_ROWS = 64
# Pairs of row and expert up to which products row by row beat BLAS calls per expert; more of them
# where the weights of an expert stay in the cache of a core.
_FEW_PAIRS = 8
_SOME_PAIRS = 128
_CACHED_BYTES = 1 << 17


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
    kernels.scores(scores)
    if chosen is not None:
        experts = dense(chosen)
    elif bias is not None:
        experts = np.empty((rows, top_k), np.int64)
        kernels.route(scores, array(bias), experts)
    weights = np.empty(experts.shape, scores.dtype)
    kernels.weigh(scores, experts, normalise, scores.dtype.type(scaling), weights)
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
    kernels.products(inputs, chosen, array(w13), array(shared13), both)
    scale = np.ones(pairs, inputs.dtype)
    scale[: rows * k] = array(weights).reshape(-1)
    a = np.empty((pairs, inner), inputs.dtype)
    kernels.activate(both, scale, inputs.dtype.type(limit), a)
    if act_group:
        a = array(quant.fake_fp8(tensor(a), act_group))
    parts = np.empty((pairs, hidden), inputs.dtype)
    kernels.products(a, chosen, array(w2), array(shared2), parts)
    out = np.empty((rows, hidden), inputs.dtype)
    kernels.add_up(parts, k, out)
    return tensor(out)
