"""Any JSON is converted or refused, and level `clients` takes all that `official` takes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.chat import convert_chat

OFFICIAL, CLIENTS = ConvertOptions(level=Level.OFFICIAL), ConvertOptions()
TEXTS = st.sampled_from(
    ["", "a json", "\n\n", "x-anthropic-billing-header: c", "</think>", "<｜User｜>"]
)
IDS = st.sampled_from(["a", "b"])
NAMES = st.sampled_from(["f", "g", "a b", ""])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
    st.sampled_from(
        [
            {"type": "image_url", "image_url": {"url": "http://x"}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ="}},
            {"type": "file", "file_data": "data:image/png;base64,QQ"},
        ]
    ),
)
CONTENT = TEXTS | st.lists(PARTS, max_size=2) | st.none()


def call(id_: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = st.lists(st.builds(call, IDS, NAMES, TEXTS | JUNK), max_size=2)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": CONTENT}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": CONTENT},
            optional={
                "tool_calls": CALLS,
                "reasoning_content": TEXTS,
                "prefix": st.booleans(),
                "function_call": st.just({"name": "f", "arguments": "{}"}),
            },
        ),
        st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": IDS, "content": CONTENT}),
        st.fixed_dictionaries({"role": st.sampled_from(["developer", "function", "x"])}),
    ),
    max_size=5,
)
SCHEMAS = JUNK | st.sampled_from(
    [{"type": "object", "properties": {"a": {"type": "string"}}}, {"type": "object"}]
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": NAMES}, optional={"parameters": SCHEMAS, "strict": st.booleans() | st.none()}
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro"]),
        "messages": MESSAGES,
    },
    optional={
        "tools": st.lists(
            st.builds(lambda function: {"type": "function", "function": function}, FUNCTIONS)
            | st.just({"type": "custom", "custom": {"name": "c"}}),
            max_size=2,
        ),
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | JUNK,
        "thinking": st.sampled_from([{"type": "disabled"}, {"type": "enabled"}]) | JUNK,
        "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}])
        | st.builds(
            lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}, SCHEMAS
        ),
        "temperature": JUNK,
        "stop": JUNK,
        "stream_options": JUNK,
    },
)


def outcome(body: Any, options: ConvertOptions) -> Any:
    try:
        return convert_chat(json.dumps(body).encode(), options)
    except InvalidRequest as error:
        assert error.message
        return None


@settings(deadline=None)
@given(BODIES)
def test_clients_take_what_official_takes_with_the_same_conversation(body: dict[str, Any]) -> None:
    official = outcome(body, OFFICIAL)
    try:
        clients = convert_chat(json.dumps(body).encode(), CLIENTS)
    except InvalidRequest as error:
        # Only `clients` holds answers to a form, and says which it cannot hold them to.
        form = (error.param or "").startswith(("response_format", "tools", "tool_choice"))
        assert official is None or form
        return
    if official is not None:
        assert clients.conversation == official.conversation


@settings(deadline=None)
@given(JUNK)
def test_any_json_is_answered(body: Any) -> None:
    for options in (OFFICIAL, CLIENTS):
        assert outcome(body, options) is None


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_bytes_are_answered(body: bytes | str) -> None:
    for options in (OFFICIAL, CLIENTS):
        try:
            convert_chat(body, options)
        except InvalidRequest as error:
            assert error.message.startswith("invalid ")
