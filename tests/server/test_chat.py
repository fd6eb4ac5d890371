"""POST /v1/chat/completions, streamed and complete, over a real socket."""

from __future__ import annotations

import concurrent.futures
import re

import httpx
import pytest

from headrace.core.output import FinishReason
from tests.server.scripted import (
    CODEC,
    MODEL,
    TOKENIZER,
    USER,
    Last,
    LiveServer,
    Pause,
    ScriptedEngine,
    answer,
    events_of,
    one_log_line,
)


def joined(events: list[dict], field: str) -> str:
    parts = [event["choices"][0]["delta"].get(field) for event in events if event["choices"]]
    return "".join(part for part in parts if part)


def test_complete_answer(server: LiveServer) -> None:
    server.engine.script = answer("Hello there", reasoning="I\nthink.\n")
    body = server.chat(max_tokens=100).json()
    request = server.engine.requests[-1]
    completion = len(TOKENIZER.encode("I\nthink.\n")) + 1 + len(TOKENIZER.encode("Hello there")) + 1
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body["id"])
    assert body["id"] == request.request_id
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello there",
                "reasoning_content": "I\nthink.",
                "refusal": None,
                "annotations": [],
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len(request.prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": len(TOKENIZER.encode("I\nthink.\n"))},
        "prompt_cache_hit_tokens": 0,
        "prompt_cache_miss_tokens": prompt,
    }


def test_streamed_answer(server: LiveServer) -> None:
    server.engine.script = answer("Hello there", reasoning="I think.")
    response = server.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"].startswith("req-")
    *events, last, done = events_of(response.text)
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in [*events, last]}) == 1
    first = events[0]["choices"][0]
    assert first["delta"] == {"role": "assistant", "reasoning_content": ""}
    assert (joined(events, "reasoning_content"), joined(events, "content")) == (
        "I think.",
        "Hello there",
    )
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert reasons[-1] == "stop"
    # The usage comes once, in a chunk of its own with no choices; before it the key is null.
    assert {event["usage"] for event in events} == {None}
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > last["usage"]["completion_tokens"] > 0


def test_without_include_usage_only_the_finish_has_it(server: LiveServer) -> None:
    *events, finish, _ = events_of(server.chat(stream=True).text)
    assert all("usage" not in event for event in events)
    assert all(event["choices"] for event in [*events, finish])
    assert finish["usage"]["completion_tokens"] > 0


def test_thinking_off_has_no_reasoning(server: LiveServer) -> None:
    server.engine.script = answer("plain")
    body = server.chat(thinking={"type": "disabled"}).json()
    message = body["choices"][0]["message"]
    assert message["content"] == "plain"
    assert "reasoning_content" not in message
    assert "completion_tokens_details" not in body["usage"]
    last = server.engine.requests[-1].prompt_token_ids[-1]
    assert last == TOKENIZER.added[CODEC.special.thinking_end]


def test_characters_are_whole_in_every_event(server: LiveServer) -> None:
    text = "né 👍🏽 北京"
    server.engine.script = answer(text)
    events = events_of(server.chat(stream=True, thinking={"type": "disabled"}).text)[:-1]
    assert joined(events, "content") == text
    assert not any("\ufffd" in str(event) for event in events)


def test_length_is_a_finish_reason(server: LiveServer) -> None:
    server.engine.script = lambda request: ["never ends", FinishReason.LENGTH]
    choice = server.chat().json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "never ends"
    assert choice["finish_detail"] == "empty_after_reasoning"


def test_the_token_that_stopped_the_answer_is_no_text(server: LiveServer) -> None:
    stop = TOKENIZER.encode("!")
    server.engine.script = lambda request: ["Hi", Last(FinishReason.STOP, stop)]
    body = server.chat(stop_token_ids=stop, thinking={"type": "disabled"}).json()
    assert body["choices"][0]["message"]["content"] == "Hi"
    assert body["usage"]["completion_tokens"] == len(TOKENIZER.encode("Hi")) + 1


def test_sampling_reaches_the_engine_as_asked(server: LiveServer) -> None:
    server.chat(
        temperature=0, top_p=0.5, top_k=4, seed=9, max_tokens=7, stop_token_ids=[5], ignore_eos=True
    )
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 4)
    assert (sampling.seed, sampling.max_tokens) == (9, 7)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((5,), True)


def test_max_tokens_defaults_to_the_room_left(server: LiveServer) -> None:
    server.chat()
    request = server.engine.requests[-1]
    assert request.sampling.max_tokens == 4096 - len(request.prompt_token_ids)


def test_a_waiting_stream_gets_comments() -> None:
    engine = ScriptedEngine(lambda request: [Pause(0.5), "late", FinishReason.STOP])
    with LiveServer(engine, keep_alive_s=0.1) as live:
        text = live.chat(stream=True, thinking={"type": "disabled"}).text
    # The first event says how much of the prompt was cached, which the first token tells.
    assert text.index(": keep-alive\n\n") < text.index('"role":"assistant"') < text.index("late")
    assert joined(events_of(text)[:-1], "content") == "late"


def test_many_at_once(server: LiveServer) -> None:
    with httpx.Client(timeout=20, limits=httpx.Limits(max_connections=16)) as client:

        def one(number: int) -> str:
            body = {"model": MODEL, "messages": USER, "stream": number % 2 == 0}
            response = client.post(f"{server.url}/v1/chat/completions", json=body)
            if not body["stream"]:
                return response.json()["choices"][0]["message"]["content"]
            return joined(events_of(response.text)[:-1], "content")

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert set(pool.map(one, range(32))) == {"Hello there"}


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_has_one_line_without_content(server: LiveServer, stream: bool) -> None:
    with one_log_line(server) as line:
        server.chat(stream=stream, messages=[{"role": "user", "content": "SECRET"}])
    assert line["status"] == 200
    assert line["prompt_tokens"] == len(server.engine.requests[-1].prompt_token_ids)
    assert line["completion_tokens"] > 0
    assert line["ms"] >= line["ttft_ms"] >= 0
    assert "SECRET" not in server.log.getvalue()
    assert "there" not in server.log.getvalue()
