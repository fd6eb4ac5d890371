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
from headrace.engine.transfers import sent
from headrace.engine.uniforms import uniforms
from headrace.engine.weights import running_sums

Ids = NDArray[np.int64]
Seeds = NDArray[np.uint64]
Numbers = NDArray[np.float64]


class Checked(NamedTuple):
    """tokens: int64 [R]. agreement: float64 [R], 1 - TV(p, q); NaN where no draft was checked."""

    tokens: Ids
    agreement: Numbers


def fresh(weights: Tensor, seeds: Seeds, positions: Ids, purpose: Purpose = Purpose.TARGET) -> Ids:
    """One id per row, drawn from its weights."""
    drawn = _first_above(running_sums(weights), uniforms(seeds, positions, purpose))
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
        chosen = sent(places, weights)
        tokens[places] = fresh(weights[chosen], seeds[places], positions[places])
    places = np.flatnonzero(drafts >= 0)
    if len(places):
        chosen = sent(places, weights)
        q = None if draft_weights is None else draft_weights[chosen]
        tokens[places], agreement[places] = _accept_or_draw(
            weights[chosen], drafts[places], q, seeds[places], positions[places]
        )
    return Checked(tokens, agreement)


def _accept_or_draw(
    p: Tensor, drafts: Ids, draft_weights: Tensor | None, seeds: Seeds, positions: Ids
) -> tuple[Ids, Numbers]:
    x = sent(drafts, p)[:, None]
    mass = running_sums(p)
    q = _covered(p, mass[:, -1:], x, draft_weights)
    accept_at = sent(uniforms(seeds, positions, Purpose.ACCEPT), p)[:, None]
    accepted = accept_at * q.gather(-1, x) < p.gather(-1, x)
    left = running_sums((p - q).clamp_(min=0.0))
    agreement = 1.0 - left[:, -1] / mass[:, -1]
    nothing = left[:, -1:] <= 0
    if _maybe(nothing):
        left = torch.where(nothing, mass, left)
    drawn = _first_above(left, uniforms(seeds, positions, Purpose.RESIDUAL))
    tokens = torch.where(accepted[:, 0], x[:, 0], drawn)
    # Ids are exact in fp64, so that one copy does.
    numbers = torch.stack((tokens.double(), agreement)).cpu().numpy()
    return numbers[0].astype(np.int64), numbers[1]


def _covered(p: Tensor, total: Tensor, x: Tensor, draft_weights: Tensor | None) -> Tensor:
    """q [R, vocab], scaled to the mass `total` [R, 1] of p."""
    q = torch.zeros_like(p) if draft_weights is None else draft_weights.to(p)
    mass = running_sums(q)[:, -1:]
    certain = mass <= 0
    if _maybe(certain):
        q = torch.where(certain, torch.zeros_like(q).scatter_(-1, x, 1.0), q)
        mass = torch.where(certain, 1.0, mass)
    return q * (total / mass)


def _first_above(cumulative: Tensor, numbers: Numbers) -> Tensor:
    targets = sent(numbers, cumulative)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def _maybe(flags: Tensor) -> bool:
    """Whether one may be set; to ask a device would be to wait for it."""
    return flags.device.type != "cpu" or bool(flags.any())
