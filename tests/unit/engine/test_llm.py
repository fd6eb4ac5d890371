"""LLM over a fake model: generate, stream, text, errors, and what an interruption leaves behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.output import FinishReason
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.errors import ContextTooLong, HeadraceError, InvalidRequest
from tests.unit.engine.fakes import NAN_TOKEN, FakeModel, FakeTokenizer, answer_alone

CONFIG = EngineConfig(dtype="float64", kv_quant=False, num_blocks=40, seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[20 + index, 30, 40 - index] for index in range(9)]


def make(**changes: object) -> tuple[LLM, FakeModel]:
    model = FakeModel()
    engine = Engine(replace(CONFIG, **changes), model)
    return LLM.from_engine(engine, FakeTokenizer()), model


def assert_idle(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)


@pytest.mark.parametrize("changes", [{}, {"max_waiting": 1, "max_num_seqs": 2}])
def test_generate_keeps_the_order(changes: dict[str, int]) -> None:
    llm, _ = make(**changes)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    assert [output.token_ids for output in outputs] == [answer_alone(p, GREEDY) for p in PROMPTS]
    assert {output.finish for output in outputs} == {FinishReason.LENGTH}
    assert_idle(llm)


def test_stream_gives_what_generate_gives() -> None:
    llm, _ = make()
    params = SamplingParams(seed=3, max_tokens=40)
    [output] = llm.generate(["ABC"], params)
    chunks = list(llm.stream("ABC", params))
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == output.token_ids
    assert "".join(chunk.text for chunk in chunks) == output.text != ""
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish == output.finish
    assert output.prompt_token_ids == (0, 0, 1, 2)  # begin of text, then "ABC"


def test_text_leaves_out_the_token_that_ended_it() -> None:
    llm, _ = make()
    free = llm.generate([[21]], GREEDY)[0]
    stop = free.token_ids[4]
    cut = llm.generate([[21]], replace(GREEDY, stop_token_ids=(stop,)))[0]
    end = free.token_ids.index(stop)
    assert cut.finish is FinishReason.STOP
    assert cut.token_ids == free.token_ids[: end + 1]
    assert cut.text == free.text[:end]


def test_one_sampling_per_prompt() -> None:
    llm, _ = make()
    each = [replace(GREEDY, max_tokens=n) for n in (1, 5)]
    assert [len(o.token_ids) for o in llm.generate(PROMPTS[:2], each)] == [1, 5]
    with pytest.raises(InvalidRequest, match="2 sampling parameters were given for 9 prompts"):
        llm.generate(PROMPTS, each)


def test_bad_prompts_are_named_before_anything_runs() -> None:
    llm, model = make(max_model_len=20)
    with pytest.raises(InvalidRequest, match=r"prompt 1: Token 0 of the prompt is 99"):
        llm.generate([[20], [99]], GREEDY)
    with pytest.raises(ContextTooLong, match="prompt 2: The prompt has 30 tokens"):
        llm.generate([[20], [21], [22] * 30], GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([""], GREEDY)
    with pytest.raises(InvalidRequest, match="must be a list"):
        llm.generate("text", GREEDY)
    assert model.rows_per_step == []
    assert_idle(llm)


def test_text_needs_a_tokenizer() -> None:
    llm = LLM.from_engine(Engine(CONFIG, FakeModel()))
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        llm.generate(["A"], GREEDY)
    assert llm.generate([[20]], GREEDY)[0].text == ""


def test_a_failed_request_does_not_disturb_the_others() -> None:
    llm, _ = make()
    outputs = llm.generate([[20], [NAN_TOKEN], [21]], GREEDY)
    assert [o.finish for o in outputs] == ["length", "error", "length"]
    assert outputs[1].error is not None and "not finite" in outputs[1].error
    assert outputs[2].token_ids == answer_alone([21], GREEDY)


def test_ctrl_c_leaves_the_engine_usable() -> None:
    llm, model = make(max_num_seqs=3, max_waiting=4)
    stream = llm.stream([25], GREEDY)
    next(stream)
    model.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    stats = llm.engine.stats()
    assert stats.running + stats.waiting == 1  # the stream is somebody else's
    assert llm.generate(PROMPTS[:2], GREEDY)[1].token_ids == answer_alone(PROMPTS[1], GREEDY)
    rest = [token for chunk in stream for token in chunk.token_ids]
    assert tuple(rest) == answer_alone([25], GREEDY)[1:]
    assert_idle(llm)


def test_closing_a_stream_aborts_it() -> None:
    llm, _ = make()
    stream = llm.stream([25], GREEDY)
    next(stream)
    assert llm.engine.stats().running == 1
    stream.close()
    assert_idle(llm)
    assert llm.engine.stats().aborted == 1


def test_interleaved_streams() -> None:
    llm, _ = make()
    streams = [llm.stream(p, GREEDY) for p in PROMPTS[:3]]
    rounds = list(zip(*streams, strict=False))
    for index in range(3):
        tokens = tuple(token for chunks in rounds for token in chunks[index].token_ids)
        assert tokens == answer_alone(PROMPTS[index], GREEDY)


def test_closed() -> None:
    llm, _ = make()
    with llm:
        next(llm.stream([25], GREEDY))
    with pytest.raises(HeadraceError, match="closed"):
        llm.generate(PROMPTS, GREEDY)
    llm.close()


def test_progress_bar_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = make()
    llm.generate(PROMPTS[:2], GREEDY, progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "2/2" in captured.err


# --- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [[5], [None], None, 5, b"abc", [b"abc"], {"a": 1}, "text"])
def test_prompts_that_are_none(prompts: object) -> None:
    llm, _ = make()
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate(prompts, GREEDY)
    assert_idle(llm)


BAD_TOKENS = [[6], None, 2.0, "7", True, 10**5000, -1, {1: 2}]


@pytest.mark.parametrize("token", BAD_TOKENS, ids=lambda token: type(token).__name__)
def test_a_bad_token_names_its_prompt_and_place(token: object) -> None:
    llm, _ = make()
    with pytest.raises(InvalidRequest, match="prompt 1: Token 2 of the prompt"):
        llm.generate([[5], [5, 6, token]], GREEDY)
    with pytest.raises(InvalidRequest, match="Token 0 of the prompt"):
        next(llm.stream([token], GREEDY))


@pytest.mark.parametrize("sampling", [[None], {"temperature": 0}, 3, "greedy", [GREEDY, 4]])
def test_sampling_that_is_none(sampling: object) -> None:
    llm, _ = make()
    with pytest.raises(InvalidRequest, match="sampling"):
        llm.generate([[20]], sampling)
    with pytest.raises(InvalidRequest, match="sampling"):
        next(llm.stream([20], sampling))


def test_any_iterable_of_prompts_and_arrays_of_ids() -> None:
    llm, _ = make()
    expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    arrays = (np.array(prompt, dtype=np.int32) for prompt in PROMPTS)
    outputs = llm.generate(arrays, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert {type(token) for output in outputs for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize("checkpoint", [5, None, b"model"])
def test_a_checkpoint_or_config_of_another_type(checkpoint: object) -> None:
    with pytest.raises(InvalidRequest, match="checkpoint must be"):
        LLM(checkpoint)
    with pytest.raises(InvalidRequest, match="config must be an EngineConfig, got dict"):
        LLM("model", {"seed": 3})


def test_a_second_thread_gets_an_error_and_the_first_one_its_tokens() -> None:
    llm, model = make()
    forward = model.forward
    refused: list[str] = []

    def intrude() -> None:
        for use in (
            lambda: llm.generate([[30]], GREEDY),
            lambda: next(llm.stream([30])),
            llm.close,
        ):
            try:
                use()
            except InvalidRequest as error:
                refused.append(error.message)

    def forward_with_intruder(*arguments: object) -> object:
        if not refused:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
        return forward(*arguments)

    model.forward = forward_with_intruder
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [answer_alone(p, GREEDY) for p in PROMPTS]
    assert len(refused) == 3
    assert all("one thread at a time" in message for message in refused)
    assert_idle(llm)


def test_streams_of_one_thread_mix_and_one_closed_in_a_step_is_forgotten_later() -> None:
    llm, model = make()
    forward = model.forward
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    firsts = [next(stream).token_ids for stream in streams]
    model.forward = lambda *arguments: (streams[2].close(), forward(*arguments))[1]
    rest = [[token for chunk in stream for token in chunk.token_ids] for stream in streams[:2]]
    answers = [[*first, *more] for first, more in zip(firsts, rest, strict=False)]
    assert answers == [list(answer_alone(prompt, GREEDY)) for prompt in PROMPTS[:2]]
    llm.generate([[20]], GREEDY)
    assert_idle(llm)
