"""No body makes the server fail: wrong types for every field, and arbitrary JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.recipe.protocols.chat_refused import REFUSED
from headrace.recipe.protocols.chat_wire import ClientAssistantEntry, ClientRequest
from headrace.recipe.protocols.messages_wire import ClientRequest as MessagesRequest
from headrace.recipe.protocols.responses_wire import WireResponses
from headrace.serve.app import create_app
from tests.server.scripted import MODEL, USER, ScriptedEngine, answer, make_state


def fields_of(wire: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(wire)]


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FIELDS = fields_of(ClientRequest)
MESSAGE_FIELDS = ["role", *fields_of(ClientAssistantEntry)]
WRONG: dict[str, Any] = {
    "string": "x",
    "number": 1.5,
    "negative": -7,
    "huge": 10**30,
    "bool": True,
    "list": [{"a": [None]}],
    "object": {"type": 3, "x": []},
    "empty-list": [],
    "empty-object": {},
    "empty-string": "",
}
# Values of the table that a field rightly takes.
RIGHT = {
    "stream": {"bool"},
    "ignore_eos": {"bool"},
    "temperature": {"number"},
    "stop_token_ids": {"empty-list"},
    "stop": {"string", "empty-list"},
    "logprobs": {"bool"},
    "logit_bias": {"empty-object"},
    "presence_penalty": {"number"},
    "frequency_penalty": {"number"},
    "repetition_penalty": {"number"},
    "chat_template_kwargs": {"object", "empty-object"},
    "tools": {"list", "empty-list"},  # tools of unknown types are dropped
    "functions": {"empty-list"},
    "parallel_tool_calls": {"bool"},
    "bad_words": {"empty-list"},
    "skip_special_tokens": {"bool"},
    "logits_processors": {"empty-list"},
    "guided_json": {"bool", "empty-object"},
    "guided_json_object": {"bool"},
    "guided_regex": {"string", "empty-string"},
    "guided_grammar": {"string"},  # what is none is found out by the engine
    "structured_outputs": {"empty-object"},
    "add_generation_prompt": {"bool"},
    "documents": {"empty-list"},
    "tool_calls": {"empty-list"},
    # Of free type: what is none of what they may be is ignored, as the official codec does.
    "function_call in a message": set(WRONG),
    "refusal": set(WRONG),
    "content": {"string", "empty-string", "empty-list"},
    "reasoning_content": {"string", "empty-string"},
    "reasoning": set(WRONG),
}
KNOWN = [*FIELDS, *MESSAGE_FIELDS, *REFUSED, "type", "text", "enabled", "include_usage", "thinking"]


def post(bodies: list[bytes], path: str = CHAT) -> list[httpx.Response]:
    """Responses of a fresh application, without a socket."""

    async def run() -> list[httpx.Response]:
        state = make_state(ScriptedEngine(answer("ok")))
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            responses = [
                await client.post(
                    path,
                    content=body,
                    headers={"content-type": "application/json"},
                )
                for body in bodies
            ]
        assert state.limits.running == 0
        state.close()
        return responses

    return asyncio.run(run())


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": USER, **fields}).encode()


def refused_in(response: httpx.Response, name: str) -> bool:
    error = response.json()["error"]
    return response.status_code == 400 and name in (error["param"] or "")


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_type_is_a_400_that_names_the_field(name: str) -> None:
    for kind, response in zip(
        WRONG, post([body(**{name: v}) for v in WRONG.values()]), strict=True
    ):
        if kind in RIGHT.get(name, set()):
            assert response.status_code == 200, (kind, response.text)
        elif name == "model" and "string" in kind:
            assert response.status_code == 404
        else:
            assert refused_in(response, name), (kind, response.text)


@pytest.mark.parametrize("name", MESSAGE_FIELDS)
def test_a_wrong_type_in_a_message_is_a_400_that_names_it(name: str) -> None:
    message = {"role": "assistant", "content": "x"}
    bodies = [body(messages=[*USER, {**message, name: value}]) for value in WRONG.values()]
    for kind, response in zip(WRONG, post(bodies), strict=True):
        right = RIGHT.get(f"{name} in a message", RIGHT.get(name, set()))
        if kind in right or (name == "prefix" and kind == "bool"):
            assert response.status_code == 200, (kind, response.text)
        else:
            assert refused_in(response, f"messages[1].{name}"), (kind, response.text)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(
        ["user", "assistant", "system", "text", "enabled", "disabled", "none", MODEL]
    ),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), children, max_size=5)
    ),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "latest_reminder"])},
    optional={
        "content": st.text(max_size=30) | json_values,
        "prefix": st.booleans() | json_values,
        "reasoning_content": st.text(max_size=9) | json_values,
    },
)
requests = st.fixed_dictionaries(
    {
        "model": st.just(MODEL) | json_values,
        "messages": st.lists(messages, max_size=4) | json_values,
    },
    optional=dict.fromkeys({*FIELDS, *REFUSED} - {"model", "messages"}, json_values),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(requests | json_values, max_size=8))
def test_arbitrary_json_never_fails(values: list[object]) -> None:
    for response in post([json.dumps(value).encode() for value in values]):
        assert response.status_code in (200, 400, 404), response.text


other_requests = {
    RESPONSES: st.fixed_dictionaries(
        {"model": st.just(MODEL), "input": st.lists(messages, max_size=3) | json_values},
        optional=dict.fromkeys({*fields_of(WireResponses)} - {"model", "input"}, json_values),
    ),
    MESSAGES: st.fixed_dictionaries(
        {"model": st.just(MODEL), "messages": st.lists(messages, max_size=3) | json_values},
        optional=dict.fromkeys({*fields_of(MessagesRequest)} - {"model", "messages"}, json_values),
    ),
}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens"])
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_arbitrary_json_never_fails_in_any_protocol(path: str, data: st.DataObject) -> None:
    values = st.lists(other_requests[path.removesuffix("/count_tokens")], max_size=8)
    for response in post([json.dumps(value).encode() for value in data.draw(values)], path):
        assert response.status_code in (200, 400), response.text


@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=10), st.sampled_from([CHAT, RESPONSES, MESSAGES]))
def test_arbitrary_bytes_never_fail(bodies: list[bytes], path: str) -> None:
    for response in post(bodies, path):
        assert response.status_code in (400, 404), response.text


@settings(max_examples=50, deadline=None)
@given(requests, st.data())
def test_damaged_json_never_fails(value: object, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(value, ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (response,) = post([bytes(raw)])
    assert response.status_code in (200, 400, 404), response.text
