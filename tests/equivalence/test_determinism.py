"""Deterministic mode: the same request gives the same tokens, whatever the batch and the cache.

Requests run alone without drafts, each on an engine of its own, then in batches of 1 to 32 mixed
ones on engines whose prefix cache stays warm and that speculate; chunk sizes, arrival, aborts and
preemption differ from batch to batch. Tokens must be equal, and the logits that they were drawn
from bit for bit (report DT-1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.core.output import TokenChunk
from headrace.core.request import Request
from headrace.core.sampling import Coupling, SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.load import numerics_of
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Curve
from headrace.engine.speculation.drafts import Drafter
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.platforms import Platform, platform_for
from tests.bench_records import write_record

from .speculation import DRAFTS, Oracle, tiny_with_drafts

Context = tuple[int, ...]

MODE = {"deterministic": True, "max_model_len": 512, "num_blocks": 120, "max_num_seqs": 33}
RUNS = 50  # of each setting
SWEEP_RUNS = 500  # of each
# Policies of speculation, each with how good its drafts are: they must change nothing.
SETTINGS = (("off", "noise"), ("fixed:3", "mixed"), ("fixed:5", "mixed"), ("adaptive", "mixed"))
# Rows have a price, so that `adaptive` verifies more or less according to who else is there.
COST = (Curve.linear(0.01, 0.0005), Curve.linear(0.001, 0.0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, platform: Platform) -> Model:
    directory = tiny_with_drafts(tmp_path_factory.mktemp("tiny-5") / "model")
    return load_model(directory, numerics_of(EngineConfig(**MODE)), platform=platform)


class Recorder:
    """A model that keeps the logits it gave, by all ids up to their row."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.spec, self.numerics, self.max_ngram = model.spec, model.numerics, model.max_ngram
        self.kv_groups, self.draft = model.kv_groups, model.draft
        self.engine: Engine | None = None
        self.logits: dict[Context, Tensor] = {}

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        assert self.engine is not None
        out = self._model.forward(batch, cache)
        ids = batch.token_ids.tolist()
        for row, logits in zip(batch.logit_rows.tolist(), out, strict=True):
            share = int(batch.sequence[row])
            start = int(batch.q_start[share])
            known = self.engine.scheduler.tokens[int(batch.slots[share]), :start].tolist()
            first = row - (int(batch.positions[row]) - start)
            self.logits[(*known, *ids[first : row + 1])] = logits.clone()
        return out


@dataclass
class Alone:
    request: Request
    tokens: list[int]
    logits: dict[Context, Tensor]  # that the tokens were drawn from


def requests_of(count: int) -> list[Request]:
    """Greedy and drawn, with and without seeds; some behind one long prefix."""
    rng = np.random.default_rng(0)
    prefix = tuple(rng.integers(0, 512, 256).tolist())
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 30},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"min_p": 0.05, "coupling": Coupling.GUMBEL},
    ]
    out = []
    for number in range(count):
        prompt = tuple(rng.integers(0, 512, int(rng.integers(1, 40))).tolist())
        if number % 4 == 1:
            prompt = prefix + prompt
        params = SamplingParams(
            **kinds[number % len(kinds)],
            seed=number if number % 3 else None,
            max_tokens=int(rng.integers(2, 8)),
            ignore_eos=number % 4 > 0,
        )
        out.append(Request(f"r{number}", prompt, params))
    return out


def engine_of(
    model: Model, drafter: Drafter | None = None, **settings: object
) -> tuple[Engine, Recorder]:
    recorder = Recorder(model)
    config = EngineConfig(**{**MODE, "speculation": "off", **settings})
    platform = platform_of(model)
    engine = Engine(config, recorder, drafter=drafter, cost=StepCost(*COST), platform=platform)
    recorder.engine = engine
    return engine, recorder


def platform_of(model: Model) -> Platform:
    return platform_for(model.device)


def run_alone(model: Model, request: Request) -> Alone:
    engine, recorder = engine_of(model)
    engine.add(request)
    tokens = [token for chunk in _chunks(engine) for token in chunk.tokens]
    known = (*request.prompt_token_ids, *tokens)
    length = len(request.prompt_token_ids)
    contexts = [known[: length + place] for place in range(len(tokens))]
    return Alone(request, tokens, {context: recorder.logits[context] for context in contexts})


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Alone]:
    return [run_alone(model, request) for request in requests_of(16)]


def check(model: Model, pool: list[Alone], policy: str, kind: str, runs: int) -> dict[str, object]:
    """Compare `runs` requests in batches with their runs alone; what was done."""
    rng = np.random.default_rng(1)
    length = 3 if policy == "fixed:3" else DRAFTS
    known = [(*one.request.prompt_token_ids, *one.tokens) for one in pool]
    drafter = Oracle(kind, length, model.spec.vocab_size, known)
    engine, recorder = engine_of(model, drafter, speculation=policy)
    batch, wanted, verified, accepted = 0, runs, 0, 0
    while runs > 0:
        if batch % 4 == 0:
            budget = int(rng.choice([33, 64, 300]))
            engine, recorder = engine_of(
                model, drafter, speculation=policy, max_num_batched_tokens=budget
            )
        size = min(runs, 32 if batch % 3 == 0 else int(rng.integers(1, 32)))
        chosen = [pool[int(place)] for place in rng.integers(0, len(pool), size)]
        check_batch(engine, recorder, chosen, rng)
        runs -= size
        batch += 1
        if batch % 4 == 0 or runs <= 0:
            verified += sum(engine.stats().verified_drafts)
            accepted += sum(engine.stats().accepted_drafts)
    assert (verified == 0) == (policy == "off")
    assert (accepted == 0) == (policy == "off")
    return {"equal_runs": wanted, "batches": batch, "verified": verified, "accepted": accepted}


def check_batch(
    engine: Engine, recorder: Recorder, chosen: list[Alone], rng: np.random.Generator
) -> None:
    recorder.logits.clear()
    waiting = [replace(one.request, request_id=f"n{n}") for n, one in enumerate(chosen)]
    more = replace(chosen[0].request, request_id="aborted")
    engine.add(more)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in (more, *waiting)}
    step, preempted = 0, False
    while waiting or engine.has_work():
        while waiting and (step == 0 or rng.integers(3)):
            engine.add(waiting.pop())
        for chunk in engine.step():
            tokens[chunk.request_id] += chunk.tokens
        if step == 2:
            engine.abort("aborted")
        if tokens["n0"] and not preempted:
            engine.scheduler.preempt("n0", 0.0)  # of no effect once it has ended
            preempted = True
        step += 1
        assert step < 2000
    for number, one in enumerate(chosen):
        assert tokens[f"n{number}"] == one.tokens, f"{one.request} beside {len(chosen)}"
        for context, logits in one.logits.items():
            assert torch.equal(recorder.logits[context], logits), f"{len(context)} tokens"


def _chunks(engine: Engine) -> Iterator[TokenChunk]:
    while engine.has_work():
        yield from engine.step()


@pytest.mark.parametrize(("policy", "kind"), SETTINGS)
def test_alone_and_in_mixed_batches(
    model: Model, alone: list[Alone], policy: str, kind: str
) -> None:
    check(model, alone, policy, kind, RUNS)


@pytest.mark.sweep
def test_alone_and_in_many_mixed_batches(model: Model, alone: list[Alone]) -> None:
    """The record is docs/bench/determinism.json."""
    done = {policy: check(model, alone, policy, kind, SWEEP_RUNS) for policy, kind in SETTINGS}
    write_record("determinism.json", "determinism", prompts=len(alone), settings=done)


def test_requests_without_a_seed_share_the_engines(model: Model) -> None:
    """Same request, same tokens: also on another engine and after others; `seed` changes them."""

    def tokens_of(requests: list[Request], **settings: object) -> list[list[int]]:
        engine = Engine(EngineConfig(**{**MODE, **settings}), model)
        outputs = []
        for request in requests:
            engine.add(request)
            outputs.append([token for chunk in _chunks(engine) for token in chunk.tokens])
        return outputs

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [Request(str(n), (5, 6, 7), params) for n in range(3)]
    first, second, third = tokens_of(requests)
    assert first == second == third
    assert tokens_of(requests[:1]) == [first]
    assert tokens_of(requests[:1], seed=1) != [first]
    assert len(set(map(tuple, tokens_of(requests, deterministic=False, seed=1)))) == 3


def test_a_model_with_other_operators_is_refused(tiny_dir: Path) -> None:
    fast = load_model(tiny_dir, numerics_of(EngineConfig()))
    with pytest.raises(ConfigError, match="batch-invariant operators") as caught:
        Engine(EngineConfig(**MODE), fast)
    assert caught.value.param == "engine.deterministic"
