"""Any JSON is converted or refused, and level `clients` takes all that `official` takes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.messages import convert_messages

OFFICIAL, CLIENTS = ConvertOptions(level=Level.OFFICIAL), ConvertOptions()
TEXTS = st.sampled_from(
    ["", "a", "\n\n", "x-anthropic-billing-header: c", "</think>", "<｜User｜>"]
)
IDS = st.sampled_from(["a", "b", "c"])
NAMES = st.sampled_from(["f", "g", "h"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def block(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


PARTS = st.one_of(
    block("text", text=TEXTS),
    block(
        "image",
        source=st.sampled_from(
            [
                {"type": "url", "url": "https://x"},
                {"type": "url", "url": "ftp://x"},
                {"type": "base64", "media_type": "image/png", "data": "QQ="},
            ]
        ),
    ),
    block("document", source=st.just({"media_type": "text/plain"})),
)
BLOCKS = st.one_of(
    PARTS,
    block("thinking", thinking=TEXTS),
    block("tool_use", id=IDS, name=NAMES, input=JUNK),
    block("tool_result", tool_use_id=IDS, content=TEXTS | st.lists(PARTS, max_size=2)),
    block(
        "tool_result",
        tool_use_id=IDS,
        content=st.lists(block("tool_reference", tool_name=NAMES), max_size=2),
    ),
    block("tool_addition", tool=st.builds(lambda n: {"type": "tool_reference", "name": n}, NAMES)),
    block("redacted_thinking", data=TEXTS),
    block("server_tool_use", id=IDS, name=NAMES, input=JUNK),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": TEXTS | st.lists(BLOCKS, max_size=4),
        }
    ),
    max_size=5,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": NAMES, "input_schema": st.just({"type": "object"}) | JUNK},
        optional={"defer_loading": st.booleans(), "type": st.sampled_from(["custom", "bash_1"])},
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro"]),
        "messages": MESSAGES | JUNK,
    },
    optional={
        "tools": TOOLS,
        "tool_choice": st.sampled_from(
            [{"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"}, {"type": "auto"}]
        ),
        "thinking": st.sampled_from([{"type": "enabled"}, {"type": "disabled"}, {"type": "x"}]),
        "output_config": st.sampled_from([{"effort": "max"}, {"effort": 7}, {}]),
        "system": TEXTS | st.lists(block("text", text=TEXTS), max_size=3),
        "temperature": JUNK,
        "stop_sequences": JUNK,
    },
)


@settings(deadline=None, max_examples=400)
@given(BODIES)
def test_requests_are_converted_or_refused(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    try:
        official = convert_messages(data, OFFICIAL)
    except InvalidRequest:
        official = None
    try:
        clients = convert_messages(data, CLIENTS)
    except InvalidRequest as error:
        # Only `clients` holds answers to a form, and says which it cannot hold them to.
        form = (error.param or "").startswith(("output_", "tools", "tool_choice"))
        assert official is None or form
        return
    if official is not None:
        assert clients.conversation == official.conversation


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60) | JUNK.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused_with_a_documented_error(data: bytes) -> None:
    for options in (OFFICIAL, CLIENTS):
        try:
            convert_messages(data, options)
        except InvalidRequest as error:
            assert error.http_status == 400
