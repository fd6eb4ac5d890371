"""What the protocols share: thinking, sampling, stops, token limits, tools and their constraint."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.errors import ContextTooLong, InvalidBody, InvalidRequest
from headrace.recipe.constants import ReasoningEffort
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    FormatKind,
    Message,
    PromptText,
    ResponseFormat,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    UserMessage,
)
from headrace.recipe.converted import ConstraintKind, InferenceOptions, OutputConstraint
from headrace.recipe.options import ConvertOptions, Level, MissingReasoning, ModelVersion
from headrace.recipe.protocols.models import resolve_model
from headrace.recipe.protocols.sampling import (
    check_stops,
    resolve_max_tokens,
    resolve_sampling,
    shortest_f32,
    to_f32,
)
from headrace.recipe.protocols.thinking import resolve_thinking, settle_reasoning
from headrace.recipe.protocols.tools import (
    Choice,
    check_strict_mixing,
    check_tool_name,
    output_constraint,
    settle_tools,
)

OFFICIAL, CLIENTS = ConvertOptions(level=Level.OFFICIAL), ConvertOptions()
REJECT = ConvertOptions(missing_reasoning=MissingReasoning.REJECT)
SCHEMA = {"type": "object"}
F, G = ToolDefinition("f", None, SCHEMA), ToolDefinition("g", "d", SCHEMA, strict=False)
V4, V41 = ModelVersion.V4, ModelVersion.V41


def test_model_names() -> None:
    assert resolve_model("DeepSeek-V4-Pro", CLIENTS) is V4
    with pytest.raises(InvalidRequest) as caught:
        resolve_model("x", ConvertOptions(model_versions={"b": V4, "a": V41}))
    assert caught.value.message == "The supported API model names are a, b, but you passed x."


@pytest.mark.parametrize(
    ("type_", "effort", "expected"),
    [
        (None, None, (True, ReasoningEffort.HIGH)),
        ("enabled", "none", (True, ReasoningEffort.HIGH)),
        ("disabled", "max", (False, None)),
        (None, "none", (False, None)),
        (None, "ultra", (True, ReasoningEffort.MAX)),
        (None, "medium", (True, ReasoningEffort.HIGH)),
        (None, "xhigh", (True, ReasoningEffort.XHIGH)),
    ],
)
def test_thinking(type_: str | None, effort: str | None, expected: object) -> None:
    for options in (OFFICIAL, CLIENTS):
        got = resolve_thinking(type_=type_, template=None, effort=effort, options=options)
        assert got == expected


def test_unknown_effort_counts_even_when_it_decides_nothing() -> None:
    for effort in ("extreme", 0, 101):
        with pytest.raises(InvalidBody) as caught:
            resolve_thinking(type_="disabled", template=None, effort=effort, options=CLIENTS)
        assert caught.value.param == "reasoning_effort"


def test_missing_reasoning() -> None:
    user = UserMessage(PromptText.of("hi"))
    bare = AssistantMessage("a")
    called = AssistantMessage("", None, (ToolCall("c1", "f", "{}"),))
    marked = AssistantMessage("", None, (ToolCall("call_00_ET_x", "f", "{}"),))

    def settle(*messages: Message, options: ConvertOptions = REJECT, **fields: Any) -> list[Any]:
        arguments = {"thinking": True, "tools_declared": False, **fields}
        settled = settle_reasoning(messages, options=options, message="back", **arguments)
        return [getattr(message, "reasoning_content", None) for message in settled]

    assert settle(user, AssistantMessage("a", "r"), bare, options=CLIENTS) == [None, "r", ""]
    assert settle(AssistantMessage("a", "r"), thinking=False) == [None]
    assert settle(user, bare) == [None, ""]
    assert settle(bare, user, tools_declared=True) == ["", None]
    assert settle(user, marked, tools_declared=True) == [None, ""]
    for messages, declared in (((user, bare), True), ((user, called), False), ((called,), False)):
        with pytest.raises(InvalidRequest, match=r"^back$"):
            settle(*messages, tools_declared=declared)


def resolve(options: ConvertOptions = OFFICIAL, **fields: Any) -> InferenceOptions:
    given: dict[str, Any] = {"version": V41, "thinking": False, "with_tools": False, **fields}
    return resolve_sampling(options=options, **given)


@pytest.mark.parametrize(
    ("fields", "top_p"),
    [
        ({"thinking": True}, 1.0),
        ({"thinking": True, "top_p": 0.5}, to_f32(0.95)),
        ({"thinking": True, "top_p": 0.97}, to_f32(0.97)),
        ({"top_p": 0.5}, 1.0),
        ({"version": V4, "top_p": 0.5}, 0.5),
        ({"version": V4, "thinking": True, "top_p": 0.5}, 1.0),
        ({"version": V4, "thinking": True, "with_tools": True}, to_f32(0.95)),
    ],
)
def test_official_top_p(fields: dict[str, Any], top_p: float) -> None:
    assert resolve(**fields).top_p == top_p


def test_floats_are_single_precision() -> None:
    assert resolve(temperature=2.00000001).temperature == 2.0
    assert resolve(temperature=0.1).temperature == 0.10000000149011612
    assert to_f32(1e39) == math.inf and to_f32(-1e39) == -math.inf


@pytest.mark.parametrize(
    ("value", "short"),
    [
        (0.0, 0.0),
        (0.1, 0.1),
        (0.10000000149011612, 0.1),
        (1 / 3, 0.33333334),
        (1.9999999, 1.9999999),
    ],
)
def test_shortest_single_precision(value: float, short: float) -> None:
    assert shortest_f32(value) == short


def test_checks_run_in_the_official_order() -> None:
    wrong: dict[str, Any] = {
        "n": 2,
        "presence_penalty": 3,
        "frequency_penalty": 3,
        "temperature": 3,
        "top_p": 0,
        "top_logprobs": 1,
        "max_tokens": 0,
        "seed": 2**63,
    }
    seen = []
    while wrong:
        with pytest.raises(InvalidRequest) as caught:
            resolve(**wrong)
        seen.append(caught.value.param)
        wrong.pop(caught.value.param or "")
    assert seen == [
        "n",
        "presence_penalty",
        "frequency_penalty",
        "temperature",
        "top_p",
        "top_logprobs",
        "max_tokens",
        "seed",
    ]


def test_token_limit_is_checked_or_clamped() -> None:
    options = ConvertOptions(thinking_max_tokens_bound=10, non_thinking_max_tokens_bound=20)
    assert resolve(options, thinking=True, max_tokens=10).max_tokens == 10
    assert resolve(options, max_tokens=20).max_tokens == 20
    with pytest.raises(InvalidRequest, match=r"range of max_tokens is \[1, 10\]$"):
        resolve(options, thinking=True, max_tokens=11)
    assert resolve(options, max_tokens=99, max_tokens_clamped=True).max_tokens == 20
    with pytest.raises(InvalidRequest):
        resolve(options, max_tokens=0, max_tokens_clamped=True)


def test_stop_sequences() -> None:
    assert check_stops(None) == check_stops([]) == ()
    assert check_stops("a") == ("a",)
    assert check_stops(["a"] * 16) == ("a",) * 16
    for stop, text in (
        ("", "Invalid 'stop': empty string."),
        (["a", ""], "Invalid 'stop[1]': empty string."),
        (["a"] * 17, "Stop string array too long: 17"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_stops(stop, "stop_sequences")
        assert caught.value.message.startswith(text)
        assert (caught.value.param or "").startswith("stop_sequences")


def test_max_tokens_fits_the_context() -> None:
    thinking, plain = Conversation(()), Conversation((), thinking=False)
    most = Conversation((), reasoning_effort=ReasoningEffort.MAX)
    assert resolve_max_tokens(thinking, None, 10, 10**6) == 65_536
    assert resolve_max_tokens(most, None, 10, 10**6) == 131_072
    assert resolve_max_tokens(plain, None, 10, 10**6) == 8_192
    assert resolve_max_tokens(plain, None, 10, 100) == 90
    assert resolve_max_tokens(plain, 90, 10, 100) == 90
    assert resolve_max_tokens(plain, None, 100, 100) == 1
    with pytest.raises(ContextTooLong, match=r"100 tokens.*requested 101 tokens \(10 in"):
        resolve_max_tokens(plain, 91, 10, 100)


def test_tool_names() -> None:
    check_tool_name("a-B_9" * 25, "t")
    check_tool_name("a b", "t", official=False)
    for name, text in (
        ("", "Invalid 't.name': empty string."),
        ("é" * 65, "got a string with length 130 instead."),
        ("a\n", "string does not match pattern."),
    ):
        for official in (True, False):
            with pytest.raises(InvalidRequest) as caught:
                check_tool_name(name, "t", official=official)
            assert text in caught.value.message and caught.value.param == "t.name"


def test_choice_and_what_it_keeps() -> None:
    def settle(choice: Choice, *tools: ToolDefinition, **fields: Any) -> tuple[str, ToolChoice]:
        arguments = {"thinking": False, "options": OFFICIAL, **fields}
        kept, kind = settle_tools(tools, choice, **arguments)
        return "".join(tool.name for tool in kept), kind

    required = Choice(ToolChoice.REQUIRED)
    assert settle(Choice(), F, G) == ("fg", ToolChoice.AUTO)
    assert settle(Choice(ToolChoice.NONE), F, F) == ("", ToolChoice.NONE)
    assert settle(required, F, G) == ("fg", ToolChoice.REQUIRED)
    assert settle(required) == ("", ToolChoice.AUTO)
    named = Choice(ToolChoice.REQUIRED, "g")
    assert settle(named, F, G) == ("g", ToolChoice.REQUIRED)
    assert settle(named) == ("", ToolChoice.AUTO)
    assert settle(named, F, G, thinking=True, options=CLIENTS) == ("g", ToolChoice.REQUIRED)
    with pytest.raises(InvalidRequest, match=r"^Thinking mode does not support this tool_choice$"):
        settle(named, F, G, thinking=True)
    with pytest.raises(InvalidRequest, match=r"no function named 'h' was specified"):
        settle(Choice(ToolChoice.REQUIRED, "h"), F, G)
    with pytest.raises(InvalidRequest, match=r"^Tool names must be unique\.$"):
        settle(Choice(), F, F)


def test_schemas_of_tools() -> None:
    def settle(parameters: Any, strict: bool | None = None) -> Any:
        tool = ToolDefinition("f", None, parameters, strict)
        return settle_tools([tool], Choice(), thinking=False, options=OFFICIAL)[0][0].parameters

    assert settle(None) == {}
    assert settle(SCHEMA) is SCHEMA
    assert settle(None, strict=True)["additionalProperties"] is False
    for parameters, text in (
        (True, "got 'type: null'."),
        ({"type": ["object"]}, """got 'type: ["object"]'."""),
        (5, """Invalid schema for function 'f': 5 is not of types "boolean", "object\""""),
    ):
        with pytest.raises(InvalidRequest) as caught:
            settle(parameters)
        assert text in caught.value.message


def test_strict_mixing() -> None:
    strict = ToolDefinition("s", None, {}, strict=True)
    check_strict_mixing([F, G], has_response_format=True)
    check_strict_mixing([strict], has_response_format=False)
    with pytest.raises(InvalidRequest, match="Cannot use strict tool with non-strict tool"):
        check_strict_mixing([strict, F], has_response_format=True)
    with pytest.raises(InvalidRequest, match="response_format should not be used with tools"):
        check_strict_mixing([strict], has_response_format=True)


def test_constraints() -> None:
    plain = ResponseFormat()
    deferred = ToolDefinition("h", None, {}, None, defer_loading=True)
    assert output_constraint([F, deferred], ToolChoice.AUTO, plain) == OutputConstraint(
        ConstraintKind.TOOL_CALL,
        '[{"type":"function","function":{"name":"f","description":null,'
        '"parameters":{"type":"object"},"strict":null}},'
        '{"type":"function","function":{"name":"h","description":null,'
        '"parameters":{},"strict":null},"defer_loading":true}]',
    )
    required = output_constraint([F], ToolChoice.REQUIRED, plain)
    assert required is not None and required.kind is ConstraintKind.TOOL_CALL_REQUIRED
    schema = ResponseFormat(FormatKind.JSON_SCHEMA, {"a": 1e-7})
    for form, given, expected in (
        (plain, None, None),
        (ResponseFormat(FormatKind.JSON_OBJECT), None, ("json", "")),
        (ResponseFormat(FormatKind.REGEX, "a+"), None, ("regex", "a+")),
        (schema, None, ("json", '{"a":1e-7}')),
        (schema, {"b": 1}, ("json", '{"b":1}')),
    ):
        got = output_constraint([], ToolChoice.AUTO, form, normalised_schema=given)
        assert (got and (got.kind.value, got.schema)) == expected
