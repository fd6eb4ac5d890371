"""Sampling through the whole engine: stops, choices, log probabilities, penalties, preemption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.output import FinishReason, RequestOutput, TokenLogprobs
from headrace.core.request import Request
from headrace.core.rng import choice_seed
from headrace.core.sampling import LogprobsMode, SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.errors import InvalidRequest
from tests.unit.engine.fakes import (
    EOS,
    NAN_TOKEN,
    VOCAB,
    FakeModel,
    FakeTokenizer,
    answer_alone,
    expected_logits,
)

CONFIG = EngineConfig(dtype="float64", kv_quant=False, num_blocks=40, seed=1)
FREE = SamplingParams(seed=5, max_tokens=24, ignore_eos=True)
PROMPT = [20, 30, 40]


def make(tokenizer: bool = True, **changes: Any) -> LLM:
    model = FakeModel()
    text = FakeTokenizer()
    engine = Engine(replace(CONFIG, **changes), model, tokenizer=text if tokenizer else None)
    return LLM.from_engine(engine, text)


def one(llm: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate([prompt], params)
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    return output


def letters(ids: tuple[int, ...]) -> str:
    return "".join(chr(65 + token) for token in ids)


@pytest.mark.parametrize("start", [0, 1, 6, 11])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_text_ids_and_logprobs_end_at_the_same_token(start: int, length: int) -> None:
    """The detokenizer gives letters in pairs, so stops complete in the middle of its output."""
    llm = make()
    free = one(llm, PROMPT, replace(FREE, logprobs=2))
    stop = free.text[start : start + length]
    at = free.text.index(stop)
    output = one(llm, PROMPT, replace(FREE, logprobs=2, stop=("no such text", stop)))
    # The pair of letters that completes the string comes out with its second id.
    used = (at + len(stop) + 1) // 2 * 2
    assert output.token_ids == free.token_ids[:used]
    assert output.logprobs is not None and free.logprobs is not None
    assert output.logprobs == free.logprobs[:used]
    assert output.text == free.text[:at]
    assert (output.finish, output.stop) == (FinishReason.STOP, stop)
    chunks = list(llm.stream(PROMPT, replace(FREE, stop=(stop,))))
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == output.token_ids
    assert chunks[-1].stop == stop


def test_memory_is_free_in_the_step_of_the_stop_string() -> None:
    llm = make()
    free = one(llm, PROMPT, FREE)
    engine = llm.engine
    engine.add(Request("r", tuple(PROMPT), replace(FREE, stop=(free.text[4:7],))))
    while True:
        chunks = list(engine.step())
        if chunks and chunks[-1].finish is not None:
            break
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert chunks[-1].index + 1 == 8
    while engine.has_work():
        assert len(engine.step()) == 0


def test_a_stop_string_at_the_last_allowed_token_is_a_stop() -> None:
    llm = make()
    free = one(llm, PROMPT, replace(FREE, max_tokens=4))
    output = one(llm, PROMPT, replace(FREE, max_tokens=4, stop=(free.text[2:4],)))
    assert (output.finish, output.text) == (FinishReason.STOP, free.text[:2])


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="Stop strings need a tokenizer"):
        make(tokenizer=False).generate([PROMPT], replace(FREE, stop=("x",)))


def test_a_stop_token_is_told() -> None:
    llm = make()
    free = one(llm, PROMPT, FREE)
    token = free.token_ids[3]
    end = free.token_ids.index(token)
    output = one(llm, PROMPT, replace(FREE, stop_token_ids=(token,)))
    assert output.token_ids == free.token_ids[: end + 1]
    assert (output.finish, output.stop) == (FinishReason.STOP, token)
    assert output.text == letters(free.token_ids[:end])


def test_min_tokens_keeps_eos_and_stop_tokens_away() -> None:
    llm = make()
    likely = {EOS: 100.0}
    short = SamplingParams(seed=5, logit_bias=likely, max_tokens=9)
    assert one(llm, PROMPT, short).token_ids == (EOS,)
    output = one(llm, PROMPT, replace(short, min_tokens=6))
    assert len(output.token_ids) == 7 and output.token_ids.index(EOS) == 6
    assert output.finish is FinishReason.STOP
    other = one(llm, PROMPT, replace(short, ignore_eos=True))
    assert other.token_ids == (EOS,) * 9 and other.finish is FinishReason.LENGTH


@pytest.mark.parametrize("changes", [{}, {"max_num_seqs": 2, "max_num_batched_tokens": 2}])
def test_choices_draw_with_seeds_of_their_own(changes: dict[str, int]) -> None:
    llm = make(**changes)
    params = SamplingParams(seed=9, max_tokens=15, n=4, logprobs=1, presence_penalty=0.7)
    outputs = llm.generate([PROMPT, [21, 22]], params)
    assert [output.choice for output in outputs] == [0, 1, 2, 3] * 2
    assert len({output.token_ids for output in outputs}) == 8
    for output in outputs:
        single = replace(params, n=1, seed=choice_seed(9, output.choice))
        assert output.token_ids == answer_alone(output.prompt_token_ids, single)
        assert output.logprobs == one(llm, list(output.prompt_token_ids), single).logprobs
    stats = llm.engine.stats()
    assert stats.running == stats.waiting == 0


def test_streamed_choices_are_those_of_generate() -> None:
    llm = make()
    params = SamplingParams(seed=9, max_tokens=15, n=3)
    outputs = llm.generate([PROMPT], params)
    chunks = list(llm.stream(PROMPT, params))
    for output in outputs:
        own = [chunk for chunk in chunks if chunk.choice == output.choice]
        assert "".join(chunk.text for chunk in own) == output.text
        assert [chunk.finish for chunk in own].count(None) == len(own) - 1


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def check(record: TokenLogprobs | None, tokens: list[int], token: int, count: int) -> None:
    expected = log_softmax(expected_logits(tokens))
    assert record is not None
    assert np.isclose(record.logprob, expected[token], rtol=1e-12)
    order = np.argsort(-expected)[:count]
    assert list(record.top_ids) == order.tolist()
    assert np.allclose(record.top_logprobs, expected[order], rtol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_logprobs_of_output_and_prompt_are_those_of_the_model(chunk: int) -> None:
    llm = make(max_num_batched_tokens=chunk, max_num_seqs=1)
    params = replace(FREE, logprobs=4, prompt_logprobs=3, top_k=5, temperature=0.7)
    prompt = [20, 30, 40, 41, 7, 7, 3]
    output = one(llm, prompt, params)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    tokens = [*prompt, *output.token_ids]
    assert len(output.logprobs) == len(output.token_ids)
    for place, record in enumerate(output.logprobs, len(prompt)):
        check(record, tokens[:place], tokens[place], 4)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for place in range(1, len(prompt)):
        check(output.prompt_logprobs[place], tokens[:place], tokens[place], 3)


def test_the_whole_vocabulary_offline_and_no_more() -> None:
    llm = make()
    output = one(llm, PROMPT, replace(FREE, max_tokens=2, logprobs=VOCAB, prompt_logprobs=VOCAB))
    assert output.logprobs is not None
    assert sorted(output.logprobs[0].top_ids) == list(range(VOCAB))
    assert np.isclose(np.exp(output.logprobs[0].top_logprobs).sum(), 1.0)
    with pytest.raises(InvalidRequest, match="prompt 0: logprobs must be at most 50"):
        llm.generate([PROMPT], replace(FREE, logprobs=VOCAB + 1))


def test_processed_logprobs_of_a_greedy_answer() -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=5, logprobs=1, logprobs_mode=LogprobsMode.PROCESSED
    )
    output = one(make(), PROMPT, replace(params, banned_token_ids=tuple(range(0, 50, 2))))
    assert output.logprobs is not None
    for token, record in zip(output.token_ids, output.logprobs, strict=True):
        assert token % 2 == 1 and record.top_ids == (token,)
        assert record.logprob == record.top_logprobs[0]


def test_penalties_and_stops_over_preemption_equal_running_alone() -> None:
    """A pool of 6 blocks for five answers of three blocks each: some are preempted."""
    llm = make(num_blocks=7, max_num_seqs=5, max_num_batched_tokens=300)
    params = [
        SamplingParams(seed=n, max_tokens=200, ignore_eos=True, repetition_penalty=1.3)
        for n in range(2)
    ]
    params += [replace(params[0], seed=4, presence_penalty=1.0, frequency_penalty=0.4)]
    params += [replace(params[0], seed=5, min_tokens=170, ignore_eos=False)]
    prompts = [[20 + n] * (110 + n) for n in range(5)]
    alone = answer_alone(prompts[4], replace(params[0], seed=6))
    stop = letters(alone[130:136])
    params += [replace(params[0], seed=6, stop=(stop,))]
    outputs = llm.generate(prompts, params)
    assert llm.engine.stats().preemptions > 0
    for output, prompt, one_params in zip(outputs[:4], prompts, params, strict=False):
        assert output.token_ids == answer_alone(prompt, one_params)
    assert letters(alone).startswith(outputs[4].text + stop)
    assert outputs[4].token_ids == alone[: len(outputs[4].token_ids)]
    assert outputs[4].stop == stop


def test_one_row_of_nan_fails_its_request_only() -> None:
    llm = make()
    params = replace(FREE, logprobs=1, repetition_penalty=1.2)
    good, bad, other = llm.generate([PROMPT, [NAN_TOKEN, 4], [22]], params)
    assert bad.finish is FinishReason.ERROR and bad.error is not None
    assert good.token_ids == answer_alone(PROMPT, params)
    assert other.token_ids == answer_alone([22], params)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"banned_token_ids": (VOCAB,)}, "banned_token_ids"),
        ({"allowed_token_ids": (3, VOCAB)}, "allowed_token_ids"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"banned_token_ids": tuple(range(VOCAB))}, "banned_token_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "min_tokens"),
        ({"prompt_logprobs": VOCAB + 1}, "prompt_logprobs"),
    ],
)
def test_what_the_vocabulary_cannot_do_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make().generate([PROMPT], SamplingParams(**fields))
    assert caught.value.param == param
