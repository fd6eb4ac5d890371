"""Level `clients` takes what `official` takes and gives it the same prompt.

The exceptions are the fields that the official codec ignores although they say what the answer
should be made of; they are listed in docs/recipe.md.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.check.recipe_encode import options_of
from headrace.errors import InvalidRequest
from headrace.recipe.conversation import Conversation
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from tests.unit.recipe import golden

PROTOCOLS = ("chat", "responses", "messages")
# Fields of golden requests that only level `clients` reads for the prompt, or refuses.
EXCEPTIONS = {"functions", "previous_response_id"}


def conversation(
    protocol: str, request: dict[str, Any], options: ConvertOptions, level: Level
) -> Conversation | None:
    options = dataclasses.replace(options, level=level)
    try:
        return convert(protocol, json.dumps(request).encode(), options).conversation
    except InvalidRequest:
        return None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_golden_requests_have_the_same_conversation_at_both_levels(protocol: str) -> None:
    seen, excepted = 0, []
    for case in golden.cases(f"encode_{protocol}"):
        if "expect_error" in case or "request" not in case:
            continue
        options, request = options_of(case), case["request"]
        official = conversation(protocol, request, options, Level.OFFICIAL)
        assert official is not None
        if EXCEPTIONS & request.keys():
            excepted.append(case["id"])
            assert conversation(protocol, request, options, Level.CLIENTS) != official
            request = {key: value for key, value in request.items() if key not in EXCEPTIONS}
        assert conversation(protocol, request, options, Level.CLIENTS) == official, case["id"]
        seen += 1
    assert seen > 50
    assert len(excepted) == {"chat": 4, "responses": 4, "messages": 0}[protocol]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
# What real clients send and no level needs, at the top of a request and at any object in it.
TOP = (
    *("user_id", "service_tier", "safety_identifier", "prompt_cache_key", "prediction", "audio"),
    *("modalities", "verbosity", "web_search_options", "length_penalty", "betas"),
    *("background", "max_tool_calls", "container", "mcp_servers", "context_management", "extra"),
)
INNER = ("cache_control", "annotations", "phase", "id", "citations", "reasoning_details", "extra")
BASES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "reasoning_content": "r"},
            {"role": "user", "content": "c"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "r"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        ],
        "tools": [{"type": "function", "name": "f"}],
    },
    "messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}]},
            {"role": "user", "content": "c"},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
}


def with_fields(value: Any, fields: dict[str, Any]) -> Any:
    """The value with these fields in every object that has a type or a role."""
    if isinstance(value, list):
        return [with_fields(item, fields) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {
        key: item if key == "input_schema" else with_fields(item, fields)
        for key, item in value.items()
    }
    return {**fields, **inner} if "type" in value or "role" in value else inner


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=60, deadline=None)
@given(
    top=st.dictionaries(st.sampled_from(TOP), JUNK),
    inner=st.dictionaries(st.sampled_from(INNER), JUNK),
)
def test_fields_that_nobody_reads_change_nothing(
    protocol: str, top: dict[str, Any], inner: dict[str, Any]
) -> None:
    request = {**top, **with_fields(BASES[protocol], inner), "model": "DeepSeek-V4.1-Flash"}
    plain = {**BASES[protocol], "model": "DeepSeek-V4.1-Flash"}
    for level in Level:
        expected = conversation(protocol, plain, ConvertOptions(), level)
        assert expected is not None
        assert conversation(protocol, request, ConvertOptions(), level) == expected
