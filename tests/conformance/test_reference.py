"""The reference operators against independent mathematics and the published check values.

Each expectation is computed here from the definition with loops, complex numbers or numpy in fp64,
never with the code under test. Gradients: test_gradients.
"""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.model.deepseek.step import inverse_frequencies
from headrace.model.spec import YarnSpec
from headrace.ops.reference import attention, engram, head, hyper_connections, indexer, moe, norm

F64 = torch.float64


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def close(found: Tensor, expected: object, tolerance: float = 1e-12) -> None:
    want = torch.as_tensor(np.asarray(expected), dtype=found.dtype)
    assert found.shape == want.shape
    worst = (found - want).abs().max().item()
    assert worst <= tolerance, f"{worst:.3g} > {tolerance:.3g}"


def turn(angles: Tensor) -> Tensor:
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


# --- norm, rope, hadamard ------------------------------------------------------------------------


def test_rms_norm():
    x, w = random(1, 3, 10), random(2, 10)
    eps = 0.25
    expected = [
        [
            v * wi / math.sqrt(sum(u * u for u in row) / 10 + eps)
            for v, wi in zip(row, w, strict=True)
        ]
        for row in x.tolist()
    ]
    close(norm.rms_norm(x, w, eps), expected)
    close(norm.rms_norm(x, None, eps), norm.rms_norm(x, torch.ones(10, dtype=F64), eps))


def test_rms_norm_multiplies_by_the_weight_before_the_cast():
    """bf16(fp32(x) * scale * weight): one rounding, not two."""
    x = random(1, 64, 32).to(torch.bfloat16)
    w = random(2, 32).to(torch.bfloat16)
    v = x.float()
    expected = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w.float()
    found = norm.rms_norm(x, w, 1e-6)
    assert found.dtype == torch.bfloat16
    assert found.equal(expected.to(torch.bfloat16))


def test_released_eps_keeps_tiny_rows():
    """1e-20 is far below the mean square of rows that a larger eps would flatten."""
    x = random(1, 2, 16) * 1e-7
    found = norm.rms_norm(x.float(), None, 1e-20)
    assert found.square().mean(-1).sub(1).abs().max() < 1e-4


@pytest.mark.parametrize("inverse", [False, True])
def test_rope_is_a_complex_rotation_of_the_last_dims(inverse):
    angles = random(3, 4, 3)
    x = random(4, 4, 2, 10)
    expected = x.tolist()
    for t in range(4):
        for h in range(2):
            for i in range(3):
                at = 4 + 2 * i
                z = complex(x[t, h, at], x[t, h, at + 1])
                z *= cmath.exp(1j * float(angles[t, i]) * (-1 if inverse else 1))
                expected[t][h][at : at + 2] = [z.real, z.imag]
    close(norm.rope(x, turn(angles), inverse), expected)


def test_rope_inverse_undoes_rope():
    angles, x = random(3, 5, 4), random(4, 5, 8)
    turned = norm.rope(x, turn(angles), False)
    close(norm.rope(turned, turn(angles), True), x)


def test_norm_rope_is_both_in_turn():
    angles, x, w = random(3, 5, 4), random(4, 5, 2, 8), random(5, 8)
    turned = norm.norm_rope(x, w, 0.25, turn(angles))
    close(norm.rope(turned, turn(angles), True), norm.rms_norm(x, w, 0.25))


@pytest.mark.parametrize("n", [1, 2, 8, 128])
def test_hadamard_matrix(n):
    """Row i of the identity gives column i of H[i][j] = (-1)^popcount(i & j) * n^-0.5."""
    h = [[(-1) ** bin(i & j).count("1") * n**-0.5 for j in range(n)] for i in range(n)]
    identity = torch.eye(n, dtype=F64)
    close(norm.hadamard(identity), h)
    close(norm.hadamard(norm.hadamard(identity)), identity)


def test_hadamard_published_vectors():
    e = torch.eye(128)
    step = 2.0**-3.5
    assert norm.hadamard(e[0]).tolist() == pytest.approx([step] * 128)
    assert norm.hadamard(e[1]).tolist() == pytest.approx([step, -step] * 64)
    assert norm.hadamard(e[3]).tolist() == pytest.approx([step, -step, -step, step] * 32)
    ones = norm.hadamard(torch.ones(128))
    assert ones[0].item() == pytest.approx(11.3137085)
    assert ones[1:].tolist() == [0.0] * 127


PLAIN_CHECKS = {0: 1.0, 1: 0.74989420, 15: 0.013335215, 16: 0.0100000, 31: 1.3335215e-4}
YARN_CHECKS = {
    0: 1.0,
    1: 0.687656045,
    14: 0.00528685655,
    15: 0.00363553851,
    16: 0.00226562493,
    20: 2.96977785e-4,
    24: 1.95312532e-5,
    25: 5.37231244e-6,
    31: 5.6805294e-7,
}


def test_rotary_frequencies():
    yarn = YarnSpec(factor=16, beta_fast=32, beta_slow=1, original_max_position=65536)
    plain = inverse_frequencies(10000.0, 64, None)
    blended = inverse_frequencies(160000.0, 64, yarn)
    assert {i: plain[i].item() for i in PLAIN_CHECKS} == pytest.approx(PLAIN_CHECKS, rel=2e-7)
    assert {i: blended[i].item() for i in YARN_CHECKS} == pytest.approx(YARN_CHECKS, rel=2e-7)


# --- hyper-connections ---------------------------------------------------------------------------


def test_hyper_connection_coefficients():
    """The test vector of the model specification, section 5 (given as fp32 numbers)."""
    m = torch.tensor([[((7 * i) % 13 - 6) / 5 for i in range(24)]], dtype=F64)
    base = torch.tensor([((5 * i) % 11 - 5) / 9 for i in range(24)], dtype=F64)
    scales = hyper_connections.row_scales(torch.tensor([0.5, 0.7, 1.3], dtype=F64), 4)
    pre, post, comb = hyper_connections.coefficients(m, base, scales, 4, 1e-6, 20)
    close(pre, [[0.239476785, 0.524980187, 0.513886333, 0.522208631]], 1e-7)
    close(post, [[0.942286432, 1.098567843, 0.956693709, 1.112850547]], 1e-7)
    close(comb[0, 0], [0.0778612122, 0.422138214, 0.0778611600, 0.422138393], 1e-7)
    close(comb[0, 1], [0.307379246, 0.192620248, 0.307379276, 0.192620203], 1e-7)


def test_sinkhorn():
    """Softmax over k, then columns, then (iterations - 1) times rows and columns."""
    logits, eps = random(7, 2, 3, 3), 0.01
    for iterations in (1, 2, 5):
        expected = []
        for matrix in np.asarray(logits):
            c = np.exp(matrix) / np.exp(matrix).sum(1, keepdims=True) + eps
            c = c / (c.sum(0, keepdims=True) + eps)
            for _ in range(iterations - 1):
                c = c / (c.sum(1, keepdims=True) + eps)
                c = c / (c.sum(0, keepdims=True) + eps)
            expected.append(c)
        close(hyper_connections.sinkhorn(logits, iterations, eps), expected)


def naive_projection(streams: Tensor, fn: Tensor, eps: float) -> np.ndarray:
    v = np.asarray(streams).reshape(len(streams), -1)
    return v @ np.asarray(fn).T / np.sqrt((v**2).mean(1, keepdims=True) + eps)


def test_hc_mix_takes_the_norm_over_all_copies():
    streams, fn, base, scale = random(1, 3, 2, 5), random(2, 8, 10), random(3, 8), random(4, 3)
    m = naive_projection(streams, fn, 0.5)
    pre, post, comb = hyper_connections.hc_mix(
        streams, fn, base, scale, rms_eps=0.5, hc_eps=1e-3, iterations=3
    )
    b, s = np.asarray(base), np.asarray(scale)
    close(pre, 1 / (1 + np.exp(-(m[:, :2] * s[0] + b[:2]))) + 1e-3)
    close(post, 2 / (1 + np.exp(-(m[:, 2:4] * s[1] + b[2:4]))))
    logits = torch.tensor((m[:, 4:] * s[2] + b[4:]).reshape(3, 2, 2))
    close(comb, hyper_connections.sinkhorn(logits, 3, 1e-3))


def test_hc_head():
    streams, fn, base, scale = random(1, 3, 2, 5), random(2, 2, 10), random(3, 2), random(4, 1)
    m = naive_projection(streams, fn, 0.5) * np.asarray(scale) + np.asarray(base)
    close(
        hyper_connections.hc_head(streams, fn, base, scale, 0.5, 1e-3), 1 / (1 + np.exp(-m)) + 1e-3
    )


def test_collapse_and_merge():
    """comb is summed over its first index: new[k] takes comb[j][k] of old[j]."""
    streams, y, pre, post, comb = (
        random(1, 2, 3, 4),
        random(2, 2, 4),
        random(3, 2, 3),
        random(4, 2, 3),
        random(5, 2, 3, 3),
    )
    collapsed = np.zeros((2, 4))
    merged = np.zeros((2, 3, 4))
    for t in range(2):
        for j in range(3):
            collapsed[t] += float(pre[t, j]) * np.asarray(streams[t, j])
        for k in range(3):
            merged[t, k] = float(post[t, k]) * np.asarray(y[t])
            for j in range(3):
                merged[t, k] += float(comb[t, j, k]) * np.asarray(streams[t, j])
    close(hyper_connections.hc_collapse(streams, pre), collapsed)
    close(hyper_connections.hc_merge(y, streams, post, comb), merged)


# --- compressor and indexer ----------------------------------------------------------------------


def test_pool_groups():
    """A softmax over the tokens of a group for each channel; -inf leaves a token out."""
    kv, score = random(1, 2, 3, 4), random(2, 2, 3, 4)
    score[0, 0] = -math.inf
    expected = np.zeros((2, 4))
    for g in range(2):
        for c in range(4):
            weights = [math.exp(s) for s in score[g, :, c].tolist()]
            values = zip(weights, kv[g, :, c].tolist(), strict=True)
            expected[g, c] = sum(w * v for w, v in values) / sum(weights)
    close(indexer.pool_groups(kv, score), expected)


def test_pool_entries():
    """An absent token counts for nothing; where groups overlap, each half has its channels."""
    rows = random(1, 7, 8)
    rows[6] = math.nan
    tokens = torch.tensor([[-1, 0, 1, 2], [3, 0, 5, 4]])
    kv, score = rows.nan_to_num().unflatten(1, (2, 4)).unbind(1)
    for overlap, channels in ((False, 4), (True, 2)):
        ape = random(2, 2 if overlap else 4, 4)
        expected = np.zeros((2, channels))
        for e, c in np.ndindex(2, channels):
            # Channel of the first two tokens, and of the last two.
            columns = (c, c, c + 2, c + 2) if overlap else (c,) * 4
            places = zip(tokens[e].tolist(), columns, range(4), strict=True)
            chosen = [(t, k, i % len(ape)) for t, k, i in places if t >= 0]
            weights = [math.exp(score[t, k] + ape[i, k]) for t, k, i in chosen]
            values = [float(kv[t, k]) for t, k, _ in chosen]
            total = sum(w * v for w, v in zip(weights, values, strict=True))
            expected[e, c] = total / sum(weights)
        close(indexer.pool_entries(rows, tokens, ape, overlap), expected)


def test_index_scores():
    """relu before the head weight, which may be negative."""
    q, w, k = random(1, 2, 3, 4, 5), random(2, 2, 3, 4), random(3, 2, 6, 5)
    expected = np.zeros((2, 3, 6))
    for b, n, h, j in np.ndindex(2, 3, 4, 6):
        dot = sum(a * c for a, c in zip(q[b, n, h].tolist(), k[b, j].tolist(), strict=True))
        expected[b, n, j] += float(w[b, n, h]) * max(dot, 0.0)
    close(indexer.index_scores(q, w, k), expected)


def test_index_scores_of_many_queries_equal_those_of_few(monkeypatch):
    """Large rectangles are scored in parts."""
    q, w, k = random(1, 2, 9, 4, 5), random(2, 2, 9, 4), random(3, 2, 6, 5)
    whole = indexer.index_scores(q, w, k)
    monkeypatch.setattr(indexer, "_SCORE_TILE", 2 * 4 * 6 * 4)
    close(indexer.index_scores(q, w, k), whole)


def kept_blocks(scores: list[float], visible: int, block: int, keep: int) -> list[int]:
    """Blocks by the definition: the newest one, then the best of the others."""
    if visible == 0:
        return []
    seen = scores[:visible]
    best = [max(seen[i : i + block]) for i in range(0, visible, block)]
    newest = (visible - 1) // block
    others = sorted((b for b in range(len(best)) if b != newest), key=lambda b: (-best[b], b))
    return sorted([newest, *others[: keep - 1]])


def mask_of(scores: list[float], visible: int, block: int, keep: int) -> list[bool]:
    kept = kept_blocks(scores, visible, block, keep)
    return [place // block in kept for place in range(len(scores))]


def test_candidate_example_of_the_specification():
    scores = [5, 1, 1, 1, 4, 4, 4, 4, 0, 9, 0, 0, 3, 3]
    found = indexer.candidate_mask(torch.tensor([scores], dtype=F64), torch.tensor([14]), 4, 2)
    assert found.tolist() == [[False] * 8 + [True] * 6]


@pytest.mark.parametrize(("places", "block", "keep"), [(14, 4, 2), (17, 8, 1), (40, 3, 5)])
def test_candidates_by_definition(places, block, keep):
    visible = torch.arange(places + 1)
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        scores = torch.randint(-2, 3, (places + 1, places), generator=g).to(F64)
        hidden = torch.arange(places) >= visible.unsqueeze(-1)
        scores = scores.masked_fill(hidden, -math.inf)
        found = indexer.candidate_mask(scores, visible, block, keep)
        for row in range(places + 1):
            assert found[row].tolist() == mask_of(scores[row].tolist(), row, block, keep), row


def test_select_top_k_gives_ties_to_the_lowest_position():
    none = -math.inf
    scores = torch.tensor(
        [
            [0.0, 0, 0, 0, 0, 0],
            [1.0, 3, 2, 3, 3, 3],
            [none, 0, none, 0, 0, -1],
            [none, none, 5, none, none, 1],
            [none] * 6,
        ]
    )
    expected = [[0, 1, 2], [1, 3, 4], [1, 3, 4], [2, 5, -1], [-1, -1, -1]]
    assert indexer.select_top_k(scores, 3).tolist() == expected
    assert indexer.select_top_k(scores[:1], 9).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_select_top_k_by_definition():
    g = torch.Generator().manual_seed(2)
    scores = torch.randint(-3, 4, (50, 23), generator=g).to(F64)
    for row, found in zip(scores.tolist(), indexer.select_top_k(scores, 7).tolist(), strict=True):
        assert found == sorted(sorted(range(23), key=lambda j: (-row[j], j))[:7])


# --- attention -----------------------------------------------------------------------------------


def naive_attention(
    q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float
) -> np.ndarray:
    out = np.zeros(q.shape)
    for t, h in np.ndindex(q.shape[0], q.shape[1]):
        total = math.exp(float(sink[h]))  # no value, and not scaled
        for j in range(keys.shape[1]):
            if valid[t, j]:
                weight = math.exp(float(q[t, h] @ keys[t, j]) * scale)
                total += weight
                out[t, h] += weight * np.asarray(keys[t, j])
        out[t, h] /= total
    return out


def test_attention_with_sink():
    q, keys, sink = random(1, 4, 3, 6), random(2, 4, 5, 6), random(3, 3)
    valid = random(4, 4, 5) > -0.5
    valid[1] = False
    found = attention.attend(q, keys, valid, sink, 0.3)
    close(found, naive_attention(q, keys, valid, sink, 0.3))
    assert torch.count_nonzero(found[1]) == 0


def test_sink_takes_its_share_of_one_key():
    """q.k * scale = 0 against a sink of ln 3: a quarter of the value."""
    q, key = torch.zeros(1, 1, 4, dtype=F64), torch.ones(1, 1, 4, dtype=F64)
    sink = torch.tensor([math.log(3.0)], dtype=F64)
    found = attention.attend(q, key, torch.ones(1, 1, dtype=torch.bool), sink, 1e-3)
    close(found, [[[0.25] * 4]])


def test_attention_survives_large_logits():
    q = torch.full((1, 1, 4), 100.0, dtype=torch.float32)
    keys = torch.stack((torch.full((4,), 100.0), torch.full((4,), -100.0))).unsqueeze(0)
    valid = torch.ones(1, 2, dtype=torch.bool)
    for sink in (-1e4, 0.0):
        found = attention.attend(q, keys, valid, torch.tensor([sink]), 1.0)
        assert found.tolist() == [[[100.0] * 4]]
    assert (
        attention.attend(q, -keys[:, :1], valid[:, :1], torch.tensor([0.0]), 1.0).abs().max() == 0
    )


@pytest.mark.parametrize("rows", [1, 65, 130])
def test_sparse_attention_gathers_window_keys(rows):
    """Rows are attended in tiles; each has its own keys."""
    q, window = random(1, rows, 2, 6), random(2, rows + 3, 6)
    index = torch.arange(rows).unsqueeze(-1) + torch.tensor([0, 1, 2, 3])
    index[::3, 0] = -1
    sink, none = random(3, 2), torch.empty((rows, 0), dtype=torch.int64)
    found = attention.sparse_attention(q, window, index, None, none, none, sink, 0.5)
    keys = window[index.clamp_min(0)]
    close(found, naive_attention(q, keys, index >= 0, sink, 0.5))


def test_grouped_projection():
    """Heads in consecutive groups; group g meets rows [g * R, (g + 1) * R) of wo_a."""
    o, wo_a = random(1, 3, 4, 5), random(2, 6, 10)
    expected = np.zeros((3, 6))
    for t, row in np.ndindex(3, 6):
        group = row // 3
        heads = np.asarray(o[t, 2 * group : 2 * group + 2]).reshape(-1)
        expected[t, row] = heads @ np.asarray(wo_a[row])
    close(attention.grouped_projection(o, wo_a, 2), expected)


# --- mixture of experts --------------------------------------------------------------------------


def test_router_scores():
    """The test of the specification, section 6: sqrt(softplus) of the logits -2..3."""
    x, gate = torch.ones(1, 1), torch.arange(-2.0, 4.0).unsqueeze(-1)
    expected = [[0.356269568, 0.559697866, 0.832554579, 1.145976305, 1.458399177, 1.746020436]]
    close(moe.router_scores(x, gate), expected, 2e-7)


def test_route():
    """The bias steers the choice only; weights are those of the unbiased scores."""
    scores = torch.tensor([[0.5, 1.0, 2.0, 0.25]], dtype=F64)
    bias = torch.tensor([2.0, 0.0, -3.0, 0.5], dtype=F64)
    experts, weights = moe.route(scores, bias, 2, True, 1.5)
    assert experts.tolist() == [[0, 1]]
    close(weights, [[0.5 / 1.5 * 1.5, 1.0 / 1.5 * 1.5]])
    _, weights = moe.route(scores, bias, 2, False, 1.5)
    close(weights, [[0.75, 1.5]])
    per_row = torch.stack((bias, -bias))
    experts, _ = moe.route(scores.expand(2, -1), per_row, 1, True, 1.0)
    assert experts.tolist() == [[0], [2]]


def test_route_gives_ties_to_the_lowest_expert():
    experts, weights = moe.route(torch.ones(1, 6, dtype=F64), torch.zeros(6), 3, True, 1.0)
    assert experts.tolist() == [[0, 1, 2]]
    close(weights, [[1 / 3] * 3])


def test_route_of_zero_scores_is_finite():
    """The denominator holds 1e-20 for rows whose scores are all zero."""
    _, weights = moe.route(torch.zeros(1, 4), torch.zeros(4), 2, True, 1.5)
    assert weights.tolist() == [[0.0, 0.0]]


def test_route_hashed():
    scores = torch.tensor([[0.5, 1.0, 2.0, 0.25]], dtype=F64)
    experts, weights = moe.route_hashed(scores, torch.tensor([[3, 1]]), True, 1.5)
    assert experts.tolist() == [[3, 1]]
    close(weights, [[0.25 / 1.25 * 1.5, 1.0 / 1.25 * 1.5]])


def naive_expert(
    x: np.ndarray, w1: Tensor, w3: Tensor, w2: Tensor, weight: float, limit: float
) -> np.ndarray:
    g, u = np.asarray(w1) @ x, np.asarray(w3) @ x
    g, u = np.minimum(g, limit), np.maximum(np.minimum(u, limit), -limit)
    return np.asarray(w2) @ (g / (1 + np.exp(-g)) * u * weight)


def test_clamp_rules():
    """The gate is clamped from above only, the up branch on both sides."""
    found = moe.swiglu(
        torch.tensor([20.0, -20.0, 1.0, 1.0], dtype=F64),
        torch.tensor([1.0, 1.0, 20.0, -20.0], dtype=F64),
        10.0,
    )
    silu = [v * sigmoid(v) for v in (10.0, -20.0, 1.0, 1.0)]
    close(found, [silu[0], silu[1], 10 * silu[2], -10 * silu[3]])


def test_expert_mlp():
    x, w1, w3, w2 = random(1, 3, 4) * 3, random(2, 5, 4), random(3, 5, 4), random(4, 4, 5)
    found = moe.expert_mlp(x, w1, w3, w2, None, 1.5, 0)
    close(found, [naive_expert(np.asarray(row), w1, w3, w2, 1.0, 1.5) for row in x])
    weight = random(5, 3).abs()
    found = moe.expert_mlp(x, w1, w3, w2, weight, 1.5, 0)
    rows = zip(np.asarray(x), weight.tolist(), strict=True)
    close(found, [naive_expert(row, w1, w3, w2, w, 1.5) for row, w in rows])


def test_expert_weight_comes_before_the_rounding_of_the_activation():
    """Both inputs of quantised products are rounded to FP8; the second holds the expert weight."""
    x, w1, w3, w2 = random(1, 2, 32), random(2, 32, 32), random(3, 32, 32), random(4, 32, 32)
    weight = torch.tensor([0.3, 1.7], dtype=F64)
    rounded = moe.fake_fp8(x, 32)
    a = moe.swiglu(rounded @ w1.T, rounded @ w3.T, 10.0) * weight.unsqueeze(-1)
    expected = moe.fake_fp8(a, 32) @ w2.T
    close(moe.expert_mlp(x, w1, w3, w2, weight, 10.0, 32), expected)


def test_moe_experts():
    x, weights = random(1, 6, 4), random(2, 6, 2).abs()
    w1, w3, w2 = random(3, 5, 3, 4), random(4, 5, 3, 4), random(5, 5, 4, 3)
    experts = torch.tensor([[0, 3], [3, 0], [1, -1], [-1, -1], [2, 0], [3, 1]])
    expected = np.zeros((6, 4))
    for t, c in np.ndindex(6, 2):
        e = int(experts[t, c])
        if e >= 0:
            weight = float(weights[t, c])
            expected[t] += naive_expert(np.asarray(x[t]), w1[e], w3[e], w2[e], weight, 1.0)
    close(moe.moe_experts(x, experts, weights, w1, w3, w2, 1.0, 0), expected)
    s1, s3, s2 = random(6, 3, 4), random(7, 3, 4), random(8, 4, 3)
    for t in range(6):
        expected[t] += naive_expert(np.asarray(x[t]), s1, s3, s2, 1.0, 1.0)
    routed, shared = (torch.cat((w1, w3), dim=1), w2), (torch.cat((s1, s3)), s2)
    close(moe.moe(x, experts, weights, *routed, *shared, 1.0, 0), expected)


# --- engram and head -----------------------------------------------------------------------------

COMPRESSED = [237, 5095, 251, 7208, 242]  # "The capital of France is"
PAD = 2
MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
# Last three digits of the released primes; all lie a little above 16,000,000.
PRIMES = {
    1: [
        [57, 79, 81, 97, 121, 129, 133, 183],
        [189, 207, 211, 253, 277, 289, 307, 321],
        [339, 381, 393, 399, 403, 409, 447, 463],
    ],
    14: [
        [477, 487, 499, 507, 511, 573, 609, 627],
        [667, 669, 693, 697, 711, 729, 759, 769],
        [781, 799, 813, 819, 841, 877, 879, 889],
    ],
}
POSITION_4 = [8434518, 28335418, 33056762, 54845833, 79590735, 82522014, 107990915, 114522034]


def released_rows(layer: int) -> list[list[int]]:
    primes = torch.tensor(PRIMES[layer]) + 16_000_000
    flat = primes.flatten()
    offsets = (flat.cumsum(0) - flat).view(3, 8)
    history = [PAD] * 3 + COMPRESSED
    ngrams = torch.tensor([history[p : p + 4][::-1] for p in range(len(COMPRESSED))])
    return engram.ngram_rows(ngrams, torch.tensor(MULTIPLIERS[layer]), primes, offsets).tolist()


def test_ngram_rows():
    """The test of the specification, section 7.4."""
    rows = released_rows(1)
    assert rows[0][:4] == [5184683, 27616858, 44205083, 48930683]
    assert rows[0][-1] == 376990358
    assert rows[4][:9] == [*POSITION_4, 130425857]
    assert rows[4][-1] == 379106837
    rows = released_rows(14)
    assert rows[4][:3] == [15511642, 19799350, 44525188]
    assert rows[4][-1] == 380659356


@pytest.mark.parametrize(
    ("dot", "expected"),
    [(0.0, 0.50025), (0.25, 0.62245935), (-0.25, 0.37754068), (4.0, 0.88079708)],
)
def test_engram_gate_check_values(dot, expected):
    """Unit streams and keys: the weight alone makes the dot product; hidden^-0.5 is 1/2."""
    one = torch.ones(1, 1, 4, dtype=F64)
    found = engram.engram_gate(one, one, torch.full((1, 4), dot / 2, dtype=F64), 0.0)
    assert found.item() == pytest.approx(expected, abs=1e-7)


def test_engram_gate():
    streams, key, weight = random(1, 2, 3, 5), random(2, 2, 3, 5), random(3, 3, 5)
    expected = np.zeros((2, 3))
    for t, c in np.ndindex(2, 3):
        s, k = np.asarray(streams[t, c]), np.asarray(key[t, c])
        dot = (s * np.asarray(weight[c]) * k).sum() * 5**-0.5
        dot /= math.sqrt((s**2).mean() + 0.1) * math.sqrt((k**2).mean() + 0.1)
        expected[t, c] = sigmoid(math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot))
    close(engram.engram_gate(streams, key, weight, 0.1), expected)


def test_engram_add():
    streams, gate, value = random(1, 2, 3, 5), random(2, 2, 3), random(3, 2, 5)
    s, g, v = np.asarray(streams), np.asarray(gate), np.asarray(value)
    close(engram.engram_add(streams, gate, value), s + g[:, :, None] * v[:, None, :])


def test_logits_are_fp32_products():
    x, w = random(1, 3, 8).to(torch.bfloat16), random(2, 5, 8).to(torch.bfloat16)
    found = head.logits(x, w)
    assert found.dtype == torch.float32
    close(found.double(), x.double() @ w.double().T, 1e-5)
    assert head.logits(x.double(), w).dtype == F64
