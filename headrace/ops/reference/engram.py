"""Reference Engram: which table rows an n-gram hashes to, and the gated addition to the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.ops.reference.norm import wide

_MIN_DOT = 1e-6


def ngram_rows(compressed: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Absolute table rows int64 [T, (G-1) * heads].

    compressed int64 [T, G]: compressed ids newest first, pad id where there is none.
    multipliers int64 [G]; primes and offsets int64 [G-1, heads]. For n = 2..G the hash is the XOR
    of id[k] * multiplier[k] over k < n, taken modulo each head's prime. Products stay below 2^63.
    """
    products = compressed * multipliers
    columns = []
    h = products[:, 0]
    for n in range(1, compressed.shape[1]):
        h = h ^ products[:, n]
        columns.append(h.unsqueeze(-1) % primes[n - 1] + offsets[n - 1])
    return torch.cat(columns, dim=-1)


def engram_gate(streams: Tensor, key: Tensor, query_key_weight: Tensor, eps: float) -> Tensor:
    """sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6))) per copy, fp32 [T, hc].

    streams, key [T, hc, D]; query_key_weight [hc, D] = q_weight * k_weight;
    dot = sum(stream * weight * key) * D^-0.5
    * rsqrt(mean stream^2 + eps) * rsqrt(mean key^2 + eps).
    """
    s, k = wide(streams), wide(key)
    dot = (s * query_key_weight.to(s.dtype) * k).sum(-1)
    dot = dot * torch.rsqrt(s.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    dot = dot * s.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp_min(_MIN_DOT).sqrt(), dot))


def engram_add(streams: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """streams + gate * value; gate [T, hc], value [T, D] shared by the copies."""
    return (wide(streams) + gate.unsqueeze(-1) * wide(value).unsqueeze(-2)).to(streams.dtype)
