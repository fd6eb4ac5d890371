"""With drafts and overlap, every request gets the tokens it gets without.

The reference is the blocking loop without drafts. On the fake model, whose logits depend on nothing
but the tokens, all combinations; on tiny-8 with batch-invariant numerics a covering subset (the
full matrix is a sweep, docs/bench/speculation_streams.jsonl). Answers end by length, by EOS or a
stop token and by a stop string at every place of an accepted run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.output import FinishReason
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.load import numerics_of
from headrace.engine.runner import ModelLike
from headrace.engine.speculation.drafts import Drafter, ModelDrafter
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from tests.bench_records import write_record
from tests.unit.engine.fakes import FakeModel

from .speculation import (
    DRAFTS,
    Answers,
    LetterTokenizer,
    Oracle,
    covering,
    serve,
    tiny_with_drafts,
)

POLICIES = ("off", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:5", "adaptive")
MATRIX: dict[str, tuple[Any, ...]] = {
    "overlap": (False, True),
    "policy": POLICIES,
    "batch": (1, 8, 32),
    "chunk": (64, 512),
    "drafter": ("perfect", "mixed", "wrong", "noise"),
    "blocks": ("plenty", "few"),
}


def prompts(count: int, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Of mixed lengths, some with a common beginning."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(14, vocab_size, 200).tolist()
    out = []
    for number in range(count):
        own = rng.integers(14, vocab_size, (3, 20, 65, 130)[number % 4] + number).tolist()
        out.append(tuple(shared[: 64 * (number % 3)] + own))
    return out


@dataclass
class World:
    """A model with requests whose answers are known."""

    model: ModelLike
    settings: dict[str, Any]
    requests: list[Request]
    wanted: Answers
    free: dict[str, list[int]]

    def engine(self, drafter: Drafter | None = None, **changes: Any) -> Engine:
        settings = {"max_model_len": 512, "num_blocks": 160, "max_num_seqs": 32, "replay": "exact"}
        config = EngineConfig(**{**self.settings, **settings, **changes})
        return Engine(config, self.model, tokenizer=LetterTokenizer(), drafter=drafter)

    def known(self) -> list[tuple[int, ...]]:
        """Prompts with the answers as if nothing had ended them early."""
        return [
            (*request.prompt_token_ids, *self.free[request.request_id]) for request in self.requests
        ]


def world(model: ModelLike, settings: dict[str, Any], count: int = 32) -> World:
    """Requests that end in every way; the places differ from request to request."""
    built = World(model, settings, [], Answers(), {})
    vocab_size = model.spec.vocab_size
    free: list[Request] = []
    for number, prompt in enumerate(prompts(count, vocab_size, 3)):
        params = SamplingParams(
            temperature=(0.0, 1.0)[number % 2],
            top_k=(-1, -1, -1, 40)[number % 4],
            repetition_penalty=(1.0, 1.0, 1.2)[number % 3],
            frequency_penalty=(0.0, 0.0, 0.0, 0.0, 0.4)[number % 5],
            seed=100 + number,
            max_tokens=16,
            ignore_eos=True,
        )
        free.append(Request(f"r{number}", prompt, params))
    reference = {"speculation": "off", "overlap": False}
    built.free = {
        name: tokens for (name, _), tokens in serve(built.engine(**reference), free).tokens.items()
    }
    built.requests = [
        ending(request, built.free[request.request_id], number)
        for number, request in enumerate(free)
    ]
    built.wanted = serve(built.engine(**reference), built.requests)
    return built


def ending(request: Request, free: list[int], number: int) -> Request:
    """The request made to end at a place of its own: by length, a stop token or a stop string."""
    at = 3 + number // 3
    if number % 3 == 0:
        changes: dict[str, Any] = {"max_tokens": at}
    elif number % 3 == 1:
        changes = {"stop_token_ids": (free[at],)}
    else:
        changes = {"stop": (LetterTokenizer().decode(free[at - 1 : at + 1]),), "logprobs": 0}
    return replace(request, sampling=replace(request.sampling, **changes))


@pytest.fixture(scope="module")
def fake() -> World:
    return world(FakeModel(), {"dtype": "float64", "kv_quant": False})


TINY_SETTINGS = {"dtype": "float32", "kv_quant": True, "batch_invariant": True}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tiny_with_drafts(tmp_path_factory.mktemp("tiny-5") / "model")
    return load_model(directory, numerics_of(EngineConfig(**TINY_SETTINGS)), with_draft=True)


@pytest.fixture(scope="module")
def tiny(tiny_model: Model) -> World:
    return world(tiny_model, TINY_SETTINGS, 8)


def check(one: dict[str, Any], built: World) -> Answers:
    """One point of the matrix."""
    requests = built.requests[: one["batch"]]
    length = DRAFTS if one["policy"] in ("off", "adaptive") else int(one["policy"][-1])
    drafter: Drafter
    if one["drafter"] == "model":
        assert isinstance(built.model, Model)
        drafter = ModelDrafter(built.model, length)
    else:
        drafter = Oracle(one["drafter"], length, built.model.spec.vocab_size, built.known())
    engine = built.engine(
        drafter,
        speculation=one["policy"],
        overlap=one["overlap"],
        max_num_batched_tokens=one["chunk"],
        num_blocks=160 if one["blocks"] == "plenty" else 10,
    )
    preempt = {step: f"r{step % one['batch']}" for step in range(3, 40, 2)}
    found = serve(
        engine, requests, preempt=preempt, arrive_every=0 if one["blocks"] == "plenty" else 1
    )
    names = {(request.request_id, 0) for request in requests}
    assert found.tokens == {name: built.wanted.tokens[name] for name in names}, one
    assert found.ends == {name: built.wanted.ends[name] for name in names}, one
    if one["policy"] != "off":
        assert sum(engine.stats().verified_drafts) > 0 or one["batch"] == 1, one
    return found


def kind_of(end: tuple[Any, Any]) -> str:
    finish, stop = end
    if finish is FinishReason.LENGTH:
        return "length"
    return "string" if isinstance(stop, str) else "token"


def test_the_requests_end_in_every_way(fake: World) -> None:
    kinds = [kind_of(end) for end in fake.wanted.ends.values()]
    assert {kind: kinds.count(kind) >= 8 for kind in ("length", "string", "token")} == {
        "length": True,
        "string": True,
        "token": True,
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_streams_on_the_fake_model(fake: World, overlap: bool) -> None:
    """Pairs of all settings; ends fall on every place of a run."""
    seen: set[tuple[str, int]] = set()
    longest = {"overlap": overlap, "policy": "fixed:5", "batch": 32, "chunk": 512}
    extra = [
        {**longest, "drafter": drafter, "blocks": blocks}
        for drafter in ("perfect", "mixed")
        for blocks in ("plenty", "few")
    ]
    for one in [*covering({**MATRIX, "overlap": (overlap,)}, seed=overlap), *extra]:
        found = check(one, fake)
        if one["drafter"] in ("perfect", "mixed"):
            seen |= {(kind_of(end), found.last_places[name]) for name, end in found.ends.items()}
    places = range(DRAFTS + 1)
    assert {(k, p) for k in ("length", "string", "token") for p in places} <= seen


TINY = {**MATRIX, "drafter": ("perfect", "mixed", "model"), "batch": (1, 8)}


@pytest.mark.parametrize(
    "one", covering(TINY, seed=4), ids=lambda one: "-".join(map(str, one.values()))
)
def test_streams_on_the_tiny_model(tiny: World, one: dict[str, Any]) -> None:
    check(one, tiny)


@pytest.mark.sweep
def test_all_streams_on_the_fake_model(fake: World) -> None:
    """The whole matrix."""
    sweep("fake", MATRIX, fake)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "drafters", "blocks"),
    [
        ("tiny-8", ("model",), "plenty"),
        ("tiny-8-scripted", ("perfect", "mixed", "wrong"), "few"),
    ],
)
def test_all_streams_on_the_tiny_model(
    tiny_model: Model, name: str, drafters: tuple[str, ...], blocks: str
) -> None:
    """The whole matrix with its own draft module, and with scripted ones in little memory."""
    matrix = {**MATRIX, "drafter": drafters, "blocks": (blocks,)}
    sweep(name, matrix, world(tiny_model, TINY_SETTINGS))


def sweep(name: str, matrix: dict[str, tuple[Any, ...]], built: World) -> None:
    settings = [dict(zip(matrix, values, strict=True)) for values in product(*matrix.values())]
    streams = 0
    for one in settings:
        streams += len(check(one, built).tokens)
    write_record(
        "speculation_streams.jsonl",
        f"speculation-streams-{name}",
        points=len(settings),
        equal_streams=streams,
        matrix=matrix,
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("make", ["fake", "tiny"])
def test_a_perfect_drafter_is_always_right(
    make: str, overlap: bool, request: pytest.FixtureRequest
) -> None:
    """Also behind prefix hits, chunk borders and preemptions (SD-1, SD-17)."""
    built: World = request.getfixturevalue(make)
    vocab_size = built.model.spec.vocab_size
    rng = np.random.default_rng(8)
    shared = rng.integers(14, vocab_size, 450).tolist()
    free = [
        Request(
            f"r{number}",
            (*shared, *rng.integers(14, vocab_size, 9 + 11 * number).tolist()),
            SamplingParams(
                temperature=float(number % 2), seed=number, max_tokens=18, ignore_eos=True
            ),
        )
        for number in range(3)
    ]
    cold = serve(built.engine(speculation="off", overlap=False), free)
    known = [(*r.prompt_token_ids, *cold.tokens[r.request_id, 0]) for r in free]
    oracle = Oracle("perfect", DRAFTS, vocab_size, known)
    engine = built.engine(oracle, speculation="fixed:5", overlap=overlap, max_num_batched_tokens=96)
    for again in range(2):  # the second time from the cache
        preempt = {5: "r0", 6: "r1"} if again else None
        assert serve(engine, free, preempt=preempt) == cold
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0 and stats.preemptions == 2
    assert stats.accepted_drafts == stats.verified_drafts
    assert len(stats.verified_drafts) == DRAFTS and min(stats.verified_drafts) > 0
