"""Batch-invariant CPU operators: every matrix product has a shape that the batch cannot change.

Plain BLAS picks its summation order by the shape of the call, so a row's bits depend on how many
rows stand beside it. Here rows are cut into tiles of `ROW_TILE` (the last one padded with zeros)
and keys into tiles of `KEY_TILE`, so that each product always has the same shape; attention is an
online softmax over key tiles, in which a tile without valid keys changes nothing. Holds with one
torch thread (the engine sets it in this mode). Cost: docs/perf-log.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.errors import InternalError
from headrace.ops.records import RecordView
from headrace.ops.reference import attention as reference_attention
from headrace.ops.reference import hyper_connections as reference_hc
from headrace.ops.reference import indexer as reference_indexer
from headrace.ops.reference import moe as reference_moe
from headrace.ops.reference.norm import rms_norm, wide
from headrace.ops.reference.quant import fake_fp8
from headrace.ops.stored_weights import Weight, dense, halves

ROW_TILE = 32
KEY_TILE = 64
DEPTH_MULTIPLE = 16


def matmul(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] @ weight [N, K]^T -> [T, N] in x's dtype, in calls of exactly ROW_TILE rows."""
    rows, depth = x.shape
    # BLAS treats the rows of a tile alike only where the inner dim is whole vectors.
    extra = -depth % DEPTH_MULTIPLE
    padded = torch.nn.functional.pad(x, (0, extra, 0, -rows % ROW_TILE))
    out = torch.empty((padded.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    numbers = dense(weight, x.dtype)
    transposed = (torch.nn.functional.pad(numbers, (0, extra)) if extra else numbers).T
    for start in range(0, padded.shape[0], ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        torch.mm(padded[tile], transposed, out=out[tile])
    return out[:rows]


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`reference.linear` for x [..., K]."""
    return matmul(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def logits(x: Tensor, head: Tensor) -> Tensor:
    """`reference.logits`."""
    return matmul(wide(x), head)


def router_scores(x: Tensor, gate: Tensor) -> Tensor:
    """`reference.router_scores`."""
    return torch.sqrt(torch.nn.functional.softplus(matmul(wide(x), gate)))


def hc_project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """`reference.hc_project`."""
    v = wide(streams.flatten(-2))
    return matmul(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


def hc_enter(
    streams: Tensor,
    pre: Tensor | None,
    fn: Tensor,
    base: Tensor,
    scales: Tensor,
    norm: Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.hc_enter`."""
    m = hc_project(streams, fn, rms_eps)
    hc = streams.shape[-2]
    own, post, comb = reference_hc.coefficients(m, base, scales, hc, hc_eps, iterations)
    x = reference_hc.hc_collapse(streams, own if pre is None else pre)
    return rms_norm(x, norm, rms_eps), own, post, comb


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float
) -> Tensor:
    """`reference.hc_head`."""
    m = hc_project(streams, fn, rms_eps)
    return torch.sigmoid(m * scale.to(m.dtype) + base.to(m.dtype)) + hc_eps


def expert_mlp(
    x: Tensor,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    weight: Tensor | None,
    limit: float,
    act_group: int,
) -> Tensor:
    """`reference.expert_mlp`; rows are padded first, so that activations are whole tiles too."""
    rows = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % ROW_TILE))
    rounded = fake_fp8(padded, act_group) if act_group else padded
    a = reference_moe.swiglu(matmul(rounded, w1), matmul(rounded, w3), limit)
    if weight is not None:
        a = a * torch.nn.functional.pad(weight, (0, -rows % ROW_TILE)).unsqueeze(-1)
    a = a.to(x.dtype)
    return matmul(fake_fp8(a, act_group) if act_group else a, w2)[:rows]


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
    """`reference.moe_experts`: a row's sum runs over its experts in ascending order."""
    out = torch.zeros(x.shape, dtype=wide(x).dtype, device=x.device)
    for e in torch.unique(experts).tolist():
        if e < 0:
            continue
        rows, choice = torch.where(experts == e)
        y = expert_mlp(x[rows], w1[e], w3[e], w2[e], weights[rows, choice], limit, act_group)
        out[rows] += y.to(out.dtype)
    return out


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
    scores = router_scores(x, gate)
    if chosen is not None:
        return reference_moe.route_hashed(scores, chosen, normalise, scaling)
    if bias is None:
        raise InternalError("router needs a bias or chosen experts.")
    return reference_moe.route(scores, bias, top_k, normalise, scaling)


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
    """`reference.moe`."""
    w1, w3 = halves(w13)
    routed = moe_experts(x, experts, weights, w1, w3, w2, limit, act_group)
    w1, w3 = halves(shared13)
    shared = expert_mlp(x, w1, w3, shared2, None, limit, act_group)
    return (routed + shared.to(routed.dtype)).to(x.dtype)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`reference.index_scores`: one product per query and KEY_TILE keys."""
    b, n = q.shape[:2]
    total = keys.shape[1]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -total % KEY_TILE))
    tiles = padded.unflatten(1, (-1, KEY_TILE)).transpose(-1, -2).contiguous()  # [b, n_t, d, tile]
    out = torch.empty((b, n, tiles.shape[1], KEY_TILE), dtype=q.dtype, device=q.device)
    for i in range(b):
        for j in range(n):
            for t in range(tiles.shape[1]):
                dots = torch.relu(torch.mm(q[i, j], tiles[i, t]))
                out[i, j, t] = (dots * weights[i, j].unsqueeze(-1)).sum(0)
    return out.flatten(2)[:, :, :total]


def entry_scores(
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    blocks: Tensor,
    visible: Tensor,
    count: int | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """`reference.entry_scores`."""
    masked = reference_indexer.masked_scores
    return masked(index_scores, q, weights, keys, blocks, visible, count, allowed)


def attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """`reference.attend` for one row: q [H, d], keys [K, d] (K a multiple of KEY_TILE)."""
    k = wide(keys)
    query = wide(q)
    top = sink.to(k.dtype).unsqueeze(-1).clone()  # [H, 1]
    total = torch.ones_like(top)  # the sink itself, relative to the running maximum
    out = torch.zeros((q.shape[0], k.shape[1]), dtype=k.dtype, device=k.device)
    for start in range(0, k.shape[0], KEY_TILE):
        seen = valid[start : start + KEY_TILE]
        if not bool(seen.any()):
            continue
        tile = k[start : start + KEY_TILE]
        scores = (torch.mm(query, tile.T) * scale).masked_fill(~seen, -torch.inf)
        highest = torch.maximum(top, scores.amax(-1, keepdim=True))
        p = torch.exp(scores - highest)
        shrink = torch.exp(top - highest)
        total = total * shrink + p.sum(-1, keepdim=True)
        out = out * shrink + torch.mm(p.to(q.dtype).to(k.dtype), tile)
        top = highest
    return (out / total).to(q.dtype)


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: RecordView | None,
    major: Tensor,
    minor: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """`reference.sparse_attention`, row by row."""
    out = torch.empty_like(q)
    padding = -(window_index.shape[1] + major.shape[1]) % KEY_TILE
    for start in range(0, q.shape[0], reference_attention.ROW_TILE):
        rows = range(start, min(start + reference_attention.ROW_TILE, q.shape[0]))
        part = slice(rows.start, rows.stop)
        keys, valid = reference_attention.gather_keys(
            window, window_index[part], entries, major[part], minor[part], q.dtype
        )
        keys = torch.nn.functional.pad(keys, (0, 0, 0, padding))
        valid = torch.nn.functional.pad(valid, (0, padding))
        for i, row in enumerate(rows):
            out[row] = attend(q[row], keys[i], valid[i], sink, scale)
    return out


def grouped_projection(o: Tensor, wo_a: Weight, groups: int) -> Tensor:
    """`reference.grouped_projection`."""
    x = o.flatten(1).unflatten(-1, (groups, -1))
    w = dense(wo_a, o.dtype).unflatten(0, (groups, -1))
    return torch.cat([matmul(x[:, g].contiguous(), w[g]) for g in range(groups)], dim=-1)
