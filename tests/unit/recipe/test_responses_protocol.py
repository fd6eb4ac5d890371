"""Responses requests: rules that golden cases do not show, and every difference of `clients`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import InvalidBody, InvalidGrammar, InvalidRequest
from headrace.recipe.constants import ReasoningEffort
from headrace.recipe.conversation import (
    AssistantMessage,
    ImageSource,
    PromptText,
    SystemMessage,
    ToolCall,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.converted import ConstraintKind, ConvertedRequest
from headrace.recipe.options import ConvertOptions, Level, WebSearch
from headrace.recipe.protocols.responses import convert_responses

V41, V4 = "DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro"
OFFICIAL = ConvertOptions(level=Level.OFFICIAL)
NOT_THINKING = {"effort": "none"}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
F, G = {"type": "function", "name": "f"}, {"type": "function", "name": "g"}


def convert(
    options: ConvertOptions | None = None,
    **fields: Any,
) -> ConvertedRequest:
    body = {"model": V41, "input": "hi", **fields}
    return convert_responses(json.dumps(body), options or ConvertOptions())


def both(**fields: Any) -> ConvertedRequest:
    """Converted at both levels, with the same conversation."""
    official = convert(OFFICIAL, **fields)
    assert convert(**fields).conversation == official.conversation
    return official


def refused(kind: type[InvalidRequest] = InvalidRequest, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        convert(**fields)
    assert type(error.value) is kind
    return error.value


def official_refuses(**fields: Any) -> None:
    with pytest.raises(InvalidRequest):
        convert(OFFICIAL, **fields)


def call(call_id: str, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}", **more}


def output(call_id: str | None, text: Any = "out") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def notice(text: str) -> dict[str, Any]:
    wrapped = f"<image_resize_notice>{text}</image_resize_notice>"
    return {"role": "developer", "content": [{"type": "input_text", "text": wrapped}]}


def namespace(name: str, *tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": list(tools), **more}


def calls(request: ConvertedRequest) -> list[ToolCall]:
    return [
        entry
        for message in request.conversation.messages
        if isinstance(message, AssistantMessage)
        for entry in message.tool_calls or ()
    ]


# --- grouping of items ------------------------------------------------------------------------


def test_answered_calls_end_their_group_when_another_call_comes() -> None:
    items = [call("b"), output("b", "1"), call("a"), output("a", "2")]
    assert both(input=items).conversation.messages == (
        AssistantMessage("", "", (ToolCall("b", "f", "{}"),)),
        ToolMessage(PromptText.of("1"), "b"),
        AssistantMessage("", "", (ToolCall("a", "f", "{}"),)),
        ToolMessage(PromptText.of("2"), "a"),
    )


def test_calls_and_outputs_of_a_group_are_sorted_by_id() -> None:
    request = both(input=[call("b"), call("a"), output("b"), output("a")])
    messages = request.conversation.messages
    assert [entry.id for entry in calls(request)] == ["a", "b"]
    assert [m.tool_call_id for m in messages if isinstance(m, ToolMessage)] == ["a", "b"]


def test_assistant_texts_and_reasoning_are_joined() -> None:
    items = [
        reasoning("a"),
        {"role": "assistant", "content": ""},
        reasoning("b"),
        {"role": "assistant", "content": "x"},
        {"type": "web_search_call"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        reasoning("c"),
        call("1"),
        output("1"),
    ]
    assert both(input=items).conversation.messages == (
        AssistantMessage("x\n\ny", "a\nb"),
        AssistantMessage("", "c", (ToolCall("1", "f", "{}"),)),
        ToolMessage(PromptText.of("out"), "1"),
    )


@pytest.mark.parametrize("between", [reasoning(""), {"type": "web_search_call"}, output(None)])
def test_open_calls_are_an_error_before_other_items(between: dict[str, Any]) -> None:
    error = refused(input=[call("a"), between, output("a")])
    assert error.message == "No tool output found for tool call a."


def test_resize_notices_stay_behind_their_output() -> None:
    items = [call("b"), call("a"), output("b", "B"), notice("1"), output("a", "A"), notice("2")]
    shown = [
        message.content.parts[0] if not isinstance(message, AssistantMessage) else "calls"
        for message in both(input=items).conversation.messages
    ]
    first, second = (notice(text)["content"][0]["text"] for text in "12")
    assert shown == ["calls", "A", second, "B", first]


@pytest.mark.parametrize(
    "interrupting",
    [
        {"role": "system", "content": notice("x")["content"]},
        {"role": "developer", "content": notice("x")["content"][0]["text"]},
        {"role": "developer", "content": notice("x")["content"] * 2},
        {"role": "developer", "content": [{"type": "input_text", "text": "plain"}]},
    ],
)
def test_other_messages_between_call_and_output_are_an_error(interrupting: Any) -> None:
    error = refused(input=[call("b"), call("a"), output("b"), interrupting, output("a")])
    assert error.message == "No tool output found for tool call a."


def test_input_needs_items_or_instructions() -> None:
    assert refused(input=None).message == "Either input or instructions must be provided"
    assert refused(input=[], instructions="x").message == "Input items array must not be empty"
    messages = both(input=None, instructions="x").conversation.messages
    assert messages == (SystemMessage(PromptText.of("x")),)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"content": "x"}, "input[0]"),
        ({"role": "critic", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "a"}, "input[0].output"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[0].content[0].type"),
        ({"type": "tool_search_call", "call_id": "a"}, "input[0].arguments"),
    ],
)
def test_malformed_items_name_the_field(item: dict[str, Any], param: str) -> None:
    assert refused(InvalidBody, input=[item]).param == param


def test_fields_of_other_types_may_have_any_value() -> None:
    items = [
        {"role": "user", "content": "x", "call_id": 3, "tools": "y"},
        {"type": "file_search_call", "role": 3, "content": 4},
        {"type": "reasoning", "content": [{"type": 3, "text": "r", "detail": 4}], "summary": 5},
        call("a", content=3, output=4),
        output("a", [{"type": "input_file", "text": 3, "image_url": {}}]),
    ]
    tools = [{"type": "mcp", "name": 3}, {"type": "custom", "name": "apply_patch", "format": 3}]
    messages = both(input=items, tools=tools).conversation.messages
    assert messages == (
        UserMessage(PromptText.of("x")),
        AssistantMessage("", "r", (ToolCall("a", "f", "{}"),)),
        ToolMessage(PromptText.of("[Unsupported Document]"), "a"),
    )


def test_images_are_checked_part_by_part_before_anything_else() -> None:
    bad_data = {"type": "input_image", "image_url": "foo"}
    nothing = {"type": "input_image", "image_url": ""}
    error = refused(input=[{"role": "assistant", "content": [bad_data, nothing]}])
    assert error.message == "input[0].content[1]: input_image must have image_url or file_id"
    error = refused(input=[{"role": "assistant", "content": [bad_data]}])
    assert error.message == "input[0]: Image in assistant message is unsupported"
    error = refused(input=[{"role": "user", "content": [bad_data]}])
    assert error.message == "input[0]: Unsupported image_url format"
    link = "https://x" + "é" * 5000
    error = refused(input=[output(None, [{"type": "input_image", "image_url": link}])])
    assert error.message.startswith("input[0].output[0]: image_url external link length 10009 ")
    content = [
        {"type": "input_image", "image_url": "http://x"},
        {"type": "input_text", "text": "t"},
    ]
    request = both(input=[{"role": "user", "content": content}])
    places = PromptText(("", "\n\nt"), (ImageSource(url="http://x", path="input[0]"),))
    assert request.conversation.messages == (UserMessage(places),)


# --- tools ------------------------------------------------------------------------------------


def test_namespace_names_are_unique_and_reused_in_the_history() -> None:
    request = both(
        model=V4,
        tools=[namespace("a_", {**F, "name": "b"}), namespace("a", F), {**F, "name": "a_b"}],
        input=[
            call("1", "b", namespace="a_"),
            output("1"),
            call("2", "gone", namespace="a"),
            output("2"),
            call("3", "gone", namespace="a"),
            output("3"),
        ],
    )
    assert [tool.name for tool in request.conversation.tools] == ["a_b_1", "a__f", "a_b"]
    assert [entry.name for entry in calls(request)] == ["a_b_1", "a__gone", "a__gone"]


def test_found_tools_follow_their_group_and_get_names_before_the_history() -> None:
    request = both(
        tools=[SEARCH],
        input=[
            call("0", "c_1", namespace="a"),
            output("0"),
            {"type": "tool_search_call", "call_id": "s", "arguments": {"k": 1e-5}},
            {
                "type": "tool_search_output",
                "call_id": "s",
                "tools": [namespace("a", {**F, "name": "c"}), namespace("a", {**F, "name": "c"})],
            },
        ],
    )
    assert [entry.name for entry in calls(request)] == ["a::c_1_1", "tool_search"]
    assert calls(request)[1].arguments == '{"k":0.00001}'
    found = request.conversation.messages[-1]
    assert isinstance(found, SystemMessage) and found.tools is not None
    assert [(tool.name, tool.defer_loading) for tool in found.tools] == [
        ("a::c", True),
        ("a::c_1", True),
    ]
    settings = request.settings
    assert settings.namespace_tools == {"a::c": ("a", "c"), "a::c_1": ("a", "c")}
    assert settings.declared_namespace_tools == {}
    assert settings.tool_search


def test_found_tools_vanish_with_the_choice() -> None:
    items = [
        {"type": "tool_search_call", "call_id": "s", "arguments": {}},
        {"type": "tool_search_output", "call_id": "s", "tools": [F]},
    ]
    messages = both(input=items, tool_choice="none").conversation.messages
    assert not any(isinstance(message, SystemMessage) for message in messages)


def test_the_type_of_a_found_tool_may_be_a_number() -> None:
    def items(kind: Any) -> list[dict[str, Any]]:
        return [
            {"type": "tool_search_call", "call_id": "s", "arguments": {}},
            {"type": "tool_search_output", "call_id": "s", "tools": [{**F, "type": kind}]},
        ]

    by_name = both(input=items("function")).conversation
    assert both(input=items(0)).conversation == by_name
    for kind in (6, 77):
        with pytest.raises(InvalidRequest, match="ResponsesTool::Unsupported"):
            convert(OFFICIAL, input=items(kind))
    for kind in (-1, True, 1.5, None, []):
        assert isinstance(refused(InvalidBody, input=items(kind)), InvalidBody)


def test_unknown_found_tool_is_refused_by_official_and_dropped_by_clients() -> None:
    items = [
        {"type": "tool_search_call", "call_id": "s", "arguments": {}},
        {"type": "tool_search_output", "call_id": "s", "tools": [{"type": "mcp"}, F]},
    ]
    official_refuses(input=items)
    result = convert(input=items).conversation.messages[1]
    assert isinstance(result, ToolMessage)
    assert [tool["name"] for tool in json.loads(result.content.parts[0])] == ["f"]


def test_custom_tools_of_any_name() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tool = {"type": "custom", "name": "run", "description": "Runs.", "format": grammar}
    official_refuses(tools=[tool])
    request = convert(tools=[tool])
    (function,) = request.conversation.tools
    assert function.name == "run"
    assert function.description == ("Runs.\n\nThe input must match this lark grammar:\nstart: /x/")
    assert list(function.parameters["properties"]) == function.parameters["required"] == ["input"]
    assert request.settings.custom_tools == {"run"}


def test_names_that_the_markup_can_carry() -> None:
    inner = {"type": "function", "name": "look up", "parameters": {"type": "object"}}
    tools = [
        {**inner, "name": "ns.f"},
        {"type": "custom", "name": "run it"},
        {"type": "namespace", "name": "my tools", "tools": [inner]},
    ]
    for tool in tools:
        official_refuses(tools=[tool])
    names = [tool.name for tool in convert(tools=tools).conversation.tools]
    assert names == ["ns.f", "run it", "my tools::look up"]
    assert refused(tools=[{"type": "custom", "name": 'a"b'}]).param == "tools[0].name"


def test_apply_patch_has_the_official_text_at_both_levels() -> None:
    request = both(tools=[{"type": "custom", "name": "apply_patch", "description": "mine"}])
    description = request.conversation.tools[0].description
    assert description is not None and description.startswith("Use the `apply_patch` tool")
    assert request.settings.custom_tools == {"apply_patch"}


def test_custom_tools_inside_of_a_namespace() -> None:
    fields: dict[str, Any] = {
        "tools": [namespace("ns", {"type": "custom", "name": "run"})],
        "input": [
            {
                "type": "custom_tool_call",
                "call_id": "1",
                "name": "run",
                "namespace": "ns",
                "input": 'a"',
            },
            {"type": "custom_tool_call_output", "call_id": "1", "output": "x"},
        ],
    }
    official_refuses(**fields)
    request = convert(**fields)
    assert request.settings.custom_tools == {"ns::run"}
    assert request.settings.namespace_tools == {"ns::run": ("ns", "run")}
    assert calls(request) == [ToolCall("1", "ns::run", '{"input":"a\\""}')]


def test_namespace_of_a_custom_call_that_is_not_declared_is_ignored() -> None:
    item = {
        "type": "custom_tool_call",
        "call_id": "1",
        "name": "run",
        "namespace": "ns",
        "input": "",
    }
    request = both(input=[item, output("1")])
    assert calls(request)[0].name == "run"


def test_unknown_tools_inside_of_a_namespace_are_dropped() -> None:
    fields: dict[str, Any] = {"tools": [namespace("ns", {"type": "mcp", "name": 3}, F)]}
    official_refuses(**fields)
    assert [tool.name for tool in convert(**fields).conversation.tools] == ["ns::f"]


def test_custom_tools_reserve_their_names() -> None:
    tools = [namespace("a", {**F, "name": "_b"}), {"type": "custom", "name": "a_b"}]
    assert [tool.name for tool in convert(model=V4, tools=tools).conversation.tools] == [
        "a_b_1",
        "a_b",
    ]


def test_web_search_is_dropped_or_refused() -> None:
    tools = [{"type": "web_search", "user_location": {"city": "x"}}, {"type": "local_shell"}]
    request = both(tools=tools, tool_choice={"type": "web_search"})
    assert request.conversation.tools == ()
    assert [tool["type"] for tool in request.settings.tools] == ["web_search"]
    options = ConvertOptions(responses_web_search=WebSearch.REJECT)
    with pytest.raises(InvalidRequest, match="Server tools are not supported"):
        convert(options, tools=tools)


# --- choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_required_and_named_choice_in_thinking_mode(choice: Any) -> None:
    official_refuses(tools=[F], tool_choice=choice)
    request = convert(tools=[F], tool_choice=choice)
    assert request.conversation.tool_choice is ToolChoice.AUTO
    assert request.inference.constraint is not None
    assert request.inference.constraint.kind is ConstraintKind.TOOL_CALL_REQUIRED
    assert request.parsing.parse_tool_calls and not request.parsing.starts_in_tool_calls
    plain = both(tools=[F], tool_choice=choice, reasoning=NOT_THINKING)
    assert plain.conversation.tool_choice is ToolChoice.REQUIRED
    assert plain.parsing.starts_in_tool_calls


def test_allowed_tools_keep_the_named_ones() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [F, {"type": "mcp"}]}
    official_refuses(tools=[F, G], tool_choice=choice)
    request = convert(tools=[F, G], tool_choice=choice)
    assert [tool.name for tool in request.conversation.tools] == ["f"]
    assert request.settings.tool_choice == {**choice, "tools": [F, {"type": "mcp"}]}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [F]}
    request = convert(tools=[F, G], tool_choice=choice, reasoning=NOT_THINKING)
    assert request.conversation.tool_choice is ToolChoice.REQUIRED
    choice = {"type": "allowed_tools", "mode": "auto", "tools": []}
    assert convert(tools=[F], tool_choice=choice).conversation.tool_choice is ToolChoice.NONE
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [G]}
    assert refused(tools=[F], tool_choice=choice).param == "tool_choice"


def test_choices_of_tools_that_are_not_run_here_vanish() -> None:
    choice = {"type": "file_search"}
    official_refuses(tools=[F], tool_choice=choice)
    assert convert(tools=[F], tool_choice=choice).conversation.tool_choice is ToolChoice.AUTO
    request = convert(tools=[SEARCH, F], tool_choice={"type": "tool_search"})
    assert [tool.name for tool in request.conversation.tools] == ["tool_search"]


@pytest.mark.parametrize("named", [{"name": "f", "namespace": "n"}, {"name": "f"}])
def test_a_namespaced_function_can_be_chosen(named: dict[str, Any]) -> None:
    choice = {"type": "function", **named}
    fields: dict[str, Any] = {
        "tools": [namespace("n", F), G],
        "tool_choice": choice,
        "reasoning": NOT_THINKING,
    }
    official_refuses(**fields)
    assert [tool.name for tool in convert(**fields).conversation.tools] == ["n::f"]


def test_markup_is_suppressed_under_choice_none() -> None:
    assert convert(tools=[F], tool_choice="none").parsing.suppress_markup
    assert not convert(OFFICIAL, tools=[F], tool_choice="none").parsing.suppress_markup
    assert not convert(tools=[F]).parsing.suppress_markup


# --- items that clients send ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt"])
def test_history_that_is_not_here_is_refused(name: str) -> None:
    assert refused(**{name: "resp_1"}).param == name
    assert convert(OFFICIAL, **{name: "resp_1"}).settings.previous_response_id is None
    assert convert(**{name: None}).conversation.messages


def test_item_reference_is_refused() -> None:
    item = {"type": "item_reference", "id": "msg_1"}
    assert refused(input=[item]).param == "input[0]"
    assert convert(OFFICIAL, input=[item]).conversation.messages == ()


def test_content_under_other_names() -> None:
    items = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": None},
        call("1"),
        output("1", [{"type": "output_text", "text": "o"}]),
    ]
    for item in items[:2], items[2:4], items[4:]:
        official_refuses(input=item)
    assert convert(input=items).conversation.messages == (
        UserMessage(PromptText.of("a")),
        AssistantMessage("no", ""),
        UserMessage(PromptText.of("b")),
        AssistantMessage("", "", (ToolCall("1", "f", "{}"),)),
        ToolMessage(PromptText.of("o"), "1"),
    )


def test_encrypted_reasoning_is_tolerated() -> None:
    item = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}
    assert both(input=[item, {"role": "user", "content": "u"}]).conversation.messages == (
        UserMessage(PromptText.of("u")),
    )


def test_number_of_messages_is_limited() -> None:
    items = [{"role": "user", "content": "x"}] * 3
    options = ConvertOptions(max_messages=2)
    with pytest.raises(InvalidRequest, match="at most 2"):
        convert(options, input=items)


def test_attribution_line_can_be_removed() -> None:
    text = "x-anthropic-billing-header: cch=1;\nYou are b"
    items = [{"role": "developer", "content": text}]
    kept = both(instructions=text, input=items).conversation.messages
    assert kept == (SystemMessage(PromptText.of(text)),) * 2
    options = ConvertOptions(strip_attribution=True)
    stripped = convert(options, instructions=text, input=items).conversation.messages
    assert stripped == (SystemMessage(PromptText.of("You are b")),) * 2


# --- thinking, sampling, echo -----------------------------------------------------------------


def test_effort_as_a_number() -> None:
    official_refuses(reasoning={"effort": 60})
    assert convert(reasoning={"effort": 60}).conversation.reasoning_effort == 60
    assert refused(InvalidBody, reasoning={"effort": 101}).param == "reasoning.effort"
    effort = both(reasoning={"effort": "ultra"}).conversation.reasoning_effort
    assert effort is ReasoningEffort.MAX


@pytest.mark.parametrize(
    ("switches", "thinking"),
    [
        ({"thinking": {"type": "disabled"}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning": NOT_THINKING}, True),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, False),
        ({"thinking": {"type": "odd"}, "chat_template_kwargs": 3}, True),
    ],
)
def test_thinking_switches(switches: dict[str, Any], thinking: bool) -> None:
    assert convert(**switches).conversation.thinking is thinking
    expected = switches.get("reasoning") is None
    assert convert(OFFICIAL, **switches).conversation.thinking is expected


def test_temperature_counts_in_thinking_mode() -> None:
    assert convert(OFFICIAL, temperature=0).inference.temperature == 1.0
    assert convert(temperature=0).inference.temperature == 0.0


def test_log_probabilities_on_request_only() -> None:
    assert not convert(include=["reasoning.encrypted_content"]).inference.logprobs
    include = ["message.output_text.logprobs"]
    assert convert(include=include).inference.logprobs
    assert not convert(OFFICIAL, include=include).inference.logprobs
    inference = both(top_logprobs=0).inference
    assert inference.logprobs and inference.top_logprobs == 0


def test_limit_errors_name_the_field() -> None:
    assert refused(max_output_tokens=0).param == "max_output_tokens"
    assert refused(InvalidBody, max_output_tokens=-1).param == "max_output_tokens"
    assert refused(InvalidBody, top_logprobs=256).param == "top_logprobs"
    format_ = {"type": "json_schema", "name": "n", "schema": {"type": "x"}}
    assert refused(InvalidGrammar, text={"format": format_}).param == "text.format.schema.type"


def test_clients_get_more_of_their_values_back() -> None:
    fields: dict[str, Any] = {
        "metadata": {"k": "v"},
        "parallel_tool_calls": False,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
        "store": True,
    }
    settings = convert(**fields).settings
    assert settings.metadata == {"k": "v"}
    assert (settings.parallel_tool_calls, settings.truncation) == (False, "auto")
    assert settings.wants_encrypted_reasoning
    assert not settings.store  # there is no store
    fixed = convert(OFFICIAL, **fields).settings
    assert (fixed.metadata, fixed.parallel_tool_calls, fixed.truncation) == ({}, True, "disabled")
