"""Stop strings, several choices, log probabilities over HTTP, as the official SDK sees them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from headrace.core.output import FinishReason
from headrace.core.request import Request
from headrace.core.sampling import LogprobsMode, SamplingParams, StopScope
from headrace.engine.stops import StopStrings
from headrace.recipe import convert_chat
from headrace.recipe.chunks import Finish, Stopped, Tokens
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.options import Level
from headrace.recipe.parser.items import AnswerEnd, AnswerFinish, CallArguments, Content
from headrace.recipe.parser.parser import OutputParser
from tests.server.scripted import (
    CODEC,
    EOS,
    MODEL,
    THINK_END,
    TOKENIZER,
    USER,
    Last,
    LiveServer,
    Of,
    Step,
    answer,
    events_of,
    wait_for,
)

PLAIN = {"thinking": {"type": "disabled"}}


def create(server: LiveServer, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        result: Any = client.chat.completions.create(
            model=MODEL, messages=USER, extra_body=extra or PLAIN, **fields
        )
        return list(result) if fields.get("stream") else result


def text_of(chunks: Sequence[Any], choice: int = 0, field: str = "content") -> str:
    deltas = [c.delta for chunk in chunks for c in chunk.choices if c.index == choice]
    return "".join(getattr(delta, field, None) or "" for delta in deltas)


def tokens_until(text: str, stop: str) -> int:
    """Tokens up to and including the one in which `stop` completes."""
    ids = TOKENIZER.encode(text)
    return next(n for n in range(len(ids) + 1) if stop in TOKENIZER.decode(ids[:n]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("Hello there, what is the answer?", "e, wh"),
        ("ababac and more", "abac"),
        ("数据。结束。后", "结束"),
        ("STOP", "STOP"),
        ("Hello there", "Hello"),
        ("never, it says", "STOP"),
    ],
)
def test_text_ids_and_usage_end_at_the_stop_string(
    server: LiveServer, text: str, stop: str, stream: bool
) -> None:
    server.engine.script = answer(text)
    produced = server.engine.produced
    found = stop in text
    expected = text[: text.index(stop)] if found else text
    used = tokens_until(text, stop) if found else len(TOKENIZER.encode(text)) + 1
    if stream:
        chunks = create(server, stop=stop, stream=True, stream_options={"include_usage": True})
        assert text_of(chunks) == expected
        assert [c.finish_reason for k in chunks for c in k.choices if c.finish_reason] == ["stop"]
        assert chunks[-1].usage.completion_tokens == used
    else:
        result = create(server, stop=[stop])
        assert result.choices[0].message.content == expected
        assert result.choices[0].finish_reason == "stop"
        assert result.usage.completion_tokens == used
    assert server.engine.produced - produced == used


def test_no_event_shows_the_beginning_of_a_stop_string(server: LiveServer) -> None:
    server.engine.script = answer("one EN two END three")
    chunks = create(server, stop="END", stream=True)
    seen = ""
    for chunk in chunks:
        seen += text_of([chunk])
        assert "one EN two ".startswith(seen)
    assert seen == "one EN two "


def test_a_stop_string_in_the_reasoning_is_ignored(server: LiveServer) -> None:
    server.engine.script = answer("yes STOP no", reasoning="I STOP here")
    result = create(server, {"thinking": {"type": "enabled"}}, stop=["STOP"])
    message = result.choices[0].message
    assert (message.reasoning_content, message.content) == ("I STOP here", "yes ")
    sampling = server.engine.requests[-1].sampling
    assert sampling.stop_scope == StopScope(THINK_END, after_border=True, skip_newlines=True)
    result = create(server, {"thinking": {"type": "enabled"}}, stop=["I S"])
    assert result.choices[0].message.content == "yes STOP no"


DSML = CODEC.special.dsml
PIECES = [
    *(TOKENIZER.encode(text) for text in ("a", "b", "\n", "é", "ab", " b", "<", "a<b")),
    TOKENIZER.encode("é")[:1],  # an incomplete character
    [THINK_END],
    [TOKENIZER.added[CODEC.special.user]],
]


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("stage", [None, *ThinkingStage])
def test_parser_and_engine_see_the_same_content(stage: ThinkingStage | None, tools: bool) -> None:
    """Random answers: where the engine ends, the parser's content is cut exactly there."""
    rng = random.Random(f"{stage}{tools}")
    pieces = [*PIECES, [TOKENIZER.added[DSML]]] if tools else PIECES
    ends = 0
    for _ in range(1500):
        ids = [token for _ in range(12) for token in rng.choice(pieces)]
        stops = tuple(
            "".join(rng.choices("abé\n<", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))
        )
        parsing = ParsingOptions(tools, thinking_stage=stage, stops=stops, engine_stops=True)
        minimum = rng.choice([0, 0, 5])
        search = StopStrings(
            stops, TOKENIZER.detokenizer(skip_special=False), CODEC.stop_scope(parsing), minimum
        )
        count, found = len(ids), None
        for number, token in enumerate(ids, 1):
            found = search.push(token)
            if found is not None:
                count = number
                break
        parser = OutputParser(parsing, CODEC.special, Level.CLIENTS, TOKENIZER)
        cut = rng.randint(0, count - 1)  # the chunk that ends it has the token that ended it
        items = parser.push(Tokens(ids[:cut]))
        early = text_of_items(items)
        last = Finish() if found is None else Stopped(ids[cut:count], found.stop, found.cut)
        if found is None:
            items += parser.push(Tokens(ids[cut:]))
        items += parser.push(last)
        # The same answer without stop strings, up to the same token.
        free = OutputParser(
            ParsingOptions(tools, thinking_stage=stage), CODEC.special, Level.CLIENTS, TOKENIZER
        )
        whole = free.push(Tokens(ids[:count]))
        finish = items[-1]
        assert isinstance(finish, AnswerFinish)
        assert text_of_items(items).startswith(early)
        assert finish.completion_tokens == count
        if found is None:
            whole += free.push(Finish())
            assert text_of_items(items) == text_of_items(whole)
            continue
        ends += 1
        assert (finish.end, finish.stop) == (AnswerEnd.STOP_SEQUENCE, found.stop)
        content = text_of_items(items)
        if found.stop == "\n" and not content:
            continue  # met before it could be skipped
        seen = text_of_items(whole) + held_text(free)
        assert content + found.stop == seen[: len(content) + len(found.stop)]
        assert len(content) + found.cut == len(seen)
    assert ends > 300


def text_of_items(items: Sequence[Any]) -> str:
    assert not any(isinstance(item, CallArguments) for item in items)
    return "".join(item.text for item in items if isinstance(item, Content))


def held_text(parser: OutputParser) -> str:
    """What the parser holds back of the content, an incomplete character left out."""
    rest = "".join(piece.text for piece in parser._maker.rest())  # type: ignore[union-attr]
    return parser._machine.scanner.held_text + rest


def choices_script(request: Request) -> list[Step]:
    return [
        Of(1, "beta "),
        "al",
        Of(2, "gam"),
        "pha",
        Of(1, Last(FinishReason.LENGTH)),
        Last(FinishReason.STOP, [EOS]),
        Of(2, "ma"),
        Of(2, Last(FinishReason.STOP, [EOS])),
    ]


def test_several_choices(server: LiveServer) -> None:
    server.engine.script = choices_script
    result = create(server, n=3)
    contents = [(c.index, c.message.content, c.finish_reason) for c in result.choices]
    assert contents == [(0, "alpha", "stop"), (1, "beta ", "length"), (2, "gamma", "stop")]
    used = sum(len(TOKENIZER.encode(text)) for text in ("al", "pha", "beta ", "gam", "ma")) + 2
    assert result.usage.completion_tokens == used
    assert server.engine.requests[-1].sampling.n == 3
    wait_for(lambda: not server.engine.running)
    assert server.engine.aborted == []


def test_several_choices_streamed(server: LiveServer) -> None:
    server.engine.script = choices_script
    chunks = create(server, n=3, stream=True, stream_options={"include_usage": True})
    assert [text_of(chunks, choice) for choice in range(3)] == ["alpha", "beta ", "gamma"]
    events = [choice for chunk in chunks for choice in chunk.choices]
    for number in range(3):
        own = [choice for choice in events if choice.index == number]
        assert own[0].delta.role == "assistant"
        assert [choice.finish_reason is not None for choice in own].count(True) == 1
        assert own[-1].finish_reason is not None
    order = [choice.index for choice in events if choice.delta.content]
    assert order == [1, 0, 2, 0, 2]  # as they come
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


def test_a_stop_string_ends_its_own_choice(server: LiveServer) -> None:
    server.engine.script = lambda request: [
        "one END",
        Of(1, "two EN"),
        Of(1, "D three"),
        Of(1, Last(FinishReason.STOP, [EOS])),
    ]
    result = create(server, n=2, stop="END")
    assert [choice.message.content for choice in result.choices] == ["one ", "two "]


def test_an_error_of_one_choice_is_the_error_of_the_answer(server: LiveServer) -> None:
    server.engine.script = lambda request: ["fine", Of(1, FinishReason.ERROR), Of(0, " more")]
    with pytest.raises(openai.InternalServerError, match="broken"):
        create(server, n=2)
    assert server.engine.aborted[-1] == server.engine.requests[-1].request_id
    with pytest.raises(openai.APIError, match="broken"):
        create(server, n=2, stream=True)


def test_logprobs_of_content_and_reasoning(server: LiveServer) -> None:
    server.engine.script = answer("né", reasoning="Hm.")
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    thinking = {"thinking": {"type": "enabled"}}
    result = create(server, thinking, **fields)
    reasoning_ids, ids = TOKENIZER.encode("Hm."), TOKENIZER.encode("né")
    logprobs = result.choices[0].logprobs
    content = logprobs.content
    assert [bytes(entry.bytes) for entry in content] == [TOKENIZER.token_bytes(i) for i in ids]
    first = len(reasoning_ids) + 1  # </think> has no entry, like the token that ends the answer
    assert [entry.logprob for entry in content] == [-0.5 - first - n for n in range(len(ids))]
    top = content[0].top_logprobs
    assert [(entry.token, entry.logprob) for entry in top] == [
        (TOKENIZER.token_bytes(n).decode(), -0.25 * n) for n in range(2)
    ]
    reasoning = logprobs.reasoning_content
    assert [entry["token"] for entry in reasoning] == [TOKENIZER.decode([i]) for i in reasoning_ids]
    chunks = create(server, thinking, stream=True, **fields)
    streamed = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
    assert [entry for part in streamed for entry in part.content or []] == content
    other = [entry for part in streamed for entry in getattr(part, "reasoning_content", None) or []]
    assert other == reasoning
    assert server.engine.requests[-1].sampling.logprobs == 2


def test_a_token_that_is_no_text_alone_is_escaped(server: LiveServer) -> None:
    ids = [i for i in range(256 + 3) if TOKENIZER.token_bytes(i) in (b"\xf0", b"\x9f")]
    server.engine.script = lambda request: [ids, FinishReason.LENGTH]
    entries = create(server, logprobs=True).choices[0].logprobs.content
    assert {entry.token for entry in entries} == {"\\xf0", "\\x9f"}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_end_at_the_token_of_the_stop_string(server: LiveServer, stream: bool) -> None:
    text = "Hello there, what is it?"
    server.engine.script = answer(text)
    result = create(server, stop="re, w", logprobs=True, stream=stream)
    if stream:
        parts = [c.logprobs for chunk in result for c in chunk.choices if c.logprobs]
        entries = [entry for part in parts for entry in part.content]
    else:
        entries = result.choices[0].logprobs.content
    assert len(entries) == tokens_until(text, "re, w")


def test_without_logprobs_there_are_none(server: LiveServer) -> None:
    assert create(server).choices[0].logprobs is None
    assert all(c.logprobs is None for k in create(server, stream=True) for c in k.choices)


def test_all_of_it_reaches_the_engine(server: LiveServer) -> None:
    extra = {
        **PLAIN,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "top_k": 5,
        "allowed_token_ids": [8, 9],
        "logprobs_mode": "processed",
    }
    create(
        server,
        extra,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"8": 1.5},
        seed=4,
        logprobs=True,
        max_tokens=20,
        stop=["x"],
    )
    request = server.engine.requests[-1]
    body = {"model": MODEL, "messages": USER, **PLAIN}
    parsing = convert_chat(body, CODEC.options(MODEL)).parsing
    assert request.sampling == SamplingParams(
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=3,
        stop_token_ids=(7,),
        ignore_eos=True,
        top_k=5,
        allowed_token_ids=(8, 9),
        logprobs=0,
        logprobs_mode=LogprobsMode.PROCESSED,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={8: 1.5},
        seed=4,
        max_tokens=20,
        stop=("x",),
        stop_scope=CODEC.stop_scope(parsing),
    )


def test_a_stream_of_events_has_the_documented_shape(server: LiveServer) -> None:
    server.engine.script = answer("Hi")
    text = server.chat(stream=True, logprobs=True, top_logprobs=1, **PLAIN).text
    start, *events, finish, done = events_of(text)
    assert done == "[DONE]"
    assert start["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    entry = events[0]["choices"][0]["logprobs"]["content"][0]
    assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
    assert finish["choices"][0]["logprobs"] is None
