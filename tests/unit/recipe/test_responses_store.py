"""Stored responses: conversations go on by `previous_response_id`, and the store is bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import (
    AssistantMessage,
    PromptText,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.converted import ConvertedRequest
from headrace.recipe.options import ConvertOptions
from headrace.recipe.protocols.responses import convert_responses
from headrace.recipe.protocols.responses_store import (
    MemoryResponseStore,
    StoredResponse,
    remember,
)


def convert(kept: MemoryResponseStore, **fields: Any) -> ConvertedRequest:
    body = {"model": "DeepSeek-V4.1-Flash", "input": "hi", **fields}
    return convert_responses(json.dumps(body), ConvertOptions(), kept)


def test_a_body_given_as_values_is_stored_too() -> None:
    store = MemoryResponseStore()
    items = [{"role": "user", "content": "one"}]
    body = {"model": "DeepSeek-V4.1-Flash", "input": items}
    settings = convert_responses(body, ConvertOptions(), store).settings
    assert settings.input_items is not None
    assert [json.loads(item) for item in settings.input_items] == items


def test_stored_items_may_have_odd_fields() -> None:
    store = MemoryResponseStore()
    first = convert(store, input=[{"role": "user", "content": "one", "call_id": 3}])
    remember(store, "resp_1", first.settings, [])
    messages = convert(store, previous_response_id="resp_1").conversation.messages
    assert messages == (UserMessage(PromptText.of("one")), UserMessage(PromptText.of("hi")))


def test_previous_response_is_prepended() -> None:
    store = MemoryResponseStore()
    first = convert(kept=store, instructions="I", input=[{"role": "user", "content": "one"}])
    assert first.settings.store
    answer = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    remember(store, "resp_1", first.settings, answer)
    second = convert(
        kept=store,
        previous_response_id="resp_1",
        input=[
            {"type": "function_call_output", "call_id": "c", "output": "out"},
            {"role": "user", "content": "two"},
        ],
    )
    assert second.conversation.messages == (
        UserMessage(PromptText.of("one")),
        AssistantMessage("", "r", (ToolCall("c", "f", "{}"),)),
        ToolMessage(PromptText.of("out"), "c"),
        UserMessage(PromptText.of("two")),
    )
    assert second.settings.previous_response_id == "resp_1"
    remember(store, "resp_2", second.settings, [{"role": "assistant", "content": "two!"}])
    third = convert(kept=store, previous_response_id="resp_2", input="three")
    assert third.conversation.messages[-2:] == (
        AssistantMessage("two!", ""),
        UserMessage(PromptText.of("three")),
    )


def test_what_is_not_to_be_stored_is_not() -> None:
    store = MemoryResponseStore()
    settings = convert(kept=store, store=False).settings
    assert not settings.store
    remember(store, "resp_1", settings, [])
    assert store.get("resp_1") is None


def test_unknown_previous_response_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'resp_9' not found") as error:
        convert(kept=MemoryResponseStore(), previous_response_id="resp_9")
    assert error.value.param == "previous_response_id"


def test_store_forgets_the_least_recently_used() -> None:
    store = MemoryResponseStore(max_responses=2)
    for name in ("a", "b"):
        store.put(name, StoredResponse((b"{}",)))
    assert store.get("a") is not None
    store.put("c", StoredResponse((b"{}",)))
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]


def test_store_is_bounded_in_bytes() -> None:
    store = MemoryResponseStore(max_bytes=10)
    store.put("a", StoredResponse((b"1234", b"5678")))
    store.put("a", StoredResponse((b"1234",)))
    store.put("b", StoredResponse((b"123456",)))
    assert store.get("a") is not None
    store.put("c", StoredResponse((b"12345",)))
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]
    store.put("big", StoredResponse((b"x" * 11,)))
    assert store.get("big") is None and store.get("c") is not None
