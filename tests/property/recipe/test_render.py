"""Control tokens come only from the template, whatever texts a conversation carries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from hypothesis import given
from hypothesis import strategies as st

from headrace.recipe.constants import TASK_SPELLINGS, SpecialTokens
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    FormatKind,
    LatestReminder,
    Message,
    PromptText,
    ResponseFormat,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.json_text import parse_arguments, python_json, spaced_json
from headrace.recipe.options import ModelVersion
from headrace.recipe.render import render

# Grounding marks are left out: assistant text may carry them.
SPECIAL = SpecialTokens(grounding=())
CONTROL = [
    getattr(SPECIAL, name) for name in SpecialTokens.__slots__ if name != "grounding"
] + list(TASK_SPELLINGS.values())
TEXT = st.lists(
    st.sampled_from([*CONTROL, "</｜DSML｜ calls>", "<tool_result>", "\n", '"', "é", "{SCHEMA}"])
    | st.text(max_size=3),
    min_size=1,
    max_size=4,
).map(lambda parts: "x" + "".join(parts))
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "latest_reminder", "calling"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def conversation(roles: list[str], text: Callable[[], str], thinking: bool) -> Conversation:
    """A conversation whose texts, names, keys and schemas all come from `text`."""

    def message(number: int, role: str) -> Message:
        if role == "system":
            return SystemMessage(PromptText.of(text()), (tool(),))
        if role == "user":
            return UserMessage(PromptText.of(text()))
        if role == "tool":
            return ToolMessage(PromptText.of(text()), str(number))
        if role == "latest_reminder":
            return LatestReminder(text())
        calls = None
        if role == "calling":
            arguments = json.dumps({text(): text(), "n": [text()]})
            calls = (ToolCall("1", text(), arguments), ToolCall("2", text(), text()))
        return AssistantMessage(text(), text(), calls)

    def tool() -> ToolDefinition:
        return ToolDefinition(text(), text(), {text(): [text()]})

    return Conversation(
        tuple(message(number, role) for number, role in enumerate(roles)),
        thinking,
        (tool(), tool()),
        response_format=ResponseFormat(FormatKind.JSON_SCHEMA, {text(): text()}),
    )


@given(
    roles=st.lists(ROLES, max_size=6),
    texts=st.lists(TEXT, min_size=1, max_size=30),
    thinking=st.booleans(),
    version=st.sampled_from(ModelVersion),
)
def test_texts_never_add_control_tokens(
    roles: list[str], texts: list[str], thinking: bool, version: ModelVersion
) -> None:
    def cycle() -> Iterator[str]:
        while True:
            yield from texts

    source = cycle()
    prompt = render(conversation(roles, lambda: next(source), thinking), version, SPECIAL)
    harmless = render(conversation(roles, lambda: "x", thinking), version, SPECIAL)
    assert prompt.specials == harmless.specials
    assert prompt.text == "".join(prompt.parts)


@given(values=st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_written_arguments_are_read_again(values: dict[str, object]) -> None:
    assert repr(parse_arguments(python_json(values))) == repr(values)
    assert repr(parse_arguments(spaced_json(values))) == repr(values)
