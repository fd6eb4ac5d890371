"""The three protocols over one answer path, as the official SDKs see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from headrace import errors
from headrace.core.output import FinishReason
from tests.server.scripted import (
    CODEC,
    CONTEXT,
    MODEL,
    TOKENIZER,
    USER,
    LiveServer,
    Pause,
    ScriptedEngine,
    Step,
    answer,
    calling,
    events_of,
    one_log_line,
    wait_for,
)

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
MESSAGES_TOOL: Any = {"name": "weather", "input_schema": SCHEMA}
PLAIN: dict[str, Any] = {"thinking": {"type": "disabled"}}
# Path, and the smallest body that asks for an answer without thinking.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, **PLAIN},
    "/v1/responses": {"input": "hi", "reasoning": {"effort": "none"}},
    "/v1/messages": {"messages": USER, "max_tokens": 50, **PLAIN},
}
PATHS = list(BODIES)


@pytest.fixture
def openai_sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_sdk(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def post(live: LiveServer, path: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **BODIES[path.removesuffix("/count_tokens")], **fields}
    return httpx.post(live.url + path, json=body, timeout=20)


def named_events(text: str) -> list[tuple[str, Any]]:
    """(name, data) of the events of a stream."""
    blocks = [block for block in text.split("\n\n") if block.startswith("event: ")]
    split = [block.removeprefix("event: ").split("\ndata: ") for block in blocks]
    return [(name, json.loads(data)) for name, data in split]


# --- tools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", None])
def test_chat_calls_a_tool(server: LiveServer, openai_sdk: openai.OpenAI, choice: Any) -> None:
    server.engine.script = calling(reasoning="Which city?")
    fields: Any = {"model": MODEL, "messages": USER, "tools": [CHAT_TOOL]}
    if choice is not None:
        fields["tool_choice"] = choice
    result = openai_sdk.chat.completions.create(**fields)
    (call,) = result.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Paris"},
    )
    assert result.choices[0].message.content == "Let me see."
    assert result.choices[0].finish_reason == "tool_calls"
    with openai_sdk.chat.completions.stream(**fields) as stream:
        message = stream.get_final_completion().choices[0].message
    (streamed,) = message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    assert message.content == "Let me see."


def test_the_result_of_a_call_goes_back(server: LiveServer, openai_sdk: openai.OpenAI) -> None:
    server.engine.script = calling()
    first = openai_sdk.chat.completions.create(model=MODEL, messages=USER, tools=[CHAT_TOOL])  # type: ignore[arg-type]
    message = first.choices[0].message
    assert message.tool_calls
    server.engine.script = answer("Sunny.", reasoning="ok")
    history: Any = [
        *USER,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"},
    ]
    second = openai_sdk.chat.completions.create(model=MODEL, messages=history, tools=[CHAT_TOOL])
    assert second.choices[0].message.content == "Sunny."
    prompt = TOKENIZER.decode(server.engine.requests[-1].prompt_token_ids, skip_special=False)
    assert "Paris" in prompt and "sun" in prompt


def test_responses_call_a_tool(server: LiveServer, openai_sdk: openai.OpenAI) -> None:
    server.engine.script = calling(reasoning="Which city?")
    fields: Any = {"model": MODEL, "input": "hi", "tools": [RESPONSES_TOOL]}
    result = openai_sdk.responses.create(**fields)
    kinds = [item.type for item in result.output]
    assert kinds == ["reasoning", "message", "function_call"]
    call: Any = result.output[-1]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    with openai_sdk.responses.stream(**fields) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == kinds
    last: Any = final.output[-1]
    assert last.arguments == call.arguments
    assert final.usage is not None and result.usage is not None
    assert final.usage.output_tokens == result.usage.output_tokens


def test_messages_call_a_tool(server: LiveServer, anthropic_sdk: anthropic.Anthropic) -> None:
    server.engine.script = calling(reasoning="Which city?")
    fields: Any = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 500,
        "tools": [MESSAGES_TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    result = anthropic_sdk.messages.create(**fields)
    assert [block.type for block in result.content] == ["thinking", "text", "tool_use"]
    use: Any = result.content[-1]
    assert (use.name, use.input, result.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")
    with anthropic_sdk.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    streamed: Any = final.content[-1]
    assert streamed.input == use.input
    assert final.usage.output_tokens == result.usage.output_tokens


def test_markup_is_no_text_where_calls_are_forbidden(server: LiveServer) -> None:
    server.engine.script = calling()
    fields: dict[str, Any] = {"tools": [CHAT_TOOL], "tool_choice": "none", **PLAIN}
    message = server.chat(**fields).json()["choices"][0]["message"]
    assert message["content"] == "Let me see."
    assert "tool_calls" not in message
    streamed = server.chat(**fields, stream=True).text
    assert "see" in streamed
    assert not any(word in streamed for word in ("tool_calls", "DSML", "Paris"))


def test_stop_strings_do_not_count_in_calls(server: LiveServer) -> None:
    server.engine.script = calling(city="STOP", text="Let me see")
    body = server.chat(tools=[CHAT_TOOL], stop=["STOP", "city"], **PLAIN).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "STOP"
    }
    scope = server.engine.requests[-1].sampling.stop_scope
    assert scope.end_token == TOKENIZER.added[CODEC.special.dsml]
    body = server.chat(tools=[CHAT_TOOL], stop="me", **PLAIN).json()
    assert body["choices"][0]["message"]["content"] == "Let "
    assert body["choices"][0]["finish_reason"] == "stop"
    server.chat(stop="me", **PLAIN)
    assert server.engine.requests[-1].sampling.stop_scope.end_token is None


# --- answers ---------------------------------------------------------------------------------


def test_responses_complete_and_streamed(server: LiveServer, openai_sdk: openai.OpenAI) -> None:
    server.engine.script = answer("né 北京", reasoning="I think.")
    result = openai_sdk.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", max_output_tokens=50
    )
    assert result.output_text == "né 北京"
    assert result.status == "completed"
    assert result.id == server.engine.requests[-1].request_id
    assert result.id.startswith("resp_")
    assert server.engine.requests[-1].sampling.max_tokens == 50
    events = list(openai_sdk.responses.create(model=MODEL, input="hi", stream=True))
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "né 北京"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_messages_complete_and_streamed(
    server: LiveServer, anthropic_sdk: anthropic.Anthropic
) -> None:
    server.engine.script = answer("one STOP two", reasoning="I think.")
    fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 50, "system": "Be brief."}
    result = anthropic_sdk.messages.create(**fields, stop_sequences=["STOP"])
    text: Any = result.content[-1]
    assert (text.text, result.stop_reason, result.stop_sequence) == (
        "one ",
        "stop_sequence",
        "STOP",
    )
    assert result.id.startswith("msg_")
    with anthropic_sdk.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == "one STOP two"
        assert stream.get_final_message().stop_reason == "end_turn"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_every_token_and_the_cache(
    server: LiveServer, path: str, stream: bool
) -> None:
    server.engine.script = answer("Hello there")
    server.engine.cached_tokens = 3
    try:
        response = post(server, path, stream=stream)
    finally:
        server.engine.cached_tokens = 0
    used = len(TOKENIZER.encode("Hello there")) + 1  # with the token that ends it
    prompt = len(server.engine.requests[-1].prompt_token_ids)
    if path == "/v1/chat/completions":
        usage = (events_of(response.text)[-2] if stream else response.json())["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, used)
    elif path == "/v1/responses":
        body = named_events(response.text)[-1][1]["response"] if stream else response.json()
        assert body["usage"]["input_tokens_details"]["cached_tokens"] == 3
        assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (prompt, used)
    else:
        usage = (
            response.json()["usage"] if not stream else named_events(response.text)[-2][1]["usage"]
        )
        assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (3, prompt - 3)
        assert usage["output_tokens"] == used


def test_a_client_of_one_choice_ends_with_its_stop(server: LiveServer) -> None:
    server.engine.script = answer("one END two")
    body = post(server, "/v1/responses", stop=["END"]).json()
    assert body["output"][-1]["content"][0]["text"] == "one END two"  # Responses has no stop


def test_tokens_are_counted_without_an_answer(
    server: LiveServer, anthropic_sdk: anthropic.Anthropic
) -> None:
    before = len(server.engine.requests)
    fields: Any = {"model": MODEL, "messages": USER, "tools": [MESSAGES_TOOL], "system": "x"}
    count = anthropic_sdk.messages.count_tokens(**fields).input_tokens
    assert len(server.engine.requests) == before
    anthropic_sdk.messages.create(**fields, max_tokens=9)
    assert count == len(server.engine.requests[-1].prompt_token_ids)


# --- waiting and leaving ---------------------------------------------------------------------


def test_waiting_messages_get_pings() -> None:
    script: list[Step] = [Pause(0.3), "begin", Pause(0.3), " end", FinishReason.STOP]
    with LiveServer(ScriptedEngine(lambda request: script), keep_alive_s=0.1) as live:
        text = post(live, "/v1/messages", stream=True).text
        assert text.index(": keep-alive") < text.index("message_start")
        begun = text[text.index("message_start") :]
        assert ": keep-alive" not in begun
        # One ping comes with the first block, the others while nothing else did.
        assert begun.count("event: ping") > 2
        assert ": keep-alive" in post(live, "/v1/responses", stream=True).text
        fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 9}
        with (
            anthropic.Anthropic(base_url=live.url, api_key="none") as client,
            client.messages.stream(**fields) as stream,
        ):
            assert stream.get_final_message().stop_reason == "end_turn"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(
    server: LiveServer, path: str, stream: bool
) -> None:
    server.engine.script = lambda request: ["first ", Pause(20), FinishReason.STOP]
    body = {"model": MODEL, **BODIES[path], "stream": stream}
    with one_log_line(server) as line:
        if stream:
            with httpx.stream("POST", server.url + path, json=body, timeout=10) as response:
                next(response.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + path, json=body, timeout=httpx.Timeout(5, read=0.3))
        wait_for(lambda: not server.engine.running)
    assert server.engine.aborted[-1] == server.engine.requests[-1].request_id
    assert line["status"] == 499


# --- errors ----------------------------------------------------------------------------------


def test_anthropic_errors_have_anthropics_shape(
    server: LiveServer, anthropic_sdk: anthropic.Anthropic
) -> None:
    def create(**fields: Any) -> Any:
        given = {"model": MODEL, "messages": USER, "max_tokens": 5, **fields}
        return anthropic_sdk.messages.create(**given)

    with pytest.raises(anthropic.BadRequestError) as bad:
        create(extra_body={"temperature": 3})
    assert bad.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "Invalid temperature value, the valid range of temperature is [0, 2]",
        },
    }
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        create(model="claude")
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        create(messages=[{"role": "user", "content": "x " * 3 * CONTEXT}])
    server.engine.script = lambda request: [errors.Overloaded("full", retry_after_s=2)]
    with pytest.raises(anthropic.APIStatusError) as full:
        create()
    assert full.value.status_code == 529
    assert full.value.response.headers["retry-after"] == "2"
    assert full.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert full.value.request_id == full.value.response.headers["x-request-id"]


def test_errors_around_the_route_have_its_shape() -> None:
    with LiveServer(api_keys=("a-good-key",), max_body_bytes=2000) as live:
        path = f"{live.url}/v1/messages"
        for response, kind in (
            (httpx.post(path, json={}), "authentication_error"),
            (httpx.post(path, json={}, headers={"x-api-key": "wrong"}), "permission_error"),
            (httpx.get(path, headers={"x-api-key": "a-good-key"}), "invalid_request_error"),
            (
                httpx.post(path, content=b"x" * 3000, headers={"x-api-key": "a-good-key"}),
                "request_too_large",
            ),
            (httpx.get(path + "/x", headers={"x-api-key": "a-good-key"}), "not_found_error"),
        ):
            body = response.json()
            assert (body["type"], body["error"]["type"]) == ("error", kind), body
        other = httpx.post(f"{live.url}/v1/responses", json={}).json()
        assert set(other["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("script", [["some text"], [Pause(0.3)]])
def test_an_error_in_a_stream_is_its_last_event(path: str, script: list[Step]) -> None:
    engine = ScriptedEngine(lambda request: [*script, errors.EngineLost("dead")])
    with LiveServer(engine, keep_alive_s=0.1) as live, one_log_line(live) as line:
        text = post(live, path, stream=True).text
    assert line["code"] == "engine_lost"
    assert "[DONE]" not in text
    if path == "/v1/chat/completions":
        assert events_of(text)[-1]["error"]["code"] == "engine_lost"
        return
    events = named_events(text)
    name, data = events[-1]
    if path == "/v1/responses":
        assert (events[0][0], name) == ("response.created", "response.failed")
        assert data["response"]["error"] == {"code": "server_error", "message": "dead"}
    else:
        assert (events[0][0], name) == ("message_start", "error")
        assert data["error"]["message"] == "dead"


IMAGE = "data:image/png;base64,iVBORw0KGgo="
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x.invalid/a"}}],
                }
            ]
        },
        "messages[0]",
        "images",
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]},
            ]
        },
        "input[0]",
        "images",
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "url", "url": "http://x.invalid/a"}}
                    ],
                }
            ]
        },
        "",
        "images",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param", "word"), REFUSED)
def test_what_nobody_here_keeps_is_refused_by_name(
    server: LiveServer, path: str, fields: dict[str, Any], param: str, word: str
) -> None:
    before = len(server.engine.requests)
    response = post(server, path, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert word in error["message"], error
    assert (error.get("param") or "") == param
    assert error["message"].startswith(param or "messages.0.content[0]: ")
    assert len(server.engine.requests) == before


# --- previous_response_id --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_can_be_gone_on_with(
    server: LiveServer, openai_sdk: openai.OpenAI, stream: bool
) -> None:
    server.engine.script = answer("The first answer", reasoning="Hm.")
    first: Any = openai_sdk.responses.create(model=MODEL, input="question one", stream=stream)
    if stream:
        first = list(first)[-1].response
    assert first.store is True
    openai_sdk.responses.create(model=MODEL, input="question two", previous_response_id=first.id)
    prompt = TOKENIZER.decode(server.engine.requests[-1].prompt_token_ids)
    assert all(text in prompt for text in ("question one", "The first answer", "question two"))


def test_what_is_not_stored_is_not_found(server: LiveServer, openai_sdk: openai.OpenAI) -> None:
    first = openai_sdk.responses.create(model=MODEL, input="one", store=False)
    assert first.store is False
    for previous in (first.id, "resp_unknown"):
        with pytest.raises(openai.BadRequestError, match="not found") as caught:
            openai_sdk.responses.create(model=MODEL, input="two", previous_response_id=previous)
        assert caught.value.param == "previous_response_id"
    with LiveServer(max_stored_responses=0) as live:
        response = post(live, "/v1/responses", previous_response_id="resp_x")
        assert "stores no responses" in response.json()["error"]["message"]
        assert post(live, "/v1/responses", store=True).json()["store"] is False


def test_nobody_goes_on_with_the_response_of_another_key() -> None:
    with LiveServer(api_keys=("a-good-key", "another-key")) as live:
        clients = [
            openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0)
            for key in ("a-good-key", "another-key")
        ]
        first = clients[0].responses.create(model=MODEL, input="one")
        with pytest.raises(openai.BadRequestError, match="not found"):
            clients[1].responses.create(model=MODEL, input="x", previous_response_id=first.id)
        again = clients[0].responses.create(model=MODEL, input="x", previous_response_id=first.id)
        assert again.previous_response_id == first.id
        for client in clients:
            client.close()
