"""Graphs on a card: replays give the bits of eager steps, and no step makes the host wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.graphs import DecodeGraphs
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics
from headrace.ops.triton import missing
from headrace.platforms import Graph, Platform

# (dtype, whether weights stay as they are stored)
MODES = [("float32", False), ("bfloat16", False), ("bfloat16", True)]
SEQUENCES, START, BLOCKS = 5, 130, 3


@pytest.fixture(scope="module", params=["tiny-8", "v4-tiny"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("graphs") / "m"
    write_tiny(found, preset=request.param, seed=3)
    return found


@pytest.fixture(params=MODES, ids=["fp32", "bf16", "stored"])
def model(request: pytest.FixtureRequest, folder: Path, card: Platform, rehearsed: bool) -> Model:
    if missing() or rehearsed:
        pytest.skip(missing() or "graphs need operators that never wait: Triton's")
    dtype, keep_stored = request.param
    found = load_model(
        folder, Numerics(dtype), platform=card, with_draft=True, keep_stored=keep_stored
    )
    assert not found.waiting
    return found


def prefilled(model: Model, ids: np.ndarray) -> KVCache:
    cache = KVCache(
        model.kv_groups(),
        num_blocks=1 + BLOCKS * SEQUENCES,
        num_slots=1 + SEQUENCES,
        dtype=model.numerics.torch_dtype,
        device=model.device,
    )
    rows = [BatchRow(ids[n], 0, START + n, table(n), n + 1, "none") for n in range(SEQUENCES)]
    model.forward(Batch.build(rows, model.max_ngram), cache)
    return cache


def table(sequence: int) -> list[int]:
    return list(range(1 + BLOCKS * sequence, 1 + BLOCKS * (sequence + 1)))


class Eager:
    """The card, with work that is called each time instead of being recorded."""

    def __init__(self, card: Platform) -> None:
        self.device, self.host_buffer = card.device, card.host_buffer
        self.forbid_waits = card.forbid_waits

    def recorder(self) -> Eager:
        return self

    def record(self, work: Any) -> Graph:
        class Calls:
            replay = staticmethod(work)

        return Calls()


@pytest.mark.parametrize("drafts", [False, True])
def test_replays_have_the_bits_of_eager_steps(model: Model, card: Platform, drafts: bool):
    """Over several steps of mixed lengths; the guard against waits is on in both."""
    # As many rows as the rings of the model have room for.
    rows = 1 + (model.spec.draft.block_size if drafts and model.spec.draft else 0)
    ids = np.random.default_rng(4).integers(3, 500, (SEQUENCES, START + 40))
    caches = [prefilled(model, ids) for _ in range(2)]
    limits = {"max_sequences": 6, "max_rows": rows, "max_blocks": BLOCKS, "guarded": True}
    graphs = [
        DecodeGraphs(model, cache, platform, **limits)
        for cache, platform in zip(caches, (card, Eager(card)), strict=True)
    ]
    place = np.array([START + n for n in range(SEQUENCES)])
    for step in range(6):
        q_len = [1 + (n + step) % rows for n in range(SEQUENCES)]
        shares = [
            BatchRow(ids[n], int(place[n]), q_len[n], table(n), n + 1, "all")
            for n in range(SEQUENCES)
        ]
        batch = Batch.build(shares, model.max_ngram)
        with torch.inference_mode():
            replayed, eager = (g.run(batch) for g in graphs)
        assert replayed is not None
        assert eager is not None
        assert replayed.isfinite().all()
        assert replayed.equal(eager), step
        place += q_len
    for arena in ("blocks", "slots"):
        found, expected = (getattr(cache, arena)[1:] for cache in caches)
        assert found.equal(expected)
    assert len(graphs[0]) >= 1


def test_the_guard_sees_waits(card: Platform, rehearsed: bool):
    if rehearsed:
        pytest.skip("the fake card has no guard of its own")
    number = torch.ones(1, device=card.device)
    with pytest.raises(RuntimeError, match="synchroniz"), card.forbid_waits():
        number.item()
    assert number.item() == 1.0


@pytest.mark.parametrize("speculation", ["off", "fixed:2", "adaptive"])
def test_answers_are_those_without_graphs(
    folder: Path, card: Platform, rehearsed: bool, speculation: str
):
    if missing() or rehearsed:
        pytest.skip(missing() or "graphs need operators that never wait: Triton's")
    drafts = speculation != "off"
    model = load_model(folder, Numerics(), platform=card, with_draft=drafts)
    if drafts and model.spec.draft is None:
        pytest.skip("this model has no draft module")
    answers = []
    for graphs in (True, False):
        config = EngineConfig(graphs=graphs, num_blocks=40, max_num_seqs=6, seed=1)
        engine = Engine(config, model, platform=card)
        rng = np.random.default_rng(5)
        for number in range(8):
            prompt = tuple(rng.integers(3, 500, 20 + 17 * number).tolist())
            params = SamplingParams(
                temperature=float(number % 2), seed=number, max_tokens=20, ignore_eos=True
            )
            engine.add(Request(str(number), prompt, params))
        tokens: dict[str, list[int]] = {}
        while engine.has_work():
            for chunk in engine.step():
                tokens.setdefault(chunk.request_id, []).extend(chunk.tokens)
        answers.append(tokens)
    assert answers[0] == answers[1]
