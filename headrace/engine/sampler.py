"""Logits to token ids, row by row.

Contract: a row's token depends on its own logits, parameters, seed and position only; whatever
runs beside it changes no bit. Order: temperature, top_k (best by logit, ties to the lowest id),
top_p on the distribution renormalised after top_k, draw. The draw is the first surviving id, in id
order, whose inclusive fp64 cumulative mass exceeds u * total. Called by `engine/engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.rng import Purpose, uniform
from headrace.core.sampling import SamplingParams
from headrace.engine.outputs import NO_TOKEN_DRAWN


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row draws. position: absolute position of the token to draw, prompt included."""

    params: SamplingParams
    seed: int
    position: int


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Token ids of `rows`; logits is [S, vocab] fp32 or fp64, row i belongs to rows[i].

    A row whose highest logit is NaN or infinite gives NO_TOKEN_DRAWN; -inf marks banned ids.
    """
    if not rows:
        return []
    # amax carries NaN along and is -inf for a row without any candidate.
    drawable = torch.isfinite(logits.amax(dim=-1)).tolist()
    tokens = []
    for index, row in enumerate(rows):
        if not drawable[index]:
            tokens.append(NO_TOKEN_DRAWN)
        elif row.params.greedy:
            tokens.append(greedy_token(logits[index]))
        else:
            tokens.append(drawn_token(logits[index], row))
    return tokens


def greedy_token(logits: Tensor) -> int:
    """Id of the highest logit of [vocab], the lowest id of several."""
    return int((logits == logits.max()).nonzero()[0, 0])


def drawn_token(logits: Tensor, row: SamplingRow) -> int:
    """Draw from the logits [vocab] of one row."""
    ids, weights = surviving_weights(logits, row.params)
    cumulative = weights.cumsum(0)
    target = uniform(row.seed, row.position, Purpose.TARGET) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    return int(ids[min(index, len(ids) - 1)])


def surviving_weights(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids (int64, ascending) that can be drawn and their weights (fp64, not normalised, > 0)."""
    ids = top_k_ids(logits, params.top_k)
    scaled = logits[ids].double() / params.temperature
    weights = (scaled - scaled.max()).exp()
    if params.top_p < 1.0:
        # Ids ascend, so a stable sort leaves equal weights in id order.
        sorted_weights, order = weights.sort(descending=True, stable=True)
        mass = sorted_weights.cumsum(0)
        kept_after_first = order[1:][mass[:-1] <= params.top_p * mass[-1]]
        kept = torch.cat((order[:1], kept_after_first)).sort().values
        ids, weights = ids[kept], weights[kept]
    positive = weights > 0
    return ids[positive], weights[positive]


def top_k_ids(logits: Tensor, k: int) -> Tensor:
    """The k best ids of [vocab] by (logit descending, id ascending), in ascending order."""
    vocab = len(logits)
    if k == -1 or k >= vocab:
        return torch.arange(vocab, device=logits.device)
    border = logits.topk(k).values[-1]
    above = logits > border
    at_border = (logits == border).nonzero()[:, 0]
    missing = k - int(above.sum())
    return torch.cat((above.nonzero()[:, 0], at_border[:missing])).sort().values
