"""Training of the indexer, and its selection in the sparse phase.

Top-k passes no gradient, so each index source learns to predict, by KL divergence, how the layers
that use its selection spread their attention over the compressed entries. It reads detached inputs:
the backbone never bends towards it. The divergence is taken at a sample of the queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.model.spec import ModelSpec
from headrace.ops.reference.indexer import candidate_mask
from train.geometry import Visibility

# (queries [B, R, h, d], head weights [B, R, h], keys [B, N, d]) -> [B, R, N]; see `scores`.
Score = Callable[[Tensor, Tensor, Tensor], Tensor]
# Scores of all heads made at once while selecting.
_TILE = 1 << 30


def attention_mass(
    q: Tensor, entries: Tensor, lse: Tensor, rows: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Attention of the queries `rows` [R] on every entry, summed over heads: fp32 [B, R, N].

    q [B, S, H, d], entries [B, N, d], lse [B, H, S] with the sink; visible [B, R, N]. Entries that
    a sparse layer did not select get the mass they would draw.
    """
    with torch.no_grad():
        logits = (q[:, rows].flatten(1, 2) @ entries.transpose(1, 2)).float()
        logits = logits.unflatten(1, (len(rows), -1)) * scale
        logits = logits - lse[:, :, rows].transpose(1, 2).unsqueeze(-1).float()
        mass = torch.exp(logits.clamp_max(0.0)).sum(2)
        return mass.masked_fill(~visible, 0.0)


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum_h weights[h] * relu(q[h] . k): q [B, R, h, d], weights [B, R, h], keys [B, N, d]."""
    dots = (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3])
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (torch.relu(dots) * weights.to(wide).unsqueeze(-1)).sum(2)


def divergence(predicted: Tensor, mass: Tensor, visible: Tensor) -> Tensor:
    """Mean KL(mass || softmax(predicted)) over queries that see at least two entries."""
    wide = predicted.float().masked_fill(~visible, -1e9)
    log_p = torch.log_softmax(wide, dim=-1)
    total = mass.sum(-1, keepdim=True)
    target = mass / total.clamp_min(1e-9)
    counts = (visible.sum(-1) >= 2) & (total.squeeze(-1) > 1e-6)
    kl = (torch.xlogy(target, target) - target * log_p.masked_fill(~visible, 0.0)).sum(-1)
    return (kl * counts).sum() / counts.sum().clamp_min(1)


def sampled_rows(length: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` evenly spaced queries with a random offset (of all rows if they are fewer)."""
    stride = max(1, length // count)
    offset = int(torch.randint(stride, (1,), generator=generator))
    return torch.arange(offset, length, stride)


@torch.no_grad()
def select(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    view: Visibility,
    allowed: Tensor | None,
    spec: ModelSpec,
    is_candidate_source: bool,
    score: Score = scores,
) -> tuple[Tensor, Tensor | None]:
    """(selected, candidates), bool [B, S, N]: the best index_topk visible entries of each query,
    and for the candidate source what later sources may select from."""
    rows, length, heads, _ = q.shape
    count = keys.shape[1]
    chosen = torch.zeros((rows, length, count), dtype=torch.bool, device=q.device)
    candidates = torch.empty_like(chosen) if is_candidate_source else None
    # Whole divisions: a compiled `score` is made for one shape.
    limit = max(1, _TILE // (rows * heads * count))
    step = max(s for s in range(1, length + 1) if length % s == 0 and s <= limit)
    for begin in range(0, length, step):
        part = slice(begin, min(begin + step, length))
        at = torch.arange(part.start, part.stop, device=q.device)
        seen = view.mask(at)[:, :, length:]
        found = score(q[:, part], weights[:, part], keys).masked_fill_(~seen, -torch.inf)
        if candidates is not None:
            candidates[:, part] = _candidates(found, (at + 1) // (length // count), spec)
        if allowed is not None:
            found.masked_fill_(~allowed[:, part], -torch.inf)
        top = found.topk(min(spec.index_topk, count), dim=-1)
        chosen[:, part] = chosen[:, part].scatter(-1, top.indices, top.values > -torch.inf)
    return chosen, candidates


def _candidates(found: Tensor, newest: Tensor, spec: ModelSpec) -> Tensor:
    """`candidate_mask` for scores [B, R, N]; newest int64 [R]: entries of the row up to each query.

    Blocks are counted from the row's start: documents begin on block borders.
    """
    rows = found.shape[0]
    mask = candidate_mask(
        found.flatten(0, 1),
        newest.expand(rows, -1).flatten(),
        spec.candidate_block_size,
        spec.candidate_blocks,
    )
    return mask.view(found.shape)
