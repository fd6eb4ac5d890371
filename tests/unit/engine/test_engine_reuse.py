"""The engine over a fake model: prefix hits, several choices, prompt logprobs, cancel at any time.

The fake model's window is one layer deep, so that a bounded replay is exact for it: every answer
must be the one that the request gets alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.core.rng import choice_seed
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.errors import ConfigError
from tests.unit.engine.fakes import NAN_TOKEN, VOCAB, FakeModel, answer_alone, expected_logits

CONFIG = EngineConfig(dtype="float64", kv_quant=False, num_blocks=40, seed=1)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(20, VOCAB, length).tolist())


def serve(engine: Engine, requests: Iterable[Request] = ()) -> dict[tuple[str, int], list[int]]:
    """Output ids by request id and choice, once the engine is idle."""
    for request in requests:
        engine.add(request)
    outputs: dict[tuple[str, int], list[int]] = {}
    while engine.has_work():
        for chunk in engine.step():
            output = outputs.setdefault((chunk.request_id, chunk.choice), [])
            assert chunk.index == len(output)
            output += chunk.tokens
    stats = engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.total_blocks, 0, 0)
    return outputs


def alone(request: Request) -> list[int]:
    return list(answer_alone(request.prompt_token_ids, request.sampling))


# --- prefix cache ----------------------------------------------------------------------------


@pytest.mark.parametrize("replay", ["bounded", "exact"])
@pytest.mark.parametrize("rows", [33, 512])
def test_answers_after_a_hit_are_those_of_a_cold_run(replay: str, rows: int) -> None:
    model = FakeModel()
    engine = Engine(replace(CONFIG, replay=replay, max_num_batched_tokens=rows), model)
    shared = ids(400, 0)
    turns = [Request(f"turn {i}", shared + ids(30 * i + 1, i), SAMPLED) for i in range(4)]
    for turn in turns:
        assert serve(engine, [turn])[turn.request_id, 0] == alone(turn)
    stats = engine.stats()
    hits = 3 * 384
    assert stats.prefix_hit_tokens == hits
    assert stats.prefix_hit_tokens + stats.prefix_miss_tokens == sum(
        len(turn.prompt_token_ids) for turn in turns
    )
    assert stats.replayed_rows == 3 * model.spec.replay_rows(replay, False)


def test_the_same_prompt_again_and_again_never_changes_its_answer() -> None:
    """PC-1: cold, three repeats, another request, again."""
    engine = Engine(replace(CONFIG, num_blocks=60), FakeModel())
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt, other = Request("p", ids(1500, 1), params), Request("o", ids(700, 2), params)
    answers = [
        serve(engine, [request]) for request in (prompt, prompt, prompt, prompt, other, prompt)
    ]
    assert [a["p", 0] for a in answers if ("p", 0) in a] == [alone(prompt)] * 5
    assert answers[4]["o", 0] == alone(other)
    assert engine.stats().prefix_hit_tokens == 4 * 1408


def test_the_first_chunk_of_each_choice_says_what_was_cached() -> None:
    engine = Engine(CONFIG, FakeModel())
    prompt = ids(600, 7)
    seen: dict[str, list[tuple[int, int]]] = {"cold": [], "warm": []}
    for name in seen:
        engine.add(Request(name, prompt, replace(SAMPLED, n=2)))
        while engine.has_work():
            for chunk in engine.step():
                if chunk.index == 0:
                    seen[name].append((chunk.choice, chunk.cached_tokens))
                else:
                    assert chunk.cached_tokens == 0
    hits = engine.stats().prefix_hit_tokens
    assert hits > 0
    assert sorted(seen["cold"]) == [(0, 0), (1, 0)]
    assert sorted(seen["warm"]) == [(0, hits), (1, hits)]


def test_hits_do_not_depend_on_the_length_of_the_fresh_tail() -> None:
    """PC-2: twelve turns over one prefix, pool four times the need."""
    engine = Engine(replace(CONFIG, num_blocks=61), FakeModel())
    prefix = ids(1000, 3)
    hits = []
    for turn, tail in enumerate([1, 150, 300, 700] * 3):
        before = engine.stats().prefix_hit_tokens
        request = Request("t", prefix + ids(tail, 10 + turn), replace(SAMPLED, max_tokens=1))
        serve(engine, [request])
        hits.append(engine.stats().prefix_hit_tokens - before)
    assert hits[0] == 0
    assert all(hit >= 1000 - 128 for hit in hits[1:])


def test_two_sessions_do_not_evict_each_other_while_blocks_are_free() -> None:
    """PC-5."""
    engine = Engine(replace(CONFIG, num_blocks=41), FakeModel())
    sessions = {name: ids(900, seed) for seed, name in enumerate("ab")}
    for turn in range(3):
        for name, known in sessions.items():
            before = engine.stats()
            request = Request(name, known, replace(SAMPLED, max_tokens=4))
            (output,) = serve(engine, [request]).values()
            computed = engine.stats().computed_tokens - before.computed_tokens
            if turn:
                assert computed <= 128 + 5 + len(output) + 60  # block rest, window, new tokens
            sessions[name] = known + tuple(output) + ids(60, 100 + turn)
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"prefix_cache": False}, "prefix_cache is off"), ({"replay": "off"}, "replay is off")],
)
def test_the_cache_can_be_switched_off(changes: dict[str, object], reason: str) -> None:
    engine = Engine(replace(CONFIG, **changes), FakeModel())
    assert reason in engine.reuse.no_hits_because
    request = Request("a", ids(600, 4), SAMPLED)
    for _ in range(2):
        assert serve(engine, [request])["a", 0] == alone(request)
    assert engine.stats().prefix_hit_tokens == 0


def test_a_truncation_that_the_model_does_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError, match="one layer") as caught:
        Engine(replace(CONFIG, truncate="on"), FakeModel())
    assert caught.value.param == "engine.truncate"


# --- choices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 100, 128, 129, 300])
@pytest.mark.parametrize("seqs", [2, 8])
def test_choices_are_what_single_requests_with_their_seeds_get(length: int, seqs: int) -> None:
    engine = Engine(replace(CONFIG, max_num_seqs=seqs, max_num_batched_tokens=64), FakeModel())
    request = Request("a", ids(length, length), replace(SAMPLED, n=5))
    other = Request("b", ids(50, 1), replace(SAMPLED, max_tokens=20))
    outputs = serve(engine, [other, request])
    assert outputs.pop(("b", 0)) == alone(other)
    wanted = {}
    for choice in range(5):
        params = replace(SAMPLED, seed=choice_seed(5, choice))
        wanted["a", choice] = list(answer_alone(request.prompt_token_ids, params))
    assert outputs == wanted
    assert len({tuple(output) for output in wanted.values()}) == 5


def test_choices_survive_a_pool_that_is_too_small() -> None:
    engine = Engine(replace(CONFIG, num_blocks=5, max_num_batched_tokens=64), FakeModel())
    params = replace(SAMPLED, n=3, max_tokens=150, temperature=1.0)
    request = Request("a", ids(120, 9), params)
    outputs = serve(engine, [request])
    for choice in range(3):
        single = replace(params, n=1, seed=choice_seed(5, choice))
        assert outputs["a", choice] == list(answer_alone(request.prompt_token_ids, single))
    assert engine.stats().preemptions > 0


def test_choices_of_a_broken_prompt_all_fail() -> None:
    engine = Engine(CONFIG, FakeModel())
    engine.add(Request("bad", (NAN_TOKEN, 20), replace(SAMPLED, n=3)))
    good = Request("good", ids(9, 1), SAMPLED)
    engine.add(good)
    ends: dict[tuple[str, int], FinishReason] = {}
    tokens: list[int] = []
    while engine.has_work():
        for chunk in engine.step():
            tokens += chunk.tokens
            if chunk.finish is not None:
                ends[chunk.request_id, chunk.choice] = chunk.finish
    assert ends == {("bad", i): FinishReason.ERROR for i in range(3)} | {
        ("good", 0): FinishReason.LENGTH
    }
    assert tokens == alone(good)


# --- prompt log probabilities ----------------------------------------------------------------


@pytest.mark.parametrize("rows", [33, 512])
def test_prompt_logprobs_are_those_of_all_rows(rows: int) -> None:
    engine = Engine(replace(CONFIG, max_num_batched_tokens=rows), FakeModel())
    prompt = ids(200, 7)
    serve(engine, [Request("warm", prompt, SAMPLED)])
    params = replace(SAMPLED, prompt_logprobs=2, logprobs=1)
    engine.add(Request("a", prompt, params))
    engine.add(Request("b", ids(30, 3), SAMPLED))
    chunks: list[TokenChunk] = []
    while engine.has_work():
        chunks += [chunk for chunk in engine.step() if chunk.request_id == "a"]
    assert [token for chunk in chunks for token in chunk.tokens] == alone(
        Request("a", prompt, SAMPLED)
    )
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
    records = chunks[0].prompt_logprobs
    assert records is not None and len(records) == 200 and records[0] is None
    for position in (1, 2, 127, 128, 199):
        logits = expected_logits(prompt[:position])
        logprobs = logits - np.log(np.exp(logits).sum())
        record = records[position]
        assert record is not None
        assert record.logprob == pytest.approx(logprobs[prompt[position]], abs=1e-12)
        assert record.top_ids == tuple(np.argsort(-logits)[:2].tolist())
    assert all(chunk.logprobs is not None and len(chunk.logprobs) == 1 for chunk in chunks)


# --- cancel, priorities, load ----------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_an_abort_at_any_moment_frees_everything(steps: int) -> None:
    engine = Engine(replace(CONFIG, max_num_batched_tokens=48), FakeModel())
    keep = Request("keep", ids(60, 2), replace(SAMPLED, max_tokens=20))
    engine.add(Request("gone", ids(130, 1), replace(SAMPLED, n=3, max_tokens=40)))
    engine.add(keep)
    outputs: list[TokenChunk] = []
    for _ in range(steps):
        outputs += engine.step()
    engine.abort("gone")
    ended = [*engine.step()]
    aborted = {chunk.choice for chunk in ended if chunk.finish is FinishReason.ABORT}
    assert aborted == {0, 1, 2}
    while engine.has_work():
        ended += engine.step()
    stats = engine.stats()
    assert (stats.free_blocks, stats.running) == (stats.total_blocks, 0)
    mine = [t for c in outputs + ended if c.request_id == "keep" for t in c.tokens]
    assert mine == alone(keep)


def test_priorities_decide_who_goes_first() -> None:
    engine = Engine(replace(CONFIG, max_num_seqs=1, overlap=False), FakeModel())
    for name, priority in (("late", 2), ("soon", -1), ("middle", 0)):
        params = replace(SAMPLED, max_tokens=2)
        engine.add(Request(name, ids(5, 1), params, priority))
    order = list(dict.fromkeys(chunk.request_id for _ in range(6) for chunk in engine.step()))
    assert order == ["soon", "middle", "late"]


def test_a_random_load_on_a_pool_that_is_too_small() -> None:
    random = np.random.default_rng(11)
    config = replace(CONFIG, num_blocks=9, max_num_seqs=5, max_num_batched_tokens=70)
    engine = Engine(replace(config, ageing_steps=20), FakeModel())
    requests, aborted = {}, set()
    outputs: dict[tuple[str, int], list[int]] = {}
    families = [ids(700, seed) for seed in range(3)]
    while len(requests) < 24 or engine.has_work():
        if len(requests) < 24 and random.random() < 0.2:
            name = f"r{len(requests)}"
            length = int(random.integers(1, 400))
            params = replace(SAMPLED, seed=int(random.integers(99)), n=int(random.integers(1, 3)))
            params = replace(params, max_tokens=int(random.integers(1, 400)))
            prompt = families[int(random.integers(3))][:length] + ids(2, len(requests))
            requests[name] = Request(name, prompt, params, int(random.integers(-1, 2)))
            engine.add(requests[name])
        if requests and random.random() < 0.01:
            name = str(random.choice(list(requests)))
            engine.abort(name)
            aborted.add(name)
        for chunk in engine.step():
            output = outputs.setdefault((chunk.request_id, chunk.choice), [])
            assert chunk.index == len(output)
            output += chunk.tokens
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks and stats.preemptions > 3
    assert stats.prefix_hit_tokens > 0
    for (name, choice), output in outputs.items():
        request = requests[name]
        params = replace(request.sampling, n=1, seed=choice_seed(request.sampling.seed, choice))
        wanted = list(answer_alone(request.prompt_token_ids, params))
        assert output == wanted[: len(output)]
        assert name in aborted or output == wanted
    assert set(outputs) >= {(n, c) for n, r in requests.items() for c in range(r.sampling.n)} - {
        (n, c) for n in aborted for c in range(3)
    }
