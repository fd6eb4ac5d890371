"""Logits to weights of a draw: temperature, top_k, top_p, min_p.

Contract: weights are fp64, exp((logit - highest) / temperature), not normalised; a dropped token
has weight 0. top_k keeps the best by (logit descending, id ascending); top_p is taken on the
distribution renormalised after top_k and drops a token when the mass before it exceeds top_p;
min_p drops what is below min_p times the highest probability; at least one token survives. Each
row's bits depend on that row alone: on a CPU `exp` runs row by row on aligned memory, sums run in a
fixed order (`running_sums`), everything else is exactly rounded. Used by `engine/sampler.py` and
`engine/logprobs.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.transfers import sent

# Numbers handled at once: bounds the fp64 scratch memory, some 6 arrays of so many. A device is
# given enough to do; there each block costs launches and a wait.
_NUMBERS_AT_ONCE = 2**18
_NUMBERS_AT_ONCE_ON_DEVICE = 2**23
# How many of the best tokens are looked at first; only flat distributions need more.
_WIDTHS = (128, 4096)
# Row starts are aligned to this many numbers (64 bytes), so that vector code treats rows alike.
_ALIGNMENT = 8
# Numbers of a tile of `_two_level_sums`.
_TILE = 256

Numbers = NDArray[np.float64]
Ids = NDArray[np.int64]


def rows_at_once(logits: Tensor) -> int:
    """How many rows of logits [S, vocab] to work on together, at least one."""
    on_host = logits.device.type == "cpu"
    return max(1, (_NUMBERS_AT_ONCE if on_host else _NUMBERS_AT_ONCE_ON_DEVICE) // logits.shape[1])


def exp_weights(logits: Tensor, temperatures: Numbers) -> Tensor:
    """exp((logits - row maximum) / temperature), fp64 [R, vocab]; row maxima must be finite."""
    rows, vocab = logits.shape
    width = -(-vocab // _ALIGNMENT) * _ALIGNMENT
    weights = torch.empty((rows, width), dtype=torch.float64, device=logits.device)[:, :vocab]
    torch.div(logits.double(), sent(temperatures, logits)[:, None], out=weights)
    weights -= weights.amax(dim=-1, keepdim=True)
    # A CPU's vector code treats numbers by their place; a device does not, and launches cost there.
    for part in weights if logits.device.type == "cpu" else (weights,):
        part.exp_()
    return weights


def running_sums(weights: Tensor) -> Tensor:
    """Sums of the numbers up to each, [R, n], which never fall; of a row by itself, bit for bit.

    torch's `cumsum` along rows is that on a CPU. On CUDA it cuts rows by their number, and adds a
    single one up in the order in which parts of it happen to be ready.
    """
    return _two_level_sums(weights) if weights.device.type == "cuda" else weights.cumsum(dim=-1)


def _two_level_sums(weights: Tensor) -> Tensor:
    """One after the other within tiles, tiles one after the other.

    Along a dimension that is not the last one torch gives each thread of a card a sequence of its
    own. A number of 0 adds nothing anywhere, so no draw can fall on it.
    """
    rows, n = weights.shape
    tiles = max(2, -(-n // _TILE))  # of one tile of one row torch would make a single sequence
    padded = torch.nn.functional.pad(weights, (0, tiles * _TILE - n))
    sums = padded.reshape(rows, tiles, _TILE).transpose(1, 2).contiguous().cumsum(dim=1)
    ends = sums[:, -1, :, None].expand(rows, tiles, 2).contiguous().cumsum(dim=1)
    sums[:, :, 1:] += ends[:, None, :-1, 0]
    return sums.transpose(1, 2).reshape(rows, tiles * _TILE)[:, :n].contiguous()


def drop_unlikely(
    logits: Tensor, weights: Tensor, top_k: Ids, top_p: Numbers, min_p: Numbers
) -> None:
    """Set the weights [R, vocab] of tokens that top_k (-1: off), top_p and min_p drop to 0."""
    vocab = logits.shape[1]
    top_k = np.where((top_k < 0) | (top_k > vocab), vocab, top_k)
    totals = running_sums(weights)[:, -1]
    widths = [width for width in _WIDTHS if width < vocab] + [vocab]
    # The first width that can show the border of top_k; each row goes its own way from there.
    levels = np.array([next(i for i, w in enumerate(widths) if _fits(k, w, vocab)) for k in top_k])
    pending = np.arange(len(top_k))
    for level, width in enumerate(widths):
        here = pending[levels[pending] <= level]
        if not len(here):
            continue
        chosen = sent(here, logits)
        part = weights[chosen]
        kept, ids, settled = _kept_of_best(
            logits[chosen],
            part,
            totals[chosen],
            width,
            *(sent(values[here], logits) for values in (top_k, top_p, min_p)),
        )
        dropped = torch.ones_like(part, dtype=torch.bool).scatter_(-1, ids, ~kept)
        weights[chosen] = part.masked_fill_(dropped & settled[:, None], 0.0)
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
        tied = (values[:, count - 1] == values[:, -1]).nonzero()[:, 0]
        if len(tied):
            ids[tied] = best(logits[tied], logits.shape[1])[1][:, :count]
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
    mass = running_sums(weights)
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
