"""Draws of the `maximal` coupling: with drafts, rejection sampling.

Contract: weights are not normalised, fp64 [R, vocab]. A draft x ~ q is accepted with probability
min(1, p(x) / q(x)), else the token is drawn from max(p - q, 0), or from p if nothing of that is
left; so the token is distributed as p whatever q is, and is x with the highest possible probability
1 - TV(p, q) (Leviathan et al. 2023, Chen et al. 2023). Draws take the first id whose inclusive
cumulative mass exceeds u * total. u is a number of (seed, position, purpose); rows change no bit of
each other. Used by `engine/sampler.py` and `engine/speculation/draft_picker.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.rng import Purpose
from headrace.engine.uniforms import uniforms

Ids = NDArray[np.int64]
Seeds = NDArray[np.uint64]
Numbers = NDArray[np.float64]


class Checked(NamedTuple):
    """tokens: int64 [R]. agreement: float64 [R], 1 - TV(p, q); NaN where no draft was checked."""

    tokens: Ids
    agreement: Numbers


def fresh(weights: Tensor, seeds: Seeds, positions: Ids, purpose: Purpose = Purpose.TARGET) -> Ids:
    """One id per row, drawn from its weights."""
    drawn = _first_above(weights.cumsum(dim=-1), uniforms(seeds, positions, purpose))
    tokens: Ids = drawn.cpu().numpy()
    return tokens


def check(
    weights: Tensor, drafts: Ids, draft_weights: Tensor | None, seeds: Seeds, positions: Ids
) -> Checked:
    """Accept the drafts, int64 [R], or draw other tokens; a draft below 0: draw freshly.

    draft_weights: [R, vocab], what each draft was drawn from; zeros or None: it was certain.
    """
    tokens = np.empty(len(drafts), dtype=np.int64)
    agreement = np.full(len(drafts), np.nan)
    places = np.flatnonzero(drafts < 0)
    if len(places):
        chosen = torch.from_numpy(places).to(weights.device)
        tokens[places] = fresh(weights[chosen], seeds[places], positions[places])
    places = np.flatnonzero(drafts >= 0)
    if len(places):
        chosen = torch.from_numpy(places).to(weights.device)
        q = None if draft_weights is None else draft_weights[chosen]
        tokens[places], agreement[places] = _accept_or_draw(
            weights[chosen], drafts[places], q, seeds[places], positions[places]
        )
    return Checked(tokens, agreement)


def _accept_or_draw(
    p: Tensor, drafts: Ids, draft_weights: Tensor | None, seeds: Seeds, positions: Ids
) -> tuple[Ids, Numbers]:
    x = torch.from_numpy(drafts).to(p.device)[:, None]
    mass = p.cumsum(dim=-1)
    q = _covered(p, mass[:, -1:], x, draft_weights)
    accept_at = _like(p, uniforms(seeds, positions, Purpose.ACCEPT))[:, None]
    accepted = accept_at * q.gather(-1, x) < p.gather(-1, x)
    left = (p - q).clamp_(min=0.0).cumsum(dim=-1)
    agreement = 1.0 - left[:, -1] / mass[:, -1]
    nothing = left[:, -1:] <= 0
    if nothing.any():
        left = torch.where(nothing, mass, left)
    drawn = _first_above(left, uniforms(seeds, positions, Purpose.RESIDUAL))
    tokens = torch.where(accepted[:, 0], x[:, 0], drawn)
    return tokens.cpu().numpy(), agreement.cpu().numpy()


def _covered(p: Tensor, total: Tensor, x: Tensor, draft_weights: Tensor | None) -> Tensor:
    """q [R, vocab], scaled to the mass `total` [R, 1] of p."""
    q = torch.zeros_like(p) if draft_weights is None else draft_weights.to(p)
    mass = q.cumsum(dim=-1)[:, -1:]
    certain = mass <= 0
    if certain.any():
        q = torch.where(certain, torch.zeros_like(q).scatter_(-1, x, 1.0), q)
        mass = torch.where(certain, 1.0, mass)
    return q * (total / mass)


def _first_above(cumulative: Tensor, numbers: Numbers) -> Tensor:
    targets = _like(cumulative, numbers)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def _like(weights: Tensor, numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers).to(weights.device)
