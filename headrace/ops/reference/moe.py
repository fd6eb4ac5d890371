"""Reference mixture of experts: router (noaux_tc), hash routing, clamped SwiGLU, routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.errors import InternalError
from headrace.ops.reference.norm import linear, wide
from headrace.ops.reference.quant import fake_fp8
from headrace.ops.stored_weights import Weight, halves

# Fixed in the released code, not the model's rms eps.
_ROUTER_EPS = 1e-20


def router_scores(x: Tensor, gate: Tensor) -> Tensor:
    """sqrt(softplus(x @ gate^T)) in fp32; x [T, D], gate [E, D] -> [T, E]."""
    v = wide(x)
    return torch.sqrt(torch.nn.functional.softplus(v @ gate.to(v.dtype).T))


def _route_weights(scores: Tensor, experts: Tensor, normalise: bool, scaling: float) -> Tensor:
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _ROUTER_EPS)
    return weights * scaling


def route(
    scores: Tensor, bias: Tensor, top_k: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Best `top_k` by scores + bias (ties to the lowest expert); weights from unbiased scores.

    scores [T, E], bias [E] or [T, E] -> experts int64 [T, k], weights [T, k].
    """
    order = torch.sort(scores + bias.to(scores.dtype), dim=-1, descending=True, stable=True)[1]
    experts = order[:, :top_k]
    return experts, _route_weights(scores, experts, normalise, scaling)


def route_hashed(
    scores: Tensor, experts: Tensor, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """V4 hash layers: `experts` int64 [T, k] come from the token id, weights from the scores."""
    return experts, _route_weights(scores, experts, normalise, scaling)


def router(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    top_k: int,
    normalise: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Experts int64 [T, k] and weights fp32 [T, k] of x [T, D]; gate [E, D].

    bias [E]: the best `top_k` of all; chosen int64 [T, top_k]: those of V4's hash layers.
    """
    scores = router_scores(x, gate)
    if chosen is not None:
        return route_hashed(scores, chosen, normalise, scaling)
    if bias is None:
        raise InternalError("router needs a bias or chosen experts.")
    return route(scores, bias, top_k, normalise, scaling)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, +-limit) in fp32; the gate has no lower clamp."""
    g = wide(gate).clamp_max(limit)
    return torch.nn.functional.silu(g) * wide(up).clamp(-limit, limit)


def expert_mlp(
    x: Tensor,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    weight: Tensor | None,
    limit: float,
    act_group: int,
) -> Tensor:
    """One expert on rows x [R, D]; `weight` [R] multiplies the activation before w2.

    w1, w3 [I, D], w2 [D, I]. act_group > 0: inputs of both products are rounded to FP8 per group.
    """
    rounded = fake_fp8(x, act_group) if act_group else x
    a = swiglu(linear(rounded, w1), linear(rounded, w3), limit)
    if weight is not None:
        a = a * weight.unsqueeze(-1)
    a = a.to(x.dtype)
    return linear(fake_fp8(a, act_group) if act_group else a, w2)


def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    limit: float,
    act_group: int,
) -> Tensor:
    """Sum over the chosen experts, fp32 [T, D], added in ascending expert order.

    x [T, D], experts int64 [T, k] (-1 = none), weights [T, k], w1/w3 [E, I, D], w2 [E, D, I].
    """
    out = torch.zeros(x.shape, dtype=wide(x).dtype, device=x.device)
    for e in torch.unique(experts).tolist():
        if e < 0:
            continue
        rows, choice = torch.where(experts == e)
        y = expert_mlp(x[rows], w1[e], w3[e], w2[e], weights[rows, choice], limit, act_group)
        out = out.index_add(0, rows, y.to(out.dtype))
    return out


def moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    shared13: Weight,
    shared2: Weight,
    limit: float,
    act_group: int,
) -> Tensor:
    """Routed experts (see `moe_experts`) plus the shared one, added in fp32 -> [T, D] as x.

    w13 [E, 2I, D] and shared13 [2I, D]: w1 above w3; w2 [E, D, I], shared2 [D, I].
    """
    w1, w3 = halves(w13)
    routed = moe_experts(x, experts, weights, w1, w3, w2, limit, act_group)
    w1, w3 = halves(shared13)
    shared = expert_mlp(x, w1, w3, shared2, None, limit, act_group)
    return (routed + shared.to(routed.dtype)).to(x.dtype)
