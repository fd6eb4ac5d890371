"""A tiny-8 checkpoint and an engine that keeps the logits of every context it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.engine.engine import Engine
from headrace.engine.load import numerics_of
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.platforms import CpuPlatform, Platform

Context = tuple[int, ...]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny-8 checkpoint in the released quantised layout."""
    directory = tmp_path_factory.mktemp("tiny-8") / "model"
    write_tiny(directory, preset="tiny-8", seed=1)
    return directory


class RecordingModel:
    """A model that remembers, per context (all ids up to a row), the logits it gave."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.spec = model.spec
        self.numerics = model.numerics
        self.max_ngram = model.max_ngram
        self.kv_groups = model.kv_groups
        self.logits: dict[Context, Tensor] = {}
        self._history: dict[int, dict[int, int]] = {}

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        out = self._model.forward(batch, cache)
        slots = batch.slots[batch.sequence].tolist()
        positions, tokens = batch.positions.tolist(), batch.token_ids.tolist()
        for slot, position, token in zip(slots, positions, tokens, strict=True):
            self._history.setdefault(slot, {})[position] = token
        for row, logits in zip(batch.logit_rows.tolist(), out, strict=True):
            known = self._history[slots[row]]
            self.logits[tuple(known[p] for p in range(positions[row] + 1))] = logits.clone()
        return out


class Outcome:
    """Tokens per request id, and logits per context, of one run."""

    def __init__(self, tokens: dict[str, list[int]], logits: dict[Context, Tensor]) -> None:
        self.tokens = tokens
        self.logits = logits


Serve = Callable[..., Outcome]


@pytest.fixture(scope="session")
def platform() -> Platform:
    """Where models and engines are; tests/gpu has another one."""
    return CpuPlatform()


@pytest.fixture(scope="session")
def serve(tiny_dir: Path, platform: Platform) -> Serve:
    """serve(config, requests, arrive_every=0): run requests on a fresh engine to their end."""
    models: dict[object, Model] = {}

    def run(config: EngineConfig, requests: list[Request], arrive_every: int = 0) -> Outcome:
        numerics = numerics_of(config)
        if numerics not in models:
            models[numerics] = load_model(tiny_dir, numerics, platform=platform)
        model = RecordingModel(models[numerics])
        engine = Engine(config, model, platform=platform)
        tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
        waiting, steps = list(requests), 0
        while waiting or engine.has_work():
            while waiting and (not arrive_every or steps % arrive_every == 0):
                engine.add(waiting.pop(0))
                if arrive_every:
                    break
            for chunk in engine.step():
                assert chunk.index == len(tokens[chunk.request_id])
                tokens[chunk.request_id] += chunk.tokens
            steps += 1
            assert steps < 5000
        return Outcome(tokens, model.logits)

    return run


def assert_same(ours: Outcome, alone: Outcome, atol: float) -> None:
    """Every request of `alone` has the same tokens in `ours`, every shared context its logits."""
    for request_id, tokens in alone.tokens.items():
        assert ours.tokens[request_id] == tokens
    shared = [c for c in alone.logits if c in ours.logits]
    assert len(shared) >= sum(len(t) for t in alone.tokens.values())
    for context in shared:
        a, b = ours.logits[context], alone.logits[context]
        if atol == 0:
            assert torch.equal(a, b), f"bits differ after {len(context)} tokens"
        else:
            assert float((a - b).abs().max()) <= atol, f"after {len(context)} tokens"
