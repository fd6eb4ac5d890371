"""Every operator once: its name and contract. The shapes and formulas are those of the reference.

`OpTable` is what the model calls: one resolved function per operator. Adding an operator = a field
here, a reference in `ops/reference`, a line in `catalogue.py` and cases in `cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor

Op = Callable[..., Tensor]
Op2 = Callable[..., tuple[Tensor, Tensor]]
Op4 = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class OpTable:
    """Resolved operators of one engine. T rows, D hidden, H heads, d head dim."""

    # norm and linear
    rms_norm: Op  # (x [.., n], weight [n] | None, eps) -> [.., n]
    linear: Op  # (x [T, K], weight [N, K]) -> [T, N]
    rope: Op  # (x [T, .., d], turn [T, R, 2], inverse) -> x with its last 2R dims rotated
    norm_rope: Op  # (x [T, .., d], weight [d] | None, eps, turn [T, R, 2]) -> [T, .., d]
    hadamard: Op  # (x [.., n]) -> [.., n]
    # quantisation and cache rows
    fake_fp8: Op  # (x [.., n], group) -> x rounded to E4M3 with UE8M0 scales
    fake_fp4_ue8m0: Op  # (x [.., n]) -> x rounded to E2M1 with UE8M0 scales per 32
    round_rows: Op  # (x [.., width], view) -> x as later reads of the cache will give it
    read_records: Op  # (view, major, minor, dtype) -> [.., width]
    read_majors: Op  # (view, major [..], dtype) -> [.., minors, width]: all rows of whole majors
    write_records: Callable[..., None]  # (view, major, minor, x [.., width]); in place
    # hyper-connections
    hc_enter: Op4  # (streams [T, hc, D], pre | None, fn, base, scales, norm, ..) -> x, ...
    hc_head: Op  # (streams, fn, base, scale, rms_eps, hc_eps) -> pre [T, hc]
    hc_collapse: Op  # (streams, pre) -> [T, D]
    hc_merge: Op  # (y [T, D], streams, post, comb) -> streams
    # attention
    pool_entries: Op  # (rows [N, 2c], tokens [E, n], ape [r, c] | None, overlap) -> [E, width]
    entry_scores: Op  # (q [T, h, d], weights, keys, blocks [b, n], visible, count, allowed)
    candidate_mask: Op  # (scores [T, N], visible [T], block, keep) -> bool [T, N]
    select_top_k: Op  # (scores [T, N], top_k) -> int64 [T, k]
    sparse_attention: Op  # (q, window, window_index, entries, major, minor, sink, scale)
    grouped_projection: Op  # (o [T, H, d], wo_a [groups * R, H * d / groups], groups)
    # mixture of experts
    router: Op2  # (x [T, D], gate, bias | None, chosen | None, top_k, normalise, scaling)
    moe: Op  # (x, experts, weights, w13, w2, shared13, shared2, limit, act_group) -> [T, D]
    # engram
    ngram_rows: Op  # (compressed [T, G], multipliers, primes, offsets) -> int64 [T, columns]
    engram_gate: Op  # (streams, key [T, hc, D], weight [hc, D], eps) -> [T, hc]
    engram_add: Op  # (streams, gate [T, hc], value [T, D]) -> streams
    # the head
    logits: Op  # (x [S, D], head [V, D]) -> fp32 (fp64) [S, V]


OPS: tuple[str, ...] = tuple(field.name for field in fields(OpTable))
