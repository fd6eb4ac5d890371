"""Logits to weights of a draw: temperature, top_k, top_p, min_p.

Contract: weights are fp64, exp((logit - highest) / temperature), not normalised; a dropped token
has weight 0. top_k keeps the best by (logit descending, id ascending); top_p is taken on the
distribution renormalised after top_k and drops a token when the mass before it exceeds top_p;
min_p drops what is below min_p times the highest probability; at least one token survives. Each
row's bits depend on that row alone: `exp` runs row by row on aligned memory, sums run in a fixed
order, everything else is exactly rounded. Used by `engine/sampler.py` and `engine/logprobs.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Numbers handled at once: bounds the fp64 scratch memory.
_NUMBERS_AT_ONCE = 2**18
# How many of the best tokens are looked at first; only flat distributions need more.
_WIDTHS = (128, 4096)
# Row starts are aligned to this many numbers (64 bytes), so that vector code treats rows alike.
_ALIGNMENT = 8

Numbers = NDArray[np.float64]
Ids = NDArray[np.int64]


def rows_at_once(vocab: int) -> int:
    """How many rows of `vocab` logits to work on together, at least one."""
    return max(1, _NUMBERS_AT_ONCE // vocab)


def exp_weights(logits: Tensor, temperatures: Numbers) -> Tensor:
    """exp((logits - row maximum) / temperature), fp64 [R, vocab]; row maxima must be finite."""
    rows, vocab = logits.shape
    width = -(-vocab // _ALIGNMENT) * _ALIGNMENT
    weights = torch.empty((rows, width), dtype=torch.float64, device=logits.device)[:, :vocab]
    temperature = torch.from_numpy(temperatures).to(logits.device)[:, None]
    torch.div(logits.double(), temperature, out=weights)
    weights -= weights.amax(dim=-1, keepdim=True)
    for row in weights:
        row.exp_()
    return weights


def drop_unlikely(
    logits: Tensor, weights: Tensor, top_k: Ids, top_p: Numbers, min_p: Numbers
) -> None:
    """Set the weights [R, vocab] of tokens that top_k (-1: off), top_p and min_p drop to 0."""
    vocab = logits.shape[1]
    top_k = np.where((top_k < 0) | (top_k > vocab), vocab, top_k)
    totals = weights.cumsum(dim=-1)[:, -1]
    widths = [width for width in _WIDTHS if width < vocab] + [vocab]
    # The first width that can show the border of top_k; each row goes its own way from there.
    levels = np.array([next(i for i, w in enumerate(widths) if _fits(k, w, vocab)) for k in top_k])
    pending = np.arange(len(top_k))
    for level, width in enumerate(widths):
        here = pending[levels[pending] <= level]
        if not len(here):
            continue
        chosen = torch.from_numpy(here).to(logits.device)
        kept, ids, settled = _kept_of_best(
            logits[chosen],
            weights[chosen],
            totals[chosen],
            width,
            *(torch.from_numpy(values[here]).to(logits.device) for values in (top_k, top_p, min_p)),
        )
        place, column = (kept & settled[:, None]).nonzero(as_tuple=True)
        survivors = chosen[place], ids[place, column]
        values = weights[survivors]
        weights.index_fill_(0, chosen[settled], 0.0)
        weights[survivors] = values
        pending = np.setdiff1d(pending, here[settled.cpu().numpy()])


def best(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best values and ids [R, width], by (value descending, id ascending).

    With width < vocab, ids whose value equals the last one may stand for others of that value.
    """
    if width >= logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(width, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, again = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, again)


def top_ids(logits: Tensor, count: int) -> Tensor:
    """The `count` best ids [R, count] by (value descending, id ascending), count <= vocab."""
    if count == 0:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    # One more shows whether a tie crosses the border.
    width = min(count + 1, logits.shape[1])
    values, ids = best(logits, width)
    ids = ids[:, :count].clone()
    if width > count:
        for row in (values[:, count - 1] == values[:, -1]).nonzero()[:, 0].tolist():
            ids[row] = best(logits[row : row + 1], logits.shape[1])[1][0, :count]
    return ids


def _fits(top_k: int, width: int, vocab: int) -> bool:
    """Whether `width` candidates hold the top_k best; top_k off (= vocab) may try any width."""
    return top_k == vocab or top_k < width or width == vocab


def _kept_of_best(
    logits: Tensor,
    weights: Tensor,
    totals: Tensor,
    width: int,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the `width` best survive [R, width], their ids, and rows for which that is certain.

    What survives is always a prefix: masses grow and weights fall along the order.
    """
    vocab = logits.shape[1]
    values, ids = best(logits, width)
    weights = weights.gather(-1, ids)
    mass = weights.cumsum(dim=-1)
    after_top_k = mass.gather(-1, (top_k - 1).clamp(max=width - 1)[:, None])[:, 0]
    totals = torch.where(top_k < vocab, after_top_k, totals)
    before = mass.roll(1, dims=-1)
    before[:, 0] = 0.0
    limit = torch.where(top_p < 1.0, top_p * totals, torch.inf)
    kept = torch.arange(width, device=logits.device)[None] < top_k[:, None]
    kept &= before <= limit[:, None]
    kept &= weights >= min_p[:, None] * weights[:, :1]
    kept &= weights > 0
    kept[:, 0] = True
    last = values.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)[:, 0]
    return kept, ids, (last > values[:, -1]) | (width == vocab)
