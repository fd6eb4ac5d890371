"""Gradients of the reference operators that training needs, against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.reference import attention, engram, head, hyper_connections, indexer, moe, norm


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


VALID = torch.tensor([[True, False, True], [True, True, True]])
EXPERTS = torch.tensor([[0, 2], [2, 1]])
ANGLES = random(9, 2, 2)


def rope_for_training(x: Tensor) -> Tensor:
    return norm.rope(x, torch.stack((ANGLES.cos(), ANGLES.sin()), dim=-1), True)


def hc_mix_for_training(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return hyper_connections.hc_mix(
        streams, fn, base, scale, rms_eps=1e-6, hc_eps=1e-6, iterations=3
    )


def route_weights(scores: Tensor) -> Tensor:
    return moe.route(scores, torch.tensor([0.0, 1.0, 0.0, 2.0]), 2, True, 1.5)[1]


def hashed_weights(scores: Tensor) -> Tensor:
    return moe.route_hashed(scores, EXPERTS, True, 1.5)[1]


# name -> (function, shapes of its differentiable inputs)
GRADIENTS = {
    "rms_norm": (lambda x, w: norm.rms_norm(x, w, 1e-6), [(2, 5), (5,)]),
    "linear": (norm.linear, [(2, 3), (4, 3)]),
    "rope": (rope_for_training, [(2, 3, 6)]),
    "hadamard": (norm.hadamard, [(2, 4)]),
    "hc_mix": (hc_mix_for_training, [(2, 2, 3), (8, 6), (8,), (3,)]),
    "hc_head": (
        lambda s, fn, b, c: hyper_connections.hc_head(s, fn, b, c, 1e-6, 1e-6),
        [(2, 2, 3), (2, 6), (2,), (1,)],
    ),
    "hc_collapse": (hyper_connections.hc_collapse, [(2, 2, 3), (2, 2)]),
    "hc_merge": (hyper_connections.hc_merge, [(2, 3), (2, 2, 3), (2, 2), (2, 2, 2)]),
    "pool_groups": (indexer.pool_groups, [(2, 3, 4), (2, 3, 4)]),
    "index_scores": (indexer.index_scores, [(1, 2, 3, 4), (1, 2, 3), (1, 5, 4)]),
    "attend": (
        lambda q, k, s: attention.attend(q, k, VALID, s, 0.5),
        [(2, 2, 4), (2, 3, 4), (2,)],
    ),
    "grouped_projection": (
        lambda o, w: attention.grouped_projection(o, w, 2),
        [(2, 4, 3), (4, 6)],
    ),
    "router_scores": (moe.router_scores, [(2, 3), (4, 3)]),
    "route": (route_weights, [(2, 4)]),
    "route_hashed": (hashed_weights, [(2, 4)]),
    "expert_mlp": (
        lambda x, w1, w3, w2, w: moe.expert_mlp(x, w1, w3, w2, w, 10.0, 0),
        [(2, 3), (4, 3), (4, 3), (3, 4), (2,)],
    ),
    "moe_experts": (
        lambda x, w, w1, w3, w2: moe.moe_experts(x, EXPERTS, w, w1, w3, w2, 10.0, 0),
        [(2, 3), (2, 2), (3, 4, 3), (3, 4, 3), (3, 3, 4)],
    ),
    "moe": (
        lambda x, w, *weights: moe.moe(x, EXPERTS, w, *weights, 10.0, 0),
        [(2, 3), (2, 2), (3, 8, 3), (3, 3, 4), (8, 3), (3, 4)],
    ),
    "engram_gate": (
        lambda s, k, w: engram.engram_gate(s, k, w, 1e-6),
        [(2, 2, 3), (2, 2, 3), (2, 3)],
    ),
    "engram_add": (engram.engram_add, [(2, 2, 3), (2, 2), (2, 3)]),
    "logits": (head.logits, [(2, 3), (4, 3)]),
}


@pytest.mark.parametrize("name", list(GRADIENTS))
def test_gradients(name):
    """Backward equals finite differences in fp64, for every differentiable input."""
    function, shapes = GRADIENTS[name]
    inputs = [random(20 + i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(function, inputs)
