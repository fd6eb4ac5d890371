"""Runs a batch through the model on the engine's cache memory.

Contract: the runner owns the model and its `KVCache`; `execute` writes the cache rows of every row
of the batch and returns the logits that were asked for. `ModelLike` is all that the engine needs of
a model. Called by `engine/executor.py`, one step at a time.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from headrace.core.kv import KVGroupSpec
from headrace.engine.graphs import DecodeGraphs
from headrace.engine.plan import Ints
from headrace.engine.reuse import ReuseSpec
from headrace.engine.speculation.drafts import Drafter, DraftRequest, Proposal
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch
from headrace.ops.numerics import Numerics
from headrace.platforms import Platform, Stopwatch


class SpecLike(ReuseSpec, Protocol):
    """Facts of a model that the engine uses; `ModelSpec` has them."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""
        ...

    @property
    def hidden(self) -> int:
        """Width of a hidden state."""
        ...

    @property
    def bos_id(self) -> int:
        """Token in front of every text."""
        ...

    @property
    def eos_id(self) -> int:
        """Token that ends an answer."""
        ...

    @property
    def max_position(self) -> int:
        """Tokens of prompt and answer that the model was made for."""
        ...


class ModelLike(Protocol):
    """A loaded model; `model.loader.Model` is one."""

    @property
    def spec(self) -> SpecLike:
        """Facts of the checkpoint."""
        ...

    @property
    def numerics(self) -> Numerics:
        """Numeric mode that it was loaded for."""
        ...

    @property
    def max_ngram(self) -> int:
        """How many ids back its n-grams look, at least 1."""
        ...

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """Cache rows that it keeps."""
        ...

    def forward(self, batch: Batch, cache: KVCache, /) -> Tensor:
        """Logits [S, vocab] of `batch.logit_rows`; writes the cache rows of the batch."""
        ...


class Runner:
    """Model, cache memory and the number of threads they are used with."""

    def __init__(
        self,
        model: ModelLike,
        cache: KVCache,
        platform: Platform,
        threads: int | None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """threads: of the operators; None leaves torch's number. graphs: of the decode steps."""
        self._model = model
        self._cache = cache
        self._platform = platform
        self._threads = threads
        self._graphs = graphs

    def stopwatch(self) -> Stopwatch:
        """A running one for the model's device."""
        return self._platform.stopwatch()

    def copy(self, block_pairs: Ints, slot_pairs: Ints) -> None:
        """Copy whole blocks and slots, int64 [n, 2] of (source, target), before the next step."""
        self._cache.copy_blocks(block_pairs.tolist())
        self._cache.copy_slots(slot_pairs.tolist())

    def execute(self, batch: Batch) -> Tensor:
        """Logits [S, vocab] of the batch, fp32 (fp64 in fp64 mode), until the next call."""
        threads = self._platform.threads(self._threads) if self._threads else nullcontext()
        with threads, torch.inference_mode():
            logits = None if self._graphs is None else self._graphs.run(batch)
            if logits is not None:
                return logits
            return self._model.forward(batch, self._cache)

    def draft(self, drafter: Drafter, request: DraftRequest) -> Proposal:
        """What `drafter` proposes."""
        threads = self._platform.threads(self._threads) if self._threads else nullcontext()
        with threads, torch.inference_mode():
            return drafter.draft(request, self._cache)
