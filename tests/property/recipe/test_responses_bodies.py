"""Any JSON as a Responses request: documented errors only, `clients` takes what official does."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import Conversation
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.responses import convert_responses

# Names and values of the protocol, so that random objects come close to requests.
KEYS = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "call_id",
        "name",
        "namespace",
        "arguments",
        "input",
        "output",
        "tools",
        "execution",
        "parameters",
        "strict",
        "description",
        "format",
        "image_url",
        "file_id",
        "effort",
        "summary",
        "schema",
        "mode",
    ]
)
WORDS = st.sampled_from(
    [
        "message",
        "user",
        "assistant",
        "developer",
        "system",
        "input_text",
        "output_text",
        "input_image",
        "input_file",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "tool_search_call",
        "tool_search_output",
        "function",
        "custom",
        "namespace",
        "tool_search",
        "client",
        "object",
        "json_schema",
        "json_object",
        "none",
        "auto",
        "required",
        "allowed_tools",
        "apply_patch",
        "a",
        "b",
        "c",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-1, 70) | st.floats(-1, 2) | WORDS | st.text()
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6)
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=6)


def items() -> st.SearchStrategy[Any]:
    """Items that are often well-formed."""
    ids = st.sampled_from("abc")
    parts = st.fixed_dictionaries({"type": WORDS, "text": st.text(max_size=5)})
    content = st.text(max_size=5) | st.lists(parts, max_size=2)
    return st.one_of(
        st.fixed_dictionaries({"role": WORDS, "content": content}),
        st.fixed_dictionaries({"type": st.just("reasoning"), "content": st.lists(parts)}),
        st.fixed_dictionaries(
            {"type": st.just("function_call"), "call_id": ids, "name": WORDS, "arguments": WORDS}
        ),
        st.fixed_dictionaries(
            {"type": st.just("function_call_output"), "call_id": ids, "output": content}
        ),
        OBJECTS,
    )


BODIES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(("DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro")),
        "input": st.text(max_size=5) | st.lists(items(), max_size=6) | VALUES,
    },
    optional={
        "instructions": st.text(max_size=5) | VALUES,
        "tools": st.lists(OBJECTS, max_size=3) | VALUES,
        "tool_choice": WORDS | OBJECTS,
        "reasoning": OBJECTS,
        "text": OBJECTS,
        "store": VALUES,
        "metadata": VALUES,
        "include": VALUES,
    },
)


def conversation(body: bytes, level: Level) -> Conversation | None:
    try:
        return convert_responses(body, ConvertOptions(level=level)).conversation
    except InvalidRequest:
        return None


@settings(max_examples=400, deadline=None)
@given(BODIES)
def test_clients_gives_the_conversation_of_official_where_there_is_one(body: Any) -> None:
    data = json.dumps(body).encode()
    official = conversation(data, Level.OFFICIAL)
    try:
        clients = convert_responses(data, ConvertOptions(level=Level.CLIENTS)).conversation
    except InvalidRequest as error:
        # Only `clients` holds answers to a form, and says which it cannot hold them to.
        form = (error.param or "").startswith(("text", "tools", "tool_choice"))
        assert official is None or form
        return
    assert official in (None, clients)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_an_invalid_request(data: bytes) -> None:
    for level in Level:
        conversation(data, level)
