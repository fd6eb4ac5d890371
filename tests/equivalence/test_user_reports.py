"""Reports of users of other systems as tests, by id; `docs/user-reports.md` says where each is.

On tiny-8 where the model decides, on the fake model where the engine does (its bounded replay is
exact, and `answer_alone` is an oracle without an engine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.load import numerics_of
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.ops.numerics import Numerics
from tests.unit.engine.fakes import VOCAB, FakeModel, FakeTokenizer, answer_alone

FAKE = EngineConfig(dtype="float64", kv_quant=False, num_blocks=40, seed=1)
EXACT = EngineConfig(
    dtype="float64", kv_quant=False, num_blocks=30, max_model_len=1024, replay="exact"
)
SERVING = EngineConfig(num_blocks=30, max_model_len=1024)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)


class Watched:
    """A model that keeps the cache it was given and its last logits; `during` runs in each step."""

    def __init__(self, model: Model | FakeModel) -> None:
        self._model = model
        self.spec, self.numerics, self.max_ngram = model.spec, model.numerics, model.max_ngram
        self.kv_groups = model.kv_groups
        self.cache: KVCache | None = None
        self.logits: list[Tensor] = []
        self.during: Callable[[], None] = lambda: None

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        self.cache = cache
        out = self._model.forward(batch, cache)
        self.logits += list(out.clone())
        self.during()
        return out


def ids(length: int, seed: int, vocab: int = 512) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(20, vocab, length).tolist())


def fake_ids(length: int, seed: int) -> tuple[int, ...]:
    return ids(length, seed, VOCAB)


def serve(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    """Output ids of requests with one choice each, once the engine is idle."""
    tokens: dict[str, list[int]] = {}
    for request in requests:
        engine.add(request)
        tokens[request.request_id] = []
    while engine.has_work():
        for chunk in engine.step():
            assert chunk.index == len(tokens[chunk.request_id])
            tokens[chunk.request_id] += chunk.tokens
    stats = engine.stats()
    assert (stats.free_blocks, stats.running) == (stats.total_blocks, 0)
    return tokens


def serve_rest(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def blocks_of(engine: Engine, request: Request) -> Tensor:
    """Serve a request of 512 prompt tokens; the blocks in which its prompt lies, int64 [4]."""
    engine.add(request)
    while not len(engine.step()):
        pass
    (row,) = np.flatnonzero(engine.scheduler.kv.held)
    blocks = engine.scheduler.kv.block_tables[row, :4].astype(np.int64)
    serve_rest(engine)
    return torch.from_numpy(blocks)


def alone(request: Request) -> list[int]:
    return list(answer_alone(request.prompt_token_ids, request.sampling))


@pytest.fixture(scope="module")
def exact_model(tiny_dir: Path) -> Model:
    return load_model(tiny_dir, numerics_of(EXACT))


@pytest.fixture(scope="module")
def serving_model(tiny_dir: Path) -> Model:
    return load_model(tiny_dir, numerics_of(SERVING))


# --- prefix cache ------------------------------------------------------------------------------


def test_pc1_repeats_of_a_prompt_are_the_cold_run(exact_model: Model) -> None:
    model = Watched(exact_model)
    engine = Engine(EXACT, model)
    prompt = Request("p", ids(700, 1), replace(GREEDY, max_tokens=12))
    cold = serve(engine, prompt)["p"]
    cold_logits = model.logits
    for turn in range(4):
        if turn == 3:
            serve(engine, Request("other", ids(500, 2), GREEDY))
        model.logits = []
        hits = engine.stats().prefix_hit_tokens
        assert serve(engine, prompt)["p"] == cold
        assert engine.stats().prefix_hit_tokens - hits == 640
        for found, wanted in zip(model.logits, cold_logits, strict=True):
            assert float((found - wanted).abs().max()) <= 1e-10
    assert len(cold) == 12


def test_pc1_repeats_after_a_bounded_replay_are_equal_to_each_other(serving_model: Model) -> None:
    engine = Engine(SERVING, serving_model)
    prompt = Request("p", ids(700, 1), replace(GREEDY, max_tokens=12))
    answers = []
    for turn in range(5):
        if turn == 3:
            serve(engine, Request("other", ids(500, 2), GREEDY))
        answers.append(serve(engine, prompt)["p"])
    assert engine.stats().prefix_hit_tokens == 4 * 640
    assert len(answers[0]) == 12
    assert answers[1:] == [answers[1]] * 4


def test_pc9_hits_at_every_residue_rewrite_no_shared_page() -> None:
    """Prompts that leave a shared one at every position of a block; also ratio 2's pairs."""
    model = Watched(FakeModel())
    engine = Engine(FAKE, model)
    shared = fake_ids(512, 1)
    blocks = blocks_of(engine, Request("first", shared, SAMPLED))
    assert model.cache is not None
    before = model.cache.blocks[blocks].clone()
    for residue in range(128):
        prompt = shared[: 384 + residue] + fake_ids(9, residue)
        request = Request("r", prompt, replace(SAMPLED, max_tokens=2))
        hits = engine.stats().prefix_hit_tokens
        assert serve(engine, request)["r"] == alone(request)
        assert engine.stats().prefix_hit_tokens - hits == 384
    assert torch.equal(model.cache.blocks[blocks], before)


@pytest.mark.parametrize("shared", [384, 385, 386, 447, 510, 511])
def test_pc9_on_the_model(exact_model: Model, shared: int) -> None:
    """The shared pages keep every byte, the answer is that of a cold run."""
    model = Watched(exact_model)
    engine = Engine(EXACT, model)
    prefix = ids(512, 1)
    blocks = blocks_of(engine, Request("first", prefix, GREEDY))
    assert model.cache is not None
    before = model.cache.blocks[blocks].clone()
    request = Request("r", prefix[:shared] + ids(60, shared), GREEDY)
    warm = serve(engine, request)
    assert engine.stats().prefix_hit_tokens == 384
    assert torch.equal(model.cache.blocks[blocks], before)
    assert warm == serve(Engine(replace(EXACT, prefix_cache=False), exact_model), request)


def test_pc11_two_alternating_conversations_with_pauses() -> None:
    now = [0.0]
    engine = Engine(FAKE, FakeModel(), clock=lambda: now[0])
    talks = {name: fake_ids(600, seed) for seed, name in enumerate("ab")}
    for turn in range(4):
        for name, prompt in talks.items():
            now[0] += 10.0
            before = engine.stats()
            request = Request(name, prompt, SAMPLED)
            output = serve(engine, request)[name]
            assert output == alone(request)
            hit = engine.stats().prefix_hit_tokens - before.prefix_hit_tokens
            assert hit == (0 if turn == 0 else (len(prompt) - 48) // 128 * 128)
            talks[name] = prompt + tuple(output) + fake_ids(40, turn)


def test_pc12_what_lies_in_a_hit_is_not_forgotten(exact_model: Model) -> None:
    """A needle in block 3 of 7: the resumed logits are the uninterrupted ones, and depend on it."""
    question = ids(150, 9)
    texts = {}
    for name, needle in (("yes", 30), ("no", 31)):
        text = list(ids(760, 1))
        text[3 * 128 + 17 : 3 * 128 + 25] = [needle] * 8
        texts[name] = tuple(text)
    logits = {}
    for name, text in texts.items():
        cold_model, model = Watched(exact_model), Watched(exact_model)
        request = Request(name, text + question, GREEDY)
        wanted = serve(Engine(replace(EXACT, prefix_cache=False), cold_model), request)
        engine = Engine(EXACT, model)
        serve(engine, Request("before", text + ids(60, 3), GREEDY))
        model.logits = []
        assert serve(engine, request) == wanted
        assert engine.stats().prefix_hit_tokens == 640
        for found, cold in zip(model.logits, cold_model.logits, strict=True):
            assert float((found - cold).abs().max()) <= 1e-10
        logits[name] = model.logits[0]
    assert float((logits["yes"] - logits["no"]).abs().max()) > 1e-6


def test_pc15_hits_and_misses_add_up_and_come_again() -> None:
    def run() -> list[int]:
        engine, hits = Engine(FAKE, FakeModel()), []
        random = np.random.default_rng(3)
        for number in range(16):
            prompt = fake_ids(700, int(random.integers(3)))[: random.integers(100, 700)]
            request = Request("r", prompt + fake_ids(60, number), replace(SAMPLED, max_tokens=1))
            before = engine.stats()
            serve(engine, request)
            after = engine.stats()
            hits.append(after.prefix_hit_tokens - before.prefix_hit_tokens)
            misses = after.prefix_miss_tokens - before.prefix_miss_tokens
            assert hits[-1] + misses == len(request.prompt_token_ids)
        return hits

    first = run()
    assert first == run()
    assert sum(hit > 0 for hit in first) > 4


# --- steps in flight, state that must not stay -------------------------------------------------


def test_sd5_a_tiny_request_behind_long_ones_ends_in_bounded_steps() -> None:
    engine = Engine(replace(FAKE, num_blocks=15, max_num_batched_tokens=128), FakeModel())
    for number in range(6):
        length, output = (1500, 20) if number % 2 else (60, 20)
        engine.add(
            Request(f"r{number}", fake_ids(length, number), replace(SAMPLED, max_tokens=output))
        )
    for _ in range(5):
        engine.step()
    tiny = Request("tiny", fake_ids(3, 9), replace(SAMPLED, max_tokens=2))
    engine.add(tiny)
    found: list[int] = []
    steps = 0
    while len(found) < 2:
        found += [t for c in engine.step() if c.request_id == "tiny" for t in c.tokens]
        steps += 1
        assert steps < 100
    assert found == alone(tiny)
    assert engine.stats().waiting > 0  # a long one that came before
    serve_rest(engine)
    assert engine.stats().finished == 7


def test_sd9_text_ids_logprobs_and_usage_end_at_the_same_token() -> None:
    """The engine's part; tests/unit/engine/test_stops.py has runs of several tokens a step."""
    prompt = fake_ids(20, 4)
    free = alone(Request("a", prompt, replace(SAMPLED, max_tokens=12)))
    text = FakeTokenizer().decode(free)
    stop = text[4:6]  # the detokenizer gives out pairs of ids
    end = text.index(stop) + 2
    engine = Engine(FAKE, FakeModel(), tokenizer=FakeTokenizer())
    params = replace(SAMPLED, max_tokens=12, stop=(stop,), logprobs=0)
    engine.add(Request("a", prompt, params))
    chunks = []
    while engine.has_work():
        chunks += list(engine.step())
    assert [token for chunk in chunks for token in chunk.tokens] == free[: end + end % 2]
    assert all(len(chunk.logprobs or ()) == len(chunk.tokens) == 1 for chunk in chunks)
    assert (chunks[-1].stop, chunks[-1].finish) == (stop, "stop")
    assert engine.stats().drawn_tokens == len(chunks)
    assert engine.stats().free_blocks == engine.stats().total_blocks


@pytest.mark.parametrize("at", [1, 3])
def test_sd11_preempted_in_flight_twice_in_a_row(at: int) -> None:
    """The result that is under way when a request gives way is dropped, both times."""
    model = Watched(FakeModel())
    engine = Engine(replace(FAKE, overlap=False), model)  # the hook runs in the engine's thread
    requests = [Request(name, fake_ids(40, seed), SAMPLED) for seed, name in enumerate("ab")]
    steps = [0]

    def during() -> None:
        steps[0] += 1
        if steps[0] in (at, at + 1):
            engine.scheduler.preempt("a", 0.0)

    model.during = during
    assert serve(engine, *requests) == {r.request_id: alone(r) for r in requests}
    stats = engine.stats()
    assert stats.preemptions == 2
    assert stats.drawn_tokens == 2 * SAMPLED.max_tokens


def test_sd12_nothing_of_a_preempted_request_stays_in_its_row() -> None:
    """Whoever gets the row samples with its own settings; so does the first one afterwards."""
    engine = Engine(replace(FAKE, max_num_seqs=1), FakeModel(), tokenizer=FakeTokenizer())
    strict = replace(
        SAMPLED,
        logit_bias={30: 50.0},
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        banned_token_ids=tuple(range(20, 30)),
    )
    first = Request("first", fake_ids(9, 1), strict)
    engine.add(first)
    found: dict[str, list[int]] = {"first": [], "second": []}
    for _ in range(3):
        found["first"] += [token for chunk in engine.step() for token in chunk.tokens]
    engine.scheduler.preempt("first", 0.0)
    second = Request("second", fake_ids(9, 2), SAMPLED, priority=-1)
    engine.add(second)
    while engine.has_work():
        for chunk in engine.step():
            assert chunk.index == len(found[chunk.request_id])
            found[chunk.request_id] += chunk.tokens
    assert found == {"first": alone(first), "second": alone(second)}
    assert 30 in found["first"]


def test_sd20_a_stop_leaves_the_random_state_of_the_next_request_alone() -> None:
    engine = Engine(replace(FAKE, max_num_seqs=1), FakeModel(), tokenizer=FakeTokenizer())
    prompt = fake_ids(20, 4)
    free = Request("a", prompt, replace(SAMPLED, max_tokens=12))
    text = FakeTokenizer().decode(alone(free))
    stopped = Request("a", prompt, replace(free.sampling, stop=(text[2:4],)))
    assert len(serve(engine, stopped)["a"]) < 12
    assert serve(engine, free)["a"] == alone(free)


# --- numbers -----------------------------------------------------------------------------------


def plain_nll(model: Model, tokens: tuple[int, ...]) -> np.ndarray:
    """Negative log likelihood per token [n - 1] by one prefill of everything, without an engine."""
    blocks = -(-len(tokens) // 128)
    cache = KVCache(
        model.kv_groups(), num_blocks=blocks + 1, num_slots=2, dtype=model.numerics.torch_dtype
    )
    row = BatchRow(np.array(tokens), 0, len(tokens), list(range(1, blocks + 1)), 1, "all")
    with torch.inference_mode():
        logits = model.forward(Batch.build([row], model.max_ngram), cache)
    following = torch.tensor(tokens[1:])[:, None]
    return -logits[:-1].log_softmax(-1).gather(1, following)[:, 0].double().numpy()


def engine_nll(engine: Engine, tokens: tuple[int, ...]) -> np.ndarray:
    engine.add(Request("p", tokens, replace(GREEDY, max_tokens=1, prompt_logprobs=0)))
    while engine.has_work():
        for chunk in engine.step():
            records = chunk.prompt_logprobs
    assert records is not None
    return np.array([-record.logprob for record in records[1:] if record is not None])


def test_dt6_perplexity_does_not_grow_with_the_length(
    exact_model: Model, serving_model: Model
) -> None:
    """1,000 random ids: the chunked engine is the plain run, quantised caches stay near it.

    By eighths; the mean over 125 ids of a random model has a standard error of 0.2.
    """
    text = ids(1000, 5)
    plain = plain_nll(exact_model, text)
    chunked = engine_nll(Engine(replace(EXACT, max_num_batched_tokens=200), exact_model), text)
    assert np.abs(chunked - plain).max() <= 1e-9
    config = replace(SERVING, max_num_batched_tokens=200)
    quantised = engine_nll(Engine(config, serving_model), text)
    parts = [np.array_split(nll, 8) for nll in (plain, quantised)]
    means = np.array([[part.mean() for part in side] for side in parts])
    assert np.ptp(means, axis=1).max() < 1.0
    assert np.abs(means[1] - means[0]).max() < 0.5


def test_dt7_blocks_beyond_two_to_the_31_bytes(tiny_dir: Path) -> None:
    """A virtual pool of more than 2^31 elements: the last blocks are used like the first ones."""
    model = load_model(tiny_dir, Numerics("float32", kv_quant=True))
    few = KVCache(model.kv_groups(), num_blocks=5, num_slots=2, dtype=torch.float32)
    count = 2**31 // few.blocks.shape[1] + 64
    many = KVCache(model.kv_groups(), num_blocks=count, num_slots=2, dtype=torch.float32)
    assert many.blocks.numel() > 2**31
    tokens = np.array(ids(300, 1))
    found = []
    for cache, table in ((few, [1, 2, 3]), (many, [count - 1, count - 2, count - 3])):
        with torch.inference_mode():
            for start, length in ((0, 290), (290, 10)):
                row = BatchRow(tokens, start, length, table, 1, "last")
                logits = model.forward(Batch.build([row], model.max_ngram), cache)
        found.append(logits)
        many_used = cache.blocks[torch.tensor(table)]
        assert many_used.any(dim=1).all()
    assert torch.equal(*found)
