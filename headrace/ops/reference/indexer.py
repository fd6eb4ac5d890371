"""Reference compressor pooling and indexer: scores, candidate blocks, top-k selection.

Scores of places that a row may not see are -inf; equal scores are won by the lowest position.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.ops.records import RecordView
from headrace.ops.reference.quant import read_majors

# Upper bound of rows * heads * keys scored at once.
_SCORE_TILE = 1 << 24


def pool_groups(kv: Tensor, score: Tensor) -> Tensor:
    """Softmax over the tokens of a group per channel: kv, score fp32 [G, r, c] -> [G, c].

    A score of -inf leaves its token out.
    """
    return (torch.softmax(score, dim=1) * kv).sum(1)


def pool_entries(rows: Tensor, tokens: Tensor, ape: Tensor | None, overlap: bool) -> Tensor:
    """Pooled channels [E, width] of compressed entries: `pool_groups` of the tokens of each.

    rows fp32 [N, 2c]: kv and score of a token side by side; tokens int64 [E, n]: rows of the n
    tokens that an entry pools, -1 = none; ape [r, c] is added to the score of the i-th token of a
    group of r. overlap: the first n / 2 tokens are those of the group
    before, of which the first half of the channels counts; of the others it is the second half.
    """
    absent = (tokens < 0).unsqueeze(-1)
    kv, score = rows[tokens.clamp_min(0)].chunk(2, dim=-1)
    if ape is not None:
        score = score + ape.repeat(tokens.shape[1] // ape.shape[0], 1)
    # What lies in an absent row (even NaN) must not leak.
    kv = kv.masked_fill(absent, 0.0)
    score = score.masked_fill(absent, -torch.inf)
    if overlap:
        kv, score = _half_channels(kv), _half_channels(score)
    return pool_groups(kv, score)


def _half_channels(rows: Tensor) -> Tensor:
    """[E, n, c] -> [E, n, c / 2], see `pool_entries`."""
    (before, _), (_, current) = (half.chunk(2, dim=2) for half in rows.chunk(2, dim=1))
    return torch.cat((before, current), dim=1)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum_h weights[h] * relu(q[h] . k) -> [b, n, N].

    q [b, n, h, d], weights [b, n, h], keys [b, N, d].

    Every step rounds to q's dtype, as the released path does in bf16.
    """
    b, n, h, _ = q.shape
    total = keys.shape[1]
    out = torch.empty((b, n, total), dtype=q.dtype, device=q.device)
    step = max(1, _SCORE_TILE // max(1, b * h * total))
    transposed = keys.transpose(-1, -2).unsqueeze(1)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        dots = torch.relu(q[:, rows] @ transposed)
        out[:, rows] = (dots * weights[:, rows].unsqueeze(-1)).sum(2)
    return out


def entry_scores(
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    blocks: Tensor,
    visible: Tensor,
    count: int | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """`index_scores` of cached entries -> [T, count] in q's dtype, -inf where a row sees none.

    q [T, h, d], weights [T, h]: T rows in order of b sequences, equally many of each. Entry j of
    sequence s is the index key at (blocks[s, j // minors], j % minors) of `keys`; blocks int64
    [b, n]. Row t sees the entries below visible[t], int64 [T]; what lies in others is not read,
    or does not matter. count: how many entries are scored, at least as many as any row sees;
    None: all n * minors of the blocks. allowed bool [T, count]: others are -inf too.
    """
    return masked_scores(index_scores, q, weights, keys, blocks, visible, count, allowed)


def masked_scores(
    score: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    blocks: Tensor,
    visible: Tensor,
    count: int | None,
    allowed: Tensor | None,
) -> Tensor:
    """`entry_scores` by an `index_scores` of the caller's."""
    shape = (blocks.shape[0], q.shape[0] // max(1, blocks.shape[0]))
    rows = read_majors(keys, blocks, q.dtype).flatten(1, 2)[:, :count]
    scores = score(q.reshape(*shape, *q.shape[1:]), weights.reshape(*shape, q.shape[1]), rows)
    unseen = torch.arange(rows.shape[1], device=q.device) >= visible.unsqueeze(-1)
    scores = scores.flatten(0, 1).masked_fill_(unseen, -torch.inf)
    return scores if allowed is None else scores.masked_fill_(~allowed, -torch.inf)


def candidate_mask(scores: Tensor, visible: Tensor, block: int, keep: int) -> Tensor:
    """Which places the second level may select: bool [T, N].

    scores [T, N] (-inf invisible), visible int64 [T] (how many places row t sees). A block's score
    is its maximum, the block with the newest visible place is forced in, and the best `keep` blocks
    with any visible place stay.
    """
    rows, n = scores.shape
    blocks = -(-n // block)
    padded = torch.nn.functional.pad(scores, (0, blocks * block - n), value=-torch.inf)
    best = padded.unflatten(-1, (blocks, block)).amax(-1)
    newest = ((visible - 1) // block).clamp_min(0).unsqueeze(-1)
    best = best.scatter(-1, newest, torch.inf)
    order = torch.sort(best, dim=-1, descending=True, stable=True)[1][:, :keep]
    kept = torch.zeros((rows, blocks), dtype=torch.bool, device=scores.device)
    kept.scatter_(-1, order, True)
    kept &= (best > -torch.inf) & (visible > 0).unsqueeze(-1)
    return kept.repeat_interleave(block, dim=-1)[:, :n]


def select_top_k(scores: Tensor, top_k: int) -> Tensor:
    """Positions of the best min(top_k, N) scores per row, ascending, -1 at the end: int64 [T, k].

    scores [T, N]; -inf is never selected.
    """
    k = min(top_k, scores.shape[-1])
    values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
    none = torch.iinfo(torch.int64).max
    chosen = torch.where(values[:, :k] > -torch.inf, places[:, :k], none)
    chosen = chosen.sort(dim=-1)[0]
    return torch.where(chosen == none, -1, chosen)
