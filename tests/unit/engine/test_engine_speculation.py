"""The engine with drafts and overlap, on the fake model: what is asked for beside plain streams."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.output import TokenChunk
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine import engine as engine_module
from headrace.engine.engine import Engine
from headrace.engine.load import load_engine
from headrace.engine.plan import StepPlan
from headrace.engine.speculation.controller import Controller
from headrace.engine.speculation.drafts import DraftRequest, Proposal
from headrace.errors import ConfigError, InternalError, InvalidRequest
from headrace.kv.cache import KVCache
from headrace.model.tiny import write_tiny
from tests.equivalence.speculation import Oracle, serve
from tests.unit.engine import fakes
from tests.unit.engine.fakes import BACKTRACK, VOCAB, FakeModel

CONFIG = EngineConfig(
    dtype="float64",
    kv_quant=False,
    max_model_len=400,
    num_blocks=60,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    replay="exact",
    seed=5,
)
FREE = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
MODES = [
    (overlap, policy, kind)
    for overlap in (False, True)
    for policy, kind in (
        ("off", "perfect"),
        ("fixed:5", "perfect"),
        ("fixed:5", "mixed"),
        ("adaptive", "mixed"),
    )
]


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(14, VOCAB, length).tolist())


def engine(
    overlap: bool, policy: str, known: Sequence[Sequence[int]] = (), kind: str = "perfect"
) -> Engine:
    drafter = Oracle(kind, 5, VOCAB, known)
    return Engine(
        replace(CONFIG, overlap=overlap, speculation=policy), FakeModel(), drafter=drafter
    )


def plain(requests: Sequence[Request]) -> tuple[list[TokenChunk], list[tuple[int, ...]]]:
    """Chunks without drafts and overlap, and what an oracle must know."""
    chunks = run(engine(False, "off"), requests)
    known: dict[tuple[str, int], list[int]] = {}
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    for chunk in chunks:
        name = chunk.request_id, chunk.choice
        known.setdefault(name, list(prompts[name[0]])).extend(chunk.tokens)
    return chunks, [tuple(tokens) for tokens in known.values()]


def run(engine: Engine, requests: Sequence[Request]) -> list[TokenChunk]:
    """All chunks, by request, choice and index, without counts of drafts."""
    for request in requests:
        engine.add(request)
    chunks: list[TokenChunk] = []
    while engine.has_work():
        chunks += map(uncounted, engine.step())
    return sorted(chunks, key=lambda chunk: (chunk.request_id, chunk.choice, chunk.index))


def uncounted(chunk: TokenChunk) -> TokenChunk:
    return replace(chunk, accepted_drafts=0, rejected_drafts=0)


@pytest.mark.parametrize(("overlap", "policy", "kind"), MODES)
def test_every_field_of_the_chunks_is_the_same(overlap: bool, policy: str, kind: str) -> None:
    """Log probabilities of both kinds, of prompts, choices, penalties, several chunks."""
    requests = [
        Request("prompt", ids(150, 1), replace(FREE, prompt_logprobs=2, logprobs=1)),
        Request("raw", ids(9, 2), replace(FREE, logprobs=3, repetition_penalty=1.3)),
        Request("processed", ids(40, 3), replace(FREE, logprobs=2, logprobs_mode="processed")),
        Request("choices", ids(130, 4), replace(FREE, n=3, frequency_penalty=0.5)),
        Request("short", ids(3, 5), replace(FREE, max_tokens=1)),
        Request("minimum", ids(3, 6), replace(FREE, ignore_eos=False, min_tokens=12)),
    ]
    wanted, known = plain(requests)
    assert run(engine(overlap, policy, known, kind), requests) == wanted


@pytest.mark.parametrize("overlap", [False, True])
def test_choices_fork_from_a_prompt_whose_drafts_are_in_flight(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings as short as drafts allow: a first choice that ran on would overwrite the others'."""
    monkeypatch.setattr(fakes, "RING", fakes.WINDOW + 5)
    requests = [Request("a", ids(length, length), replace(FREE, n=4)) for length in (20,)]
    wanted, known = plain(requests)
    made = engine(overlap, "fixed:5", known)
    copies: list[list[int]] = []
    launch = made.scheduler.launch

    def seen(plan: StepPlan) -> None:
        copies.extend(plan.slot_copies.tolist())
        launch(plan)

    monkeypatch.setattr(made.scheduler, "launch", seen)
    assert run(made, requests) == wanted
    stats = made.stats()
    assert made.scheduler.forks == 3
    # Each is copied once, also while the step that copies it is in flight.
    assert len(copies) == len({child for _, child in copies}) == 3
    assert len(stats.accepted_drafts) == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_choose_for_themselves(overlap: bool) -> None:
    texts = [None, "off", "fixed:1", "fixed:4", "adaptive"]
    requests = [
        Request(str(number), ids(20, number), replace(FREE, speculation=text, seed=number))
        for number, text in enumerate(texts)
    ]
    wanted, known = plain(
        [replace(r, sampling=replace(r.sampling, speculation=None)) for r in requests]
    )
    made = engine(overlap, "fixed:2", known)
    assert run(made, requests) == wanted
    verified = made.stats().verified_drafts
    # off: none; 1, 2, 4 and all of them: fewer the further back the place is.
    assert len(verified) == 5 and list(verified) == sorted(verified, reverse=True)
    with pytest.raises(InvalidRequest, match=r'fixed:6" asks for 6 drafts.*has 5') as caught:
        made.add(Request("x", (20,), replace(FREE, speculation="fixed:6")))
    assert caught.value.param == "speculation"


def test_without_a_drafter_nobody_gets_drafts() -> None:
    made = Engine(CONFIG, FakeModel())
    with pytest.raises(InvalidRequest, match="needs a draft module"):
        made.add(Request("x", (20,), replace(FREE, speculation="adaptive")))
    with pytest.raises(ConfigError, match="needs a draft module"):
        Engine(replace(CONFIG, speculation="fixed:1"), FakeModel())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [2, 3, 5, 8])
def test_aborted_and_preempted_in_flight(overlap: bool, at: int) -> None:
    """SD-11: what is under way when a request gives way is dropped, twice in a row."""
    requests = [Request(name, ids(30, n), replace(FREE, seed=n)) for n, name in enumerate("abc")]
    _, known = plain(requests)
    made = engine(overlap, "fixed:5", known, "mixed")
    for request in requests:
        made.add(request)
    found: dict[str, list[int]] = {name: [] for name in "abc"}
    step = 0
    while made.has_work():
        step += 1
        if step in (at, at + 1):
            made.scheduler.preempt("a", 0.0)
        if step == at:
            made.abort("c")
        for chunk in made.step():
            assert chunk.index == len(found[chunk.request_id])
            found[chunk.request_id] += chunk.tokens
    streams = [list(tokens[30:]) for tokens in known]
    assert found["a"] == streams[0] and found["b"] == streams[1]
    assert found["c"] == streams[2][: len(found["c"])]
    stats = made.stats()
    assert (stats.free_blocks, stats.running, stats.aborted) == (stats.total_blocks, 0, 1)


class Failing(Oracle):
    """Raises in its n-th call."""

    calls_left = 3

    def draft(self, request: DraftRequest, cache: KVCache) -> Proposal:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise MemoryError("no room for drafts")
        return super().draft(request, cache)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_fails_loses_nothing(overlap: bool) -> None:
    requests = [Request(name, ids(30, n), replace(FREE, seed=n)) for n, name in enumerate("ab")]
    wanted, known = plain(requests)
    config = replace(CONFIG, overlap=overlap, speculation="fixed:5")
    made = Engine(config, FakeModel(), drafter=Failing("mixed", 5, VOCAB, known))
    for request in requests:
        made.add(request)
    chunks: list[TokenChunk] = []
    failures = 0
    while made.has_work():
        try:
            chunks += map(uncounted, made.step())
        except MemoryError:
            failures += 1
    assert failures == 1
    assert sorted(chunks, key=lambda c: (c.request_id, c.index)) == wanted


def test_a_drafter_of_the_wrong_shape_is_told_so() -> None:
    class Wrong(Oracle):
        def draft(self, request: DraftRequest, cache: KVCache) -> Proposal:
            found = super().draft(request, cache)
            return Proposal(found.token_ids[:, :3], found.features[:, :3])

    made = Engine(CONFIG, FakeModel(), drafter=Wrong("noise", 5, VOCAB, ()))
    made.add(Request("a", (20,), FREE))
    with pytest.raises(InternalError, match="gave others"):
        made.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_maximal_coupling_runs_with_drafts(overlap: bool) -> None:
    """Its distribution is tested in tests/unit/engine/speculation; here: lengths and accounts."""
    made = engine(overlap, "adaptive", (), "noise")
    requests = [Request(str(n), ids(20, n), replace(FREE, seed=None)) for n in range(4)]
    found = serve(made, requests)
    assert {len(tokens) for tokens in found.tokens.values()} == {20}
    assert sum(made.stats().verified_drafts) > 0


def test_rings_that_cannot_take_drafts_back_are_refused() -> None:
    drafter = Oracle("noise", BACKTRACK + 1, VOCAB, ())
    with pytest.raises(ConfigError, match=f"{BACKTRACK + 1} drafts.*only {BACKTRACK} rows"):
        Engine(CONFIG, FakeModel(), drafter=drafter)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation": "fixed:4"}, 'fixed:4" asks for 4 drafts a step.*3'),
        ({"draft_length": 4}, "draft_length is 4.*blocks of 3"),
        ({"speculation": "fixed:3", "draft_length": 2}, 'fixed:3" asks for 3 drafts a step.*2'),
        ({"speculation": "often"}, "engine.speculation must be"),
    ],
)
def test_longer_drafts_than_the_checkpoint_has_are_refused(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    """SD-2: at start, naming both."""
    write_tiny(tmp_path / "m", preset="tiny-8", seed=1)
    assert json.loads((tmp_path / "m" / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        load_engine(tmp_path / "m", EngineConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "fitted", "divisors"),
    [
        ({"speculation": "fixed:3"}, [2.0, 0.5, 4.0], [2.0, 0.5, 4.0]),
        ({"speculation": "fixed:2", "draft_length": 2}, [2.0, 0.5, 4.0], [2.0, 0.5]),
        ({"speculation": "fixed:3"}, None, [1.0, 1.0, 1.0]),
    ],
)
def test_confidences_have_the_temperatures_of_the_checkpoint(
    settings: dict[str, object],
    fitted: list[float] | None,
    divisors: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Controller] = []

    class Kept(Controller):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(engine_module, "Controller", Kept)
    write_tiny(tmp_path / "m", preset="tiny-8", seed=1)
    if fitted is not None:
        config = json.loads((tmp_path / "m" / "config.json").read_text("utf-8"))
        config["text_config"]["dspark_confidence_temperatures"] = fitted
        (tmp_path / "m" / "config.json").write_text(json.dumps(config), "utf-8")
    load_engine(tmp_path / "m", EngineConfig(num_blocks=8, **settings))  # type: ignore[arg-type]
    z = np.full((1, len(divisors)), 3.0)
    expected = 1 / (1 + np.exp(-3.0 / np.array(divisors)))
    assert made[0].confidences(z)[0] == pytest.approx(expected)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["perfect", "mixed", "wrong"])
def test_the_last_chunk_counts_the_drafts_of_its_answer(kind: str, overlap: bool) -> None:
    """Over preemptions and choices; what follows an end in its run is in no answer."""
    requests = [Request(str(n), ids(20, n), replace(FREE, seed=n, n=1 + n % 2)) for n in range(4)]
    _, known = plain(requests)
    (free,) = (tokens[20:] for tokens in known if tokens[:20] == requests[0].prompt_token_ids)
    # A stop token in the middle of a later run of a perfect drafter, where 1 .. 6 are the first.
    place = next(p for p in (8, 9, 10, 14, 15, 16) if free[p] not in free[:p])
    stopped = replace(requests[0].sampling, stop_token_ids=(free[place],))
    requests[0] = replace(requests[0], sampling=stopped)
    made = engine(overlap, "fixed:5", known, kind)
    for request in requests:
        made.add(request)
    got: dict[tuple[str, int], int] = {}
    runs: dict[tuple[str, int], int] = {}
    ends: dict[tuple[str, int], TokenChunk] = {}
    for step in itertools.count():
        chunks = list(made.step())
        for chunk in chunks:
            name = chunk.request_id, chunk.choice
            got[name] = got.get(name, 0) + len(chunk.tokens)
            if chunk.finish is None:
                assert chunk == uncounted(chunk)
            else:
                ends[name] = chunk
        for name in {(chunk.request_id, chunk.choice) for chunk in chunks}:
            runs[name] = runs.get(name, 0) + 1
        if step == 3:
            made.scheduler.preempt("1", 0.0)
        if not made.has_work():
            break
    for name, end in ends.items():
        # A run has one token that was no draft, unless the answer ended before it.
        assert end.accepted_drafts - (got[name] - runs[name]) in (0, 1), name
        assert (end.accepted_drafts == 0) == (kind == "wrong")
        assert (end.rejected_drafts > 0) or kind != "wrong"
    if kind == "perfect":
        assert got["0", 0] == place + 1
        whole, part = divmod(place - 1, 6)
        assert ends["0", 0].accepted_drafts == 5 * whole + part + 1
        assert ends["0", 0].rejected_drafts == 5 - part - 1
    stats = made.stats()
    counted = sum(end.accepted_drafts + end.rejected_drafts for end in ends.values())
    assert len(ends) == 6 and stats.preemptions > 0
    assert counted == sum(stats.verified_drafts) > 0
    assert sum(end.accepted_drafts for end in ends.values()) <= sum(stats.accepted_drafts)
    assert stats.judged_drafts[0] == stats.verified_drafts[0] <= stats.draft_rounds
    assert stats.drafted_tokens % 5 == 0
    assert stats.drafted_tokens >= counted
