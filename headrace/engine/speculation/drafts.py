"""Who drafts, and where drafts wait until they are verified.

Contract: a `Drafter` proposes the next tokens of some rows after each step; `ModelDrafter` is the
draft module of a checkpoint, tests have scripted ones. What it proposes may be anything: only the
speed depends on it. `DraftPool` keeps the newest proposal of each table row until the next step of
that row. Owned by `engine/executor.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.engine.plan import Floats, Ints, Tokens
from headrace.engine.speculation.confidence import MOST_LOGIT
from headrace.engine.speculation.draft_picker import NO_DRAFT, DraftPicker
from headrace.engine.transfers import sent
from headrace.errors import InternalError
from headrace.kv.cache import KVCache
from headrace.model.deepseek.dspark import Drafts, Pick


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What to draft for: R rows whose newest token has no cache row yet.

    rows: int64 [R], table rows (= slots). lengths: int64 [R], known tokens of each. tokens: int32
    [num_rows, max_tokens], known ids by table row, to be read only. pick: draws one place of all
    rows as the requests want it; use it once per place, in order.
    """

    rows: Ints
    lengths: Ints
    tokens: Tokens
    pick: DraftPicker


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of R rows, G each.

    token_ids: int64 [R, G]. features: float64 [R, G], what `Controller.confidences` turns into the
    chance of each to be accepted if those before it are; they must not depend on the draft itself.
    Of a checkpoint: raw outputs of its confidence head. weights: [R, G, vocab], what they
    were drawn from, not normalised; a row of zeros, or None: they were not drawn at random.
    """

    token_ids: Ints
    features: Floats
    weights: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens; called in the executor's thread."""

    @property
    def length(self) -> int:
        """G, drafts of a proposal."""
        ...

    def draft(self, request: DraftRequest, cache: KVCache, /) -> Proposal:
        """The tokens that may follow."""
        ...


class DraftingModel(Protocol):
    """A model with a draft module; `model.deepseek.model.Model` is one."""

    def draft(
        self,
        next_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        *,
        length: int | None = None,
        pick: Pick = ...,
    ) -> Drafts:
        """See there."""
        ...


class ModelDrafter:
    """The draft module of a checkpoint. length: drafts of a block, at most its block size."""

    def __init__(self, model: DraftingModel, length: int) -> None:
        self._model = model
        self._length = length

    @property
    def length(self) -> int:
        """Drafts of a block."""
        return self._length

    def draft(self, request: DraftRequest, cache: KVCache) -> Proposal:
        """One block per row; its window is that of the rows computed so far."""
        newest = request.lengths - 1
        drafts = self._model.draft(
            torch.from_numpy(request.tokens[request.rows, newest].astype(np.int64)),
            torch.from_numpy(newest),
            torch.from_numpy(request.rows),
            cache,
            length=self._length,
            pick=request.pick,
        )
        return Proposal(
            drafts.token_ids[:, 1:].cpu().numpy(),
            drafts.confidence.double().cpu().numpy(),
            request.pick.weights,
        )


class DraftPool:
    """Newest drafts by table row, the tokens that a grammar forces in front.

    count: int64 [num_rows], of all that is there: forced tokens, and the rest of the G drafts where
    some were made. forced: int64 [num_rows]. token_ids: int64 [num_rows, >= G]. features: float64
    [num_rows, G], as in `Proposal`.
    """

    def __init__(self, num_rows: int, length: int, max_forced: int = 0) -> None:
        """length: G. max_forced: forced tokens of a row at most."""
        self._places = np.arange(length)
        self.count: Ints = np.zeros(num_rows, dtype=np.int64)
        self.forced: Ints = np.zeros(num_rows, dtype=np.int64)
        self.token_ids: Ints = np.zeros((num_rows, max(length, max_forced)), dtype=np.int64)
        self.features: Floats = np.zeros((num_rows, length))
        # Only drafts drawn at random for the `maximal` coupling have weights: reserved when needed.
        self._weights: Tensor | None = None
        self._weighted = np.zeros(num_rows, dtype=np.bool_)

    def clear(self, rows: Ints) -> None:
        """Drop the drafts of these rows."""
        self.count[rows] = self.forced[rows] = 0
        self.features[rows] = 0.0
        self._weighted[rows] = False

    def force(self, row: int, run: Sequence[int]) -> None:
        """A row without drafts goes on by `run` whatever the logits are."""
        self.count[row] = self.forced[row] = len(run)
        self.token_ids[row, : len(run)] = run
        self.features[row, : len(run)] = MOST_LOGIT

    def known(self, rows: Ints) -> Ints:
        """Forced tokens of the first G places, int64 [R, G]; NO_DRAFT in the others."""
        ids = self.token_ids[rows, : self._places.size]
        return np.where(self._places < self.forced[rows, None], ids, NO_DRAFT)

    def put(self, rows: Ints, proposal: Proposal) -> None:
        """Keep a proposal for these rows. Raises InternalError where its shapes are wrong."""
        shape = (rows.size, self._places.size)
        weights = proposal.weights
        if (
            proposal.token_ids.shape != shape
            or proposal.features.shape != shape
            or (weights is not None and weights.shape[:2] != shape)
        ):
            raise InternalError(f"The drafter was asked for {shape} drafts and gave others.")
        self.count[rows] = np.maximum(self.forced[rows], shape[1])
        place, drafted = np.nonzero(self._places >= self.forced[rows, None])
        self.token_ids[rows[place], drafted] = proposal.token_ids[place, drafted]
        self.features[rows[place], drafted] = proposal.features[place, drafted]
        self._weighted[rows] = weights is not None
        if weights is not None:
            if self._weights is None:
                size = (len(self.count), *weights.shape[1:])
                self._weights = torch.zeros(size, dtype=weights.dtype, device=weights.device)
            self._weights[sent(rows, weights)] = weights

    def weights(self, rows: Ints, places: Ints) -> Tensor | None:
        """What drafts were drawn from, [T, vocab]: rows, places int64 [T], place -1: no draft."""
        known = self._weighted[rows] & (places >= self.forced[rows]) & (places < self._places.size)
        if self._weights is None or not known.any():
            return None
        places = np.where(known, places, 0)
        found = self._weights[sent(rows, self._weights), sent(places, self._weights)]
        found[sent(np.flatnonzero(~known), found)] = 0.0
        return found
