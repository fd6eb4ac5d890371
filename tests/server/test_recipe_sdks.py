"""The official SDKs read every decode case, streamed and complete, from the codec alone.

Each event and response is validated against the SDK's own models (SDKs themselves only build them),
the SDK's accumulated stream says the same as the complete response, and what the clients of
`spec/user-reports.md` need is there: one role, one finish, `index` on tool deltas, full
added/delta/done triples without gaps in `sequence_number`, contiguous blocks with signatures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.recipe_app import RecipeServer
from tests.unit.recipe import golden

CASES = {name: golden.cases(f"decode_{name}") for name in ("chat", "responses", "messages")}
BY_ID = {case["id"]: case for cases in CASES.values() for case in cases}
RESPONSES_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGES_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
# added / delta / done of each kind of output item, as Codex reads them.
TRIPLES = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RecipeServer]:
    with RecipeServer(golden.real_tokenizer(), BY_ID) as live:
        yield live


@pytest.fixture(scope="module")
def openai_client(server: RecipeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(server: RecipeServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def split(case: dict[str, Any], *names: str) -> dict[str, Any]:
    """Arguments of an SDK call: named ones, and all others in the extra body."""
    request = {key: item for key, item in case["request"].items() if key != "stream"}
    given = {name: request.pop(name) for name in names if name in request}
    return {**given, "extra_body": request, "extra_headers": {"x-case": case["id"]}}


def each(cases: list[dict[str, Any]], check: Callable[[dict[str, Any]], None]) -> None:
    """Run the check on every case; the failure names all cases that fail."""
    found = []
    for case in cases:
        try:
            check(case)
        except Exception as error:
            found.append(f"{case['id']}: {type(error).__name__}: {str(error)[:500]}")
    assert len(cases) > 100
    if found:
        pytest.fail("\n".join([f"{len(found)} of {len(cases)} cases", *found[:20]]))


def good(name: str) -> list[dict[str, Any]]:
    """The cases whose stream does not fail."""
    return [case for case in CASES[name] if "expect_stream_error" not in case]


def same(one: Any, other: Any) -> None:
    assert json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True), (one, other)


# --- Chat Completions ----------------------------------------------------------------------------


def test_openai_sdk_reads_every_chat_answer(openai_client: openai.OpenAI) -> None:
    def check(case: dict[str, Any]) -> None:
        arguments = split(case, "model", "messages")
        arguments["extra_body"].pop("stream_options", None)
        whole = openai_client.chat.completions.create(**arguments)
        ChatCompletion.model_validate(whole.to_dict(mode="json"))
        stream = openai_client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        check_chat_chunks(chunks)
        folded, told = folded_chat(chunks), told_chat(whole)
        if folded["finish"] == "length" and len(folded["calls"]) > len(told["calls"]):
            # A call that was cut off was streamed already; the complete response leaves it out.
            _, arguments = folded["calls"].pop()
            with pytest.raises(ValueError):
                json.loads(arguments)
        same(folded, told)

    each(good("chat"), check)


def check_chat_chunks(chunks: list[ChatCompletionChunk]) -> None:
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict(mode="json"))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [chunk.choices for chunk in chunks if not chunk.choices] == [[]]
    assert chunks[-1].usage is not None
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason is not None
    named: set[int] = set()
    for choice in choices:
        for call in choice.delta.tool_calls or ():
            assert type(call.index) is int
            assert call.function is not None
            first = call.index not in named
            assert (call.id is not None) == (call.function.name is not None) == first
            named.add(call.index)
    assert named == set(range(len(named)))


def folded_chat(chunks: list[ChatCompletionChunk]) -> dict[str, Any]:
    """What a client gets out of the chunks."""
    content = reasoning = ""
    calls: list[list[str]] = []
    finish = None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.index == len(calls):
                    calls.append([call.function.name or "", ""])
                calls[call.index][1] += call.function.arguments or ""
    usage = chunks[-1].usage
    assert usage is not None
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": calls,
        "finish": finish,
        "usage": usage.to_dict(mode="json"),
    }


def told_chat(whole: ChatCompletion) -> dict[str, Any]:
    (choice,) = whole.choices
    message = choice.message
    assert whole.usage is not None
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]  # type: ignore[union-attr]
    for _, arguments in calls:
        if choice.finish_reason == "tool_calls":
            assert isinstance(json.loads(arguments), dict)
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": calls,
        "finish": choice.finish_reason,
        "usage": whole.usage.to_dict(mode="json"),
    }


# --- Responses -----------------------------------------------------------------------------------


def test_openai_sdk_reads_every_response(openai_client: openai.OpenAI) -> None:
    def check(case: dict[str, Any]) -> None:
        arguments = split(case, "model", "input")
        whole = openai_client.responses.create(**arguments)
        Response.model_validate(whole.to_dict(mode="json"))
        events = list(openai_client.responses.create(**arguments, stream=True))
        final = check_response_events([event.to_dict(mode="json") for event in events])
        same(told_response(final), told_response(whole.to_dict(mode="json")))
        with openai_client.responses.stream(**arguments) as stream:
            if final["status"] == "incomplete":
                # The helper knows no other end than `response.completed`; it reads the events.
                assert len(list(stream)) == len(events)
                return
            read = stream.get_final_response()
        same(told_response(read.to_dict(mode="json")), told_response(final))

    each(good("responses"), check)


def check_response_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The triples and numbers that Codex needs; returns the final response."""
    for event in events:
        RESPONSES_EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]
    assert final["type"] in ("response.completed", "response.incomplete")
    response: dict[str, Any] = final["response"]
    assert response["usage"]["total_tokens"] >= 0
    for index, item in enumerate(response["output"]):
        own = [event for event in events[2:-1] if event["output_index"] == index]
        check_item(own, item)
    assert {event["output_index"] for event in events[2:-1]} <= set(range(len(response["output"])))
    return response


def check_item(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """One output item: added, [part added], deltas, done, [part done], item done."""
    assert events[0]["type"] == "response.output_item.added"
    assert events[-1]["type"] == "response.output_item.done"
    same(events[-1]["item"], item)
    kind = item["type"]
    inner = [event["type"] for event in events[1:-1]]
    if kind == "tool_search_call":
        assert inner == []
        return
    name = TRIPLES[kind]
    if kind in ("message", "reasoning"):
        assert inner[0] == "response.content_part.added"
        assert inner[-1] == "response.content_part.done"
        inner = inner[1:-1]
        text = item["content"][0]["text"]
    else:
        text = item["input"] if kind == "custom_tool_call" else item["arguments"]
        assert events[0]["item"]["name"] == item["name"]
        assert events[0]["item"]["call_id"] == item["call_id"]
    assert inner[-1] == f"{name}.done"
    assert set(inner[:-1]) <= {f"{name}.delta"}
    deltas = [event["delta"] for event in events if event["type"] == f"{name}.delta"]
    assert "".join(deltas) == text
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    if kind == "function_call" and item["status"] == "completed":
        assert isinstance(json.loads(item["arguments"]), dict)
    if kind == "reasoning":
        assert item["encrypted_content"]


def told_response(response: dict[str, Any]) -> dict[str, Any]:
    """A response without its random ids and its clock."""
    items = [
        {key: value for key, value in item.items() if key not in ("call_id", "parsed_arguments")}
        for item in response["output"]
    ]
    for item in items:
        if "content" in item:
            item["content"] = [
                {key: value for key, value in part.items() if key != "parsed"}
                for part in item["content"] or ()
            ]
    return {"output": items, **{key: response[key] for key in ("status", "usage", "id")}}


# --- Messages ------------------------------------------------------------------------------------


def test_anthropic_sdk_reads_every_message(anthropic_client: anthropic.Anthropic) -> None:
    def check(case: dict[str, Any]) -> None:
        arguments = split(case, "model", "messages", "max_tokens")
        whole = anthropic_client.messages.create(**arguments)
        Message.model_validate(whole.to_dict(mode="json"))
        with anthropic_client.messages.stream(**arguments) as stream:
            read = stream.get_final_message()
        streamed, told = told_message(read), told_message(whole)
        if told["stop_reason"] == "max_tokens" and len(streamed["content"]) > len(told["content"]):
            # As in Chat: a call that was cut off is no part of the complete response.
            assert streamed["content"].pop()["type"] == "tool_use"
        same(streamed, told)
        events = [
            event.to_dict(mode="json")
            for event in anthropic_client.messages.create(**arguments, stream=True)
        ]
        check_message_events(events)

    each(good("messages"), check)


def check_message_events(events: list[dict[str, Any]]) -> None:
    """The order of blocks that Claude Code needs."""
    for event in events:
        if event["type"] != "ping":
            MESSAGES_EVENT.validate_python(event)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    first = next(e for e in events if e["type"] == "message_start")["message"]["usage"]
    last = next(e for e in events if e["type"] == "message_delta")
    for usage in (first, last["usage"]):
        assert type(usage["cache_read_input_tokens"]) is int
        assert type(usage["cache_creation_input_tokens"]) is int
    assert last["delta"]["stop_reason"] is not None
    index, open_block, deltas = -1, None, []
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            index += 1
            open_block, deltas = event["content_block"]["type"], []
        if event["type"] == "content_block_delta":
            assert open_block is not None
            deltas.append(event["delta"]["type"])
        if event["type"].startswith("content_block"):
            assert event["index"] == index
        if event["type"] == "content_block_stop":
            allowed = {
                "thinking": {"thinking_delta", "signature_delta"},
                "text": {"text_delta"},
                "tool_use": {"input_json_delta"},
            }
            assert set(deltas) <= allowed[str(open_block)]
            if open_block == "thinking":
                assert deltas.count("signature_delta") == 1
                assert deltas[-1] == "signature_delta"
            open_block = None
    assert open_block is None


def told_message(message: Message) -> dict[str, Any]:
    told = message.to_dict(mode="json")
    content: Any = told["content"]
    blocks = [
        {key: value for key, value in block.items() if not (key == "id" and "input" in block)}
        for block in content
    ]
    return {
        **{key: told[key] for key in ("stop_reason", "stop_sequence", "usage", "role")},
        "content": blocks,
    }


# --- errors --------------------------------------------------------------------------------------


def test_an_error_inside_a_stream_reaches_the_sdks(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    bad = {name: [c for c in cases if "expect_stream_error" in c] for name, cases in CASES.items()}
    assert len(bad["chat"]) == 2
    assert len(bad["responses"]) == 2
    for case in bad["chat"]:
        arguments = split(case, "model", "messages")
        with pytest.raises(openai.APIError, match=case["expect_stream_error"][:20]):
            list(openai_client.chat.completions.create(**arguments, stream=True))
    for case in bad["responses"]:
        events = list(openai_client.responses.create(**split(case, "model", "input"), stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert case["expect_stream_error"][:20] in events[-1].response.error.message
    # No Messages case fails, but a Chat case with its chunks does.
    case = {**CASES["messages"][0], "id": "messages-error", "chunks": bad["chat"][0]["chunks"]}
    BY_ID[case["id"]] = {**case, "with_tokenizer": False}
    try:
        arguments = split(case, "model", "messages", "max_tokens")
        with pytest.raises(anthropic.APIStatusError, match="without a tokenizer"):
            list(anthropic_client.messages.create(**arguments, stream=True))
    finally:
        del BY_ID[case["id"]]


def test_a_refused_request_has_the_shape_of_its_protocol(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    headers = {"x-case": CASES["chat"][0]["id"]}
    call: Any = openai_client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        call(model="DeepSeek-V4.1-Flash", messages=[], extra_headers=headers)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.body["message"]  # type: ignore[index]
    call = anthropic_client.messages.create
    with pytest.raises(anthropic.BadRequestError) as wrong:
        call(model="DeepSeek-V4.1-Flash", messages=[], max_tokens=5, extra_headers=headers)
    body: Any = wrong.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
