"""Decode steps of fixed shapes in an engine, on a CPU: recorded work is called each time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.sampling import SamplingParams
from headrace.engine.graphs import MAX_GRAPHS, DecodeGraphs, ladder
from headrace.engine.llm import LLM
from headrace.engine.step_cost import measure_cost
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model, random_model
from headrace.model.spec import ModelSpec
from headrace.model.tiny import write_tiny
from headrace.model.tiny_presets import preset_config
from headrace.ops.numerics import Numerics
from headrace.platforms import CpuPlatform


@pytest.mark.parametrize(
    ("first", "most", "factor", "steps"),
    [
        ((1, 2, 4, 8), 40, 2, (1, 2, 4, 8, 16, 32, 40)),
        ((1, 2, 4, 8), 3, 2, (1, 2, 3)),
        ((1, 2, 4, 8), 8, 2, (1, 2, 4, 8)),
        ((8,), 3, 4, (3,)),
        ((8,), 1000, 4, (8, 32, 128, 512, 1000)),
        ((1,), 1, 1, (1,)),
        ((1,), 6, 6, (1, 6)),
    ],
)
def test_ladder(first: tuple[int, ...], most: int, factor: int, steps: tuple[int, ...]):
    assert ladder(first, most, factor) == steps


@pytest.fixture(scope="module", params=["tiny-8", "v4-tiny"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("graphs") / "m"
    write_tiny(found, preset=request.param, seed=3)
    return found


def answers(folder: Path, **settings: Any) -> list[Any]:
    prompts = np.random.default_rng(3).integers(3, 500, (5, 140)).tolist()
    prompts = [prompt[: 20 + 30 * n] for n, prompt in enumerate(prompts)]
    prompts.append([*prompts[-1], 7, 8, 9])  # a hit
    params = [
        SamplingParams(
            temperature=t, seed=5, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=p
        )
        for t, p in ((0.0, None), (1.0, None), (0.7, 1))
    ]
    config = EngineConfig(
        dtype="float64", kv_quant=False, replay="exact", max_num_seqs=4, seed=1, **settings
    )
    with LLM(folder, config) as llm:
        each = [params[n % 3] for n in range(len(prompts))]
        return [(a.token_ids, a.logprobs) for a in llm.generate(prompts, each)]


@pytest.mark.parametrize(
    ("folder", "speculation"),
    [("tiny-8", "off"), ("tiny-8", "fixed:2"), ("tiny-8", "adaptive"), ("v4-tiny", "off")],
    indirect=["folder"],
)
def test_answers_are_those_without_graphs(folder: Path, speculation: str):
    settings = {"speculation": speculation, "num_blocks": 9}  # so few that some are preempted
    found = answers(folder, graphs=True, **settings)
    expected = answers(folder, graphs=False, **settings)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)


class Counting(CpuPlatform):
    """Counts what is recorded and replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = self.replayed = 0

    def recorder(self) -> Any:
        return self

    def record(self, work: Any) -> Any:
        self.recorded += 1
        graph = super().recorder().record(work)

        class Counted:
            def replay(_) -> Any:
                self.replayed += 1
                return graph.replay()

        return Counted()


def graphs_of(model: Model, platform: CpuPlatform, **limits: int) -> DecodeGraphs:
    cache = KVCache(model.kv_groups(), num_blocks=50, num_slots=9, dtype=model.numerics.torch_dtype)
    limits = {"max_sequences": 8, "max_rows": 3, "max_blocks": 40, **limits}
    return DecodeGraphs(model, cache, platform, **limits)


def decoding(sequences: int, rows: int, start: int = 4, **fields: Any) -> list[BatchRow]:
    ids = np.arange(start + rows)
    return [BatchRow(ids, start, rows, [1 + n], slot=1 + n, **fields) for n in range(sequences)]


def test_shapes_are_shared_and_kept(folder: Path):
    model, platform = load_model(folder, Numerics()), Counting()
    graphs = graphs_of(model, platform)
    for sequences, rows in ((3, 1), (4, 1), (3, 2), (4, 3), (1, 1)):
        batch = Batch.build(decoding(sequences, rows), model.max_ngram)
        found = graphs.run(batch)
        assert found is not None
        assert found.shape == (sequences, model.spec.vocab_size)
    assert (platform.recorded, platform.replayed) == (3, 5)


@pytest.mark.parametrize(
    "rows",
    [
        decoding(9, 1),
        decoding(2, 4),
        decoding(2, 2, write_from=5),
        decoding(2, 2, keep_from=5),
        decoding(2, 2, start=40, keep_from=39),
        [BatchRow(np.arange(10), 4, 1, list(range(1, 42)), slot=1)],
        # Nobody waits for such a step, so the next one's inputs might overtake its own.
        decoding(2, 2, logits="none"),
    ],
    ids=[
        "many sequences",
        "many rows",
        "replayed rows",
        "rows left out",
        "windows cut short",
        "a long table",
        "no logits",
    ],
)
def test_what_fits_no_shape(folder: Path, rows: list[BatchRow]):
    model, platform = load_model(folder, Numerics()), Counting()
    assert graphs_of(model, platform).run(Batch.build(rows, model.max_ngram)) is None
    assert platform.recorded == 0


def test_rows_far_behind_a_cut_fit(folder: Path):
    """Those of a decode step: the windows of their consumer layers are whole."""
    model = load_model(folder, Numerics())
    rows = decoding(2, 2, start=40, keep_from=40 - model.spec.window + 1)
    assert graphs_of(model, Counting()).run(Batch.build(rows, model.max_ngram)) is not None


@pytest.mark.parametrize("folder", ["tiny-8"], indirect=True)
def test_small_chunks_of_a_cut_prompt(folder: Path):
    """Their consumer layers must not look at window rows that nobody computed."""
    model = load_model(folder, Numerics("float64", kv_quant=False))
    ids = np.random.default_rng(4).integers(3, 500, 60)

    def last_logits(recorded: bool) -> torch.Tensor:
        graphs = graphs_of(model, CpuPlatform())
        cache = graphs._cache
        cache.poison()
        with torch.inference_mode():
            for start, count in ((0, 42), (42, 2), (44, 16)):
                row = BatchRow(ids, start, count, [1], slot=1, logits="all", keep_from=41)
                if start < 41:
                    row = replace(row, logits="none")
                batch = Batch.build([row], model.max_ngram)
                found = graphs.run(batch) if recorded else None
                found = model.forward(batch, cache) if found is None else found
        return found

    assert torch.allclose(last_logits(True), last_logits(False), rtol=0, atol=1e-9)


def test_number_of_graphs_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert MAX_GRAPHS >= 16
    monkeypatch.setattr("headrace.engine.graphs.MAX_GRAPHS", 1)
    model, platform = load_model(folder, Numerics()), Counting()
    graphs = graphs_of(model, platform)
    one, three = (Batch.build(decoding(n, 1), model.max_ngram) for n in (1, 3))
    assert graphs.run(one) is not None
    assert graphs.run(three) is None
    assert graphs.run(one) is not None


@pytest.mark.parametrize("folder", ["tiny-8"], indirect=True)
@pytest.mark.parametrize("recorded", [False, True])
def test_costs_are_measured_as_steps_will_run(folder: Path, recorded: bool):
    model, platform = load_model(folder, Numerics(), with_draft=True), Counting()
    cost = measure_cost(model, 3, 4, 16, platform, recorded=recorded)
    assert (cost.verify_s(1, 8) > 0).all()
    assert (platform.recorded > 1) == recorded
    assert platform.replayed >= 2 * platform.recorded


class Waiting(Counting):
    """Lists replays and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def record(self, work: Any) -> Any:
        def listed() -> Any:
            self.events.append("replay")
            return work()

        return super().record(listed)

    def stopwatch(self) -> Any:
        watch = super().stopwatch()
        seconds = watch.seconds
        watch.seconds = lambda: (self.events.append("wait"), seconds())[1]
        return watch


class Guard(CpuPlatform):
    """Counts guards against waits."""

    guards = 0

    def forbid_waits(self) -> Any:
        self.guards += 1
        return super().forbid_waits()


@pytest.mark.parametrize("guarded", [False, True])
def test_replays_are_guarded_on_demand_only(folder: Path, guarded: bool):
    """A guard holds for all threads of the process, also those of other engines."""
    model, platform = load_model(folder, Numerics()), Guard()
    graphs = graphs_of(model, platform, guarded=guarded)
    for _ in range(3):
        graphs.run(Batch.build(decoding(1, 1), model.max_ngram))
    assert platform.guards == (2 if guarded else 0)


@pytest.mark.parametrize("folder", ["tiny-8"], indirect=True)
def test_costs_wait_for_each_replay(folder: Path):
    """Inputs of a step lie where those of the step before it are read from."""
    model, platform = load_model(folder, Numerics(), with_draft=True), Waiting()
    measure_cost(model, 3, 4, 16, platform, recorded=True)
    following = zip(platform.events, platform.events[1:], strict=False)
    assert ("replay", "replay") not in following


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("block_size", [27, 28, 160])
def test_costs_of_drafts_that_fill_a_block(recorded: bool, block_size: int):
    """What a measured request computes may reach into its second block of tokens and beyond."""
    config = preset_config("tiny-8", quantised=False, compressed_vocab=300)
    config["text_config"]["dspark_block_size"] = block_size
    spec, platform = ModelSpec.from_config(config), CpuPlatform()
    model = random_model(spec, Numerics(), platform, with_draft=True)
    cost = measure_cost(model, block_size, 2, 2 * block_size + 2, platform, recorded=recorded)
    assert (cost.verify_s(1, 2 * block_size) > 0).all()


def test_a_shape_that_does_not_fit_runs_without_a_graph(folder: Path):
    class Full(Counting):
        def record(self, work: Any) -> Any:
            self.recorded += 1
            raise torch.OutOfMemoryError

    model, platform = load_model(folder, Numerics()), Full()
    graphs = graphs_of(model, platform)
    batch = Batch.build(decoding(3, 1), model.max_ngram)
    assert graphs.run(batch) is None
    assert graphs.run(batch) is None
    assert platform.recorded == 1  # asked once only


def test_graphs_that_cannot_be_are_refused(folder: Path):
    with pytest.raises(ConfigError, match="batch-invariant"):
        LLM(folder, EngineConfig(graphs=True, batch_invariant=True))
    for value in ("yes", 1, 0, 0.0, []):
        with pytest.raises(ConfigError, match="must be true or false"):
            EngineConfig(graphs=value)
