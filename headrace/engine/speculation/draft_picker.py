"""Drafts as the target would draw them: the `pick` of `Model.draft`.

Contract: a `DraftPicker` draws the drafts of one block, place after place, for R requests. Each is
drawn with the request's own parameters: penalties (the drafts before it counted), bias, allowed and
banned ids, min_tokens, temperature, top_k, top_p, min_p; grammar masks are the target's alone, but
tokens that a grammar forces are known and stand in their places.
Greedy rows take the highest, `gumbel` rows use the noise of the target, `maximal` rows numbers of
(seed, anchor, position), where the anchor is the position before the block; what those were drawn
from is kept in `weights`. The state does not change. Used by the engine's drafting loop.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.rng import Purpose
from headrace.engine.edits import Prefixes, edited
from headrace.engine.sampler import noisy_tokens, shaped_weights, taken
from headrace.engine.sampling_state import DRAWS, GUMBEL, SamplerState
from headrace.engine.speculation import rejection
from headrace.engine.transfers import sent
from headrace.engine.uniforms import draft_seeds

Ids = NDArray[np.int64]

NO_DRAFT = -1


class DraftPicker:
    """Call it with (place, logits) for the places 0, 1, ... of one block."""

    def __init__(
        self, state: SamplerState, rows: Ids, positions: Ids, known: Ids | None = None
    ) -> None:
        """rows: int64 [R], table rows. positions: int64 [R], absolute ones of the first drafts.

        known: int64 [R, places], drafts that are certain, NO_DRAFT: to be drawn; None: all are.
        """
        self._known = known
        self._state = state
        self._rows = rows
        self._positions = positions
        flags = state.flags[rows]
        self._draws = (flags & DRAWS) != 0
        self._noisy = (flags & (DRAWS | GUMBEL)) == (DRAWS | GUMBEL)
        self._rejects = self._draws & ~self._noisy
        # Numbers of their own in every round, see `rng.draft_seed`.
        self._seeds = draft_seeds(state.seeds[rows], positions - 1)
        self._ids: list[Ids] = []
        self._weights: list[Tensor] = []

    @property
    def weights(self) -> Tensor | None:
        """What the drafts so far were drawn from, not normalised: fp32 [R, drafts, vocab], zeros in
        rows that are greedy or of the `gumbel` coupling. None: no row is of another kind.
        """
        return torch.stack(self._weights, dim=1) if self._weights else None

    def __call__(self, place: int, logits: Tensor) -> Tensor:
        """Draft number `place` of each row, int64 [R], given logits [R, vocab]; not changed.

        A row whose highest logit is not finite gives some id, as one that was certain. Raises
        ValueError for a place that is not the next one.
        """
        if place != len(self._ids):
            raise ValueError(f"Place {len(self._ids)} is to be drafted next, not {place}.")
        positions = self._positions + place
        if self._state.flags[self._rows].any():
            logits = edited(logits, self._state, self._rows, positions, prefixes=self._prefixes())
        highest, best = logits.max(dim=-1)
        # The id, or -1 - id where nothing can be drawn: both in one copy.
        told = torch.where(torch.isfinite(highest), best, -1 - best).cpu().numpy()
        finite = told >= 0
        ids = np.where(finite, told, -1 - told)
        if self._draws.any():
            noisy = np.flatnonzero(finite & self._noisy)
            if len(noisy):
                ids[noisy] = noisy_tokens(
                    taken(logits, noisy), self._state, self._rows[noisy], positions[noisy]
                )
            drawn = finite & self._rejects
            if self._known is not None:
                drawn &= self._known[:, place] == NO_DRAFT
            self._draw_weighted(ids, logits, positions, drawn)
        if self._known is not None:
            ids = np.where(self._known[:, place] == NO_DRAFT, ids, self._known[:, place])
        self._ids.append(ids)
        return sent(ids, logits)

    def _prefixes(self) -> Prefixes | None:
        if not self._ids:
            return None
        begin = np.arange(len(self._rows)) * len(self._ids)
        return Prefixes(np.stack(self._ids, axis=1).ravel(), begin, begin + len(self._ids))

    def _draw_weighted(
        self, ids: Ids, logits: Tensor, positions: Ids, rows: NDArray[np.bool_]
    ) -> None:
        if not self._rejects.any():
            return
        kept = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        index = np.flatnonzero(rows)
        if len(index):
            weights = shaped_weights(taken(logits, index), self._state, self._rows[index])
            # Drawn from what is kept: the check must know the draft's distribution exactly.
            rounded = weights.float()
            kept[sent(index, kept)] = rounded
            ids[index] = rejection.fresh(
                rounded.double(), self._seeds[index], positions[index], Purpose.DRAFT
            )
        self._weights.append(kept)


def draft_picker(
    state: SamplerState, rows: Ids, positions: Ids, known: Ids | None = None
) -> DraftPicker:
    """A picker for one block; see `DraftPicker`."""
    return DraftPicker(state, rows, positions, known)
