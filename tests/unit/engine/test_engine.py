"""The engine over a fake model: same tokens in every arrangement, validation, abort, failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.errors import ConfigError, ContextTooLong, InvalidRequest, Overloaded
from tests.unit.engine.fakes import EOS, NAN_TOKEN, VOCAB, FakeModel, answer_alone

CONFIG = EngineConfig(dtype="float64", kv_quant=False, num_blocks=40, seed=1)


STOPS = tuple(range(30, 46))


def prompt(length: int, seed: int) -> tuple[int, ...]:
    ids = np.random.default_rng(seed).integers(20, VOCAB, length)
    return tuple(int(token) for token in ids)


def requests() -> list[Request]:
    """Greedy and sampled, short and long, with and without EOS."""
    sampled = SamplingParams(temperature=0.9, top_p=0.9, top_k=20, max_tokens=20, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    return [
        Request("short", prompt(1, 0), replace(greedy, ignore_eos=True)),
        Request("long", prompt(300, 1), replace(sampled, seed=5)),
        Request("greedy", prompt(40, 2), greedy),
        Request("border", prompt(127, 3), replace(sampled, seed=2**64 - 1)),
        Request("stops", prompt(9, 4), replace(sampled, seed=3, stop_token_ids=STOPS)),
        Request("full", prompt(128, 6), SamplingParams(seed=8, max_tokens=6)),
    ]


EXPECTED = {r.request_id: answer_alone(r.prompt_token_ids, r.sampling) for r in requests()}


def collect(engine: Engine, chunks: Iterable[TokenChunk] = ()) -> dict[str, tuple[int, ...]]:
    """Step until idle; gapless outputs by request, those in `chunks` before."""
    outputs: dict[str, tuple[int, ...]] = {}
    while chunks or engine.has_work():
        for chunk in chunks or engine.step():
            outputs.setdefault(chunk.request_id, ())
            assert chunk.index == len(outputs[chunk.request_id])
            outputs[chunk.request_id] += chunk.tokens
        chunks = ()
    stats = engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.total_blocks, 0, 0)
    return outputs


def test_the_oracle_covers_all_ways_to_end() -> None:
    ends = {name: tokens[-1] for name, tokens in EXPECTED.items()}
    assert ends["greedy"] == EOS or len(EXPECTED["greedy"]) == 30
    assert ends["stops"] in STOPS and len(EXPECTED["stops"]) < 20
    assert len(EXPECTED["long"]) == 20


@pytest.mark.parametrize("name", list(EXPECTED))
def test_alone(name: str) -> None:
    engine = Engine(CONFIG, FakeModel())
    engine.add(next(r for r in requests() if r.request_id == name))
    assert collect(engine) == {name: EXPECTED[name]}


@pytest.mark.parametrize("rows", [6, 7, 64, 128, 2000])
@pytest.mark.parametrize("backwards", [False, True])
def test_in_batches_and_chunks(rows: int, backwards: bool) -> None:
    model = FakeModel()
    engine = Engine(replace(CONFIG, max_num_batched_tokens=rows, max_num_seqs=6), model)
    for request in requests()[:: -1 if backwards else 1]:
        engine.add(request)
    assert collect(engine) == EXPECTED
    assert max(model.rows_per_step) <= rows
    assert max(model.sequences_per_step) >= 3


def test_arriving_while_others_run() -> None:
    engine = Engine(replace(CONFIG, max_num_batched_tokens=32), FakeModel())
    outputs: dict[str, tuple[int, ...]] = {}
    waiting = requests()
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop())
        for chunk in [*engine.step(), *engine.step()]:
            outputs[chunk.request_id] = outputs.get(chunk.request_id, ()) + chunk.tokens
    assert outputs == EXPECTED


def test_preempted_twice() -> None:
    # Three prompts of 1 block that grow to 4 on 6 blocks.
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=280, ignore_eos=True)
    wanted = {f"r{i}": Request(f"r{i}", prompt(120, i), replace(params, seed=i)) for i in range(3)}
    engine = Engine(replace(CONFIG, num_blocks=7, max_num_batched_tokens=100), FakeModel())
    for request in wanted.values():
        engine.add(request)
    outputs = collect(engine)
    # The first is never a victim, so three preemptions hit one of the others twice.
    assert engine.stats().preemptions >= 3
    for name, request in wanted.items():
        assert outputs[name] == answer_alone(request.prompt_token_ids, request.sampling)


def test_batch_invariant_mode_pads_to_whole_tiles() -> None:
    model = FakeModel(batch_invariant=True)
    engine = Engine(replace(CONFIG, max_num_batched_tokens=50, batch_invariant=True), model)
    for request in requests():
        engine.add(request)
    assert collect(engine) == EXPECTED
    assert {rows % 32 for rows in model.rows_per_step} == {0}


def test_seeds() -> None:
    def run(engine_seed: int | None, request_seed: int | None) -> list[tuple[int, ...]]:
        engine = Engine(replace(CONFIG, seed=engine_seed), FakeModel())
        params = SamplingParams(seed=request_seed, max_tokens=12, ignore_eos=True)
        for name in "ab":
            engine.add(Request(name, prompt(5, 0), params))
        return list(collect(engine).values())

    assert run(1, None) == run(1, None)
    assert run(1, None) != run(2, None)
    assert run(None, None) != run(None, None)
    first, second = run(1, None)
    assert first != second  # each request has a seed of its own
    first, second = run(1, 6)
    assert first == second and [first, second] == run(2, 6)


def test_ends() -> None:
    engine = Engine(replace(CONFIG, max_model_len=50), FakeModel())
    engine.add(Request("length", prompt(5, 0), SamplingParams(max_tokens=3, ignore_eos=True)))
    engine.add(Request("context", prompt(45, 0), SamplingParams(ignore_eos=True)))
    engine.add(Request("last", prompt(49, 0), SamplingParams(max_tokens=1)))
    finish: dict[str, TokenChunk] = {}
    while engine.has_work():
        finish |= {chunk.request_id: chunk for chunk in engine.step() if chunk.finish}
    assert {name: (chunk.finish, chunk.index) for name, chunk in finish.items()} == {
        "length": (FinishReason.LENGTH, 2),
        "context": (FinishReason.LENGTH, 4),
        "last": (FinishReason.LENGTH, 0),
    }


def test_abort_frees_at_once_and_is_told_once() -> None:
    engine = Engine(replace(CONFIG, max_num_seqs=1, overlap=False), FakeModel())
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    engine.add(Request("a", prompt(200, 0), params))
    engine.add(Request("b", prompt(200, 1), params))
    assert [chunk.index for _ in range(3) for chunk in engine.step()] == [0, 1, 2]
    engine.abort("a")
    engine.abort("b")
    engine.abort("a")
    engine.abort("never seen")
    assert engine.stats().free_blocks == engine.stats().total_blocks
    assert engine.has_work()
    assert list(engine.step()) == [
        TokenChunk("a", 3, (), FinishReason.ABORT),
        TokenChunk("b", 0, (), FinishReason.ABORT),
    ]
    assert not engine.has_work() and len(engine.step()) == 0


def test_nan_logits_fail_one_request_only() -> None:
    engine = Engine(replace(CONFIG, overlap=False), FakeModel())
    bad = Request("bad", (NAN_TOKEN, 20, 22), SamplingParams(max_tokens=5))
    good = requests()[2]
    engine.add(bad)
    engine.add(good)
    chunks = list(engine.step())
    assert [(c.request_id, c.finish) for c in chunks] == [
        ("bad", FinishReason.ERROR),
        ("greedy", None),
    ]
    assert chunks[0].error is not None and "not finite" in chunks[0].error
    assert chunks[1].tokens + collect_rest(engine) == EXPECTED["greedy"]


def collect_rest(engine: Engine) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while engine.has_work():
        for chunk in engine.step():
            tokens += chunk.tokens
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_step_that_raises_loses_nothing(overlap: bool, steps: int) -> None:
    model = FakeModel()
    engine = Engine(replace(CONFIG, overlap=overlap), model)
    for request in requests():
        engine.add(request)
    engine.add(Request("given up", prompt(3, 0), SamplingParams()))
    engine.abort("given up")
    chunks = [chunk for _ in range(steps) for chunk in engine.step()]
    model.fail_next = MemoryError("no room")
    with pytest.raises(MemoryError):
        for _ in range(2):
            chunks += engine.step()
    assert collect(engine, chunks) == EXPECTED | {"given up": ()}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "empty"),
        ((3, VOCAB, 4), f"Token 1 of the prompt is {VOCAB}, allowed are 0 to {VOCAB - 1}"),
        ((3, 4, -1), "Token 2 of the prompt is -1"),
        ((3, 2**70), "Token 1 of the prompt is 1180591620717411303424"),
        ((2**63 + 1,), "Token 0 of the prompt is 9223372036854775809"),
        ((3, 4.0), "Token 1 of the prompt is 4.0, token ids are integers"),
        ((True, False), "Token 0 of the prompt is True"),
        ((3, "x"), "Token 1 of the prompt is 'x'"),
    ],
)
def test_bad_prompts(ids: tuple[int, ...], message: str) -> None:
    engine = Engine(CONFIG, FakeModel())
    with pytest.raises(InvalidRequest, match=message) as caught:
        engine.add(Request("a", ids, SamplingParams()))
    assert caught.value.param == "prompt" and caught.value.http_status == 400
    assert not engine.has_work()


def test_requests_that_are_too_long() -> None:
    engine = Engine(replace(CONFIG, max_model_len=50), FakeModel())
    with pytest.raises(ContextTooLong, match="prompt has 50 tokens, the limit is 50 tokens"):
        engine.add(Request("a", prompt(50, 0), SamplingParams(max_tokens=1)))
    with pytest.raises(ContextTooLong, match="max_tokens is 11, together 51; the limit is 50"):
        engine.add(Request("a", prompt(40, 0), SamplingParams(max_tokens=11)))
    engine.add(Request("a", prompt(40, 0), SamplingParams(max_tokens=10)))


def test_other_requests_that_cannot_be_taken() -> None:
    engine = Engine(replace(CONFIG, max_waiting=2), FakeModel())
    with pytest.raises(InvalidRequest, match=r"stop_token_ids holds 50, allowed are 0 to 49"):
        engine.add(Request("a", (3,), SamplingParams(stop_token_ids=(4, VOCAB))))
    engine.add(Request("a", (3,), SamplingParams()))
    with pytest.raises(InvalidRequest, match="already in use"):
        engine.add(Request("a", (3,), SamplingParams()))
    engine.add(Request("b", (3,), SamplingParams()))
    with pytest.raises(Overloaded) as caught:
        engine.add(Request("c", (3,), SamplingParams()))
    assert caught.value.http_status == 503 and caught.value.retry_after_s


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"max_model_len": 2001}, "max_model_len", "model's limit is 2000"),
        ({"max_model_len": 257, "num_blocks": 3}, "max_model_len", "holds 256 tokens"),
        ({"num_blocks": None, "kv_memory_bytes": 1000}, "kv_memory_bytes", "1000 bytes"),
    ],
)
def test_configs_that_do_not_fit(changes: dict[str, int], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Engine(replace(CONFIG, **changes), FakeModel())
    assert caught.value.param == f"engine.{field}"


def test_sizes_follow_from_memory() -> None:
    # A block is 128 rows of 2 fp64 numbers; 39 slots of 7 such rows, padded to 128 bytes.
    budget = 39 * 128 + 5 * 2048
    engine = Engine(replace(CONFIG, num_blocks=None, kv_memory_bytes=budget), FakeModel())
    assert engine.capacity.num_slots == 39
    assert (engine.capacity.num_blocks, engine.max_model_len) == (5, 512)
    # With plenty of memory: every request at full length, and not a block more.
    engine = Engine(replace(CONFIG, num_blocks=None, max_model_len=300), FakeModel())
    assert (engine.capacity.num_blocks, engine.max_model_len) == (1 + 32 * 3, 300)
    engine = Engine(replace(CONFIG, num_blocks=None), FakeModel())
    assert engine.max_model_len == 2000
