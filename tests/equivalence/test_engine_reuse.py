"""On the model itself: what is resumed after a prefix hit, forked or preempted equals a cold run.

fp64 with plain caches: equal tokens, logits within 1e-10. fp32 with the batch-invariant operators
and the released quantised caches: bit for bit. Decoder truncation is on, as in serving, and off.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.rng import choice_seed
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.load import numerics_of
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.platforms import Platform

MODES = {
    "exact": ({"dtype": "float64", "kv_quant": False}, 1e-10),
    "bitwise": ({"dtype": "float32", "kv_quant": True, "batch_invariant": True}, 0.0),
}
SEED = 77
PARAMS = SamplingParams(temperature=1.0, seed=SEED, max_tokens=6, ignore_eos=True)


class Capture:
    """A model that keeps the logits it gave."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.spec, self.numerics, self.max_ngram = model.spec, model.numerics, model.max_ngram
        self.kv_groups = model.kv_groups
        self.logits: list[Tensor] = []

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        out = self._model.forward(batch, cache)
        self.logits += list(out.clone())
        return out


class Bench:
    """Engines of one numeric mode over one loaded model."""

    def __init__(self, directory: Path, mode: str, platform: Platform) -> None:
        self.settings, self.atol = MODES[mode]
        self._platform = platform
        numerics = numerics_of(EngineConfig(**self.settings))
        self._model = load_model(directory, numerics, platform=platform)

    def engine(self, **changes: object) -> tuple[Engine, Capture]:
        model = Capture(self._model)
        changes = {"replay": "exact", "num_blocks": 60, "max_model_len": 900, **changes}
        config = EngineConfig(**self.settings, **changes)
        return Engine(config, model, platform=self._platform), model

    def assert_same(self, ours: list[Tensor], wanted: list[Tensor]) -> None:
        assert len(ours) == len(wanted) > 0
        for a, b in zip(ours, wanted, strict=True):
            assert torch.isfinite(b).all()
            if self.atol == 0:
                assert torch.equal(a, b)
            else:
                assert float((a - b).abs().max()) <= self.atol


@pytest.fixture(scope="module", params=list(MODES))
def bench(request: pytest.FixtureRequest, tiny_dir: Path, platform: Platform) -> Bench:
    return Bench(tiny_dir, request.param, platform)


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 512, length).tolist())


def serve(engine: Engine, request: Request) -> dict[int, list[int]]:
    """Tokens by choice."""
    engine.add(request)
    tokens: dict[int, list[int]] = {}
    while engine.has_work():
        for chunk in engine.step():
            tokens.setdefault(chunk.choice, []).extend(chunk.tokens)
    assert engine.stats().free_blocks == engine.stats().total_blocks
    return tokens


@pytest.mark.parametrize("truncate", ["on", "off"])
@pytest.mark.parametrize("budget", [96, 512])
def test_a_request_that_resumes_equals_a_cold_one(bench: Bench, truncate: str, budget: int) -> None:
    changes = {"truncate": truncate, "max_num_batched_tokens": budget}
    shared = ids(450, 1)
    request = Request("a", shared + ids(40, 2), PARAMS)
    cold, cold_model = bench.engine(**changes, prefix_cache=False)
    wanted = serve(cold, request)
    warm, model = bench.engine(**changes)
    serve(warm, Request("first", shared + ids(9, 3), PARAMS))
    model.logits.clear()
    assert serve(warm, request) == wanted
    stats = warm.stats()
    assert stats.prefix_hit_tokens == 384
    assert stats.replayed_rows == model.spec.replay_rows("exact", truncate == "on") >= 128
    bench.assert_same(model.logits, cold_model.logits)


def test_choices_equal_single_requests(bench: Bench) -> None:
    prompt = ids(130, 4)
    engine, _ = bench.engine()
    params = SamplingParams(temperature=1.0, seed=SEED, max_tokens=5, ignore_eos=True, n=3)
    outputs = serve(engine, Request("a", prompt, params))
    for choice in range(3):
        alone, _ = bench.engine(prefix_cache=False)
        single = SamplingParams(
            temperature=1.0, seed=choice_seed(SEED, choice), max_tokens=5, ignore_eos=True
        )
        assert serve(alone, Request("a", prompt, single))[0] == outputs[choice]


def test_preempted_twice_with_the_cache_on(bench: Bench) -> None:
    request = Request("a", ids(300, 5), PARAMS)
    cold, cold_model = bench.engine(prefix_cache=False)
    wanted = serve(cold, request)
    engine, model = bench.engine(overlap=False)
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token for chunk in engine.step() for token in chunk.tokens]
        if len(tokens) in (2, 4) and engine.stats().preemptions < len(tokens) / 2:
            engine.scheduler.preempt("a", 0.0)
    assert engine.stats().preemptions == 2
    assert {0: tokens} == wanted
    bench.assert_same(model.logits, cold_model.logits)
