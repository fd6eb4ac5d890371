"""Chat requests at level `clients`: one test for each difference, and the field an error names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.sampling import LogprobsMode, SamplingParams
from headrace.errors import InvalidBody, InvalidRequest
from headrace.recipe.constants import ReasoningEffort
from headrace.recipe.conversation import (
    AssistantMessage,
    PromptText,
    SystemMessage,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.converted import ConstraintKind, ConvertedRequest, ThinkingStage
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.chat import convert_chat
from headrace.recipe.protocols.chat_refused import REFUSED

CLIENTS, OFFICIAL = ConvertOptions(), ConvertOptions(level=Level.OFFICIAL)
FLASH = "DeepSeek-V4.1-Flash"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
OFF = {"thinking": {"type": "disabled"}}


def convert(*messages: Any, options: ConvertOptions = CLIENTS, **fields: Any) -> ConvertedRequest:
    body = {"model": FLASH, "messages": list(messages or (USER,)), **fields}
    return convert_chat(json.dumps(body).encode(), options)


def fails(*messages: Any, options: ConvertOptions = CLIENTS, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        convert(*messages, options=options, **fields)
    return caught.value


def function(name: str, parameters: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def call(id_: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "f", "arguments": arguments}}


def calls(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(entries), **fields}


def result(id_: str, content: Any = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


# --- thinking --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, True, ReasoningEffort.HIGH),
        (OFF, False, None),
        ({"thinking": {"type": "adaptive"}}, True, ReasoningEffort.HIGH),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "minimal"}, True, ReasoningEffort.LOW),
        ({"reasoning_effort": 33}, True, 33),
        ({"chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False, "other": 1}}, False, None),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}}, True, ReasoningEffort.MAX),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False, None),
        # Precedence: thinking > chat_template_kwargs > effort > default.
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
            True,
            ReasoningEffort.HIGH,
        ),
        (
            {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"},
            True,
            ReasoningEffort.HIGH,
        ),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "max"}, False, None),
        ({**OFF, "reasoning_effort": "max"}, False, None),
    ],
)
def test_thinking_switches(fields: dict[str, Any], thinking: bool, effort: object) -> None:
    conversation = convert(**fields).conversation
    assert (conversation.thinking, conversation.reasoning_effort) == (thinking, effort)


def test_official_knows_neither_template_arguments_nor_numbers() -> None:
    template = {"thinking": False}
    assert convert(options=OFFICIAL, chat_template_kwargs=template).conversation.thinking
    assert isinstance(fails(options=OFFICIAL, reasoning_effort=50), InvalidBody)


def test_the_server_decides_where_the_request_is_silent() -> None:
    off = ConvertOptions(default_thinking_mode=False)
    assert not convert(options=off).conversation.thinking
    assert convert(options=off, reasoning_effort="low").conversation.thinking


# --- sampling --------------------------------------------------------------------------------


def test_temperature_and_top_p_are_honoured_while_thinking() -> None:
    fields = {"temperature": 0, "top_p": 0.5}
    clients = convert(**fields).inference
    official = convert(options=OFFICIAL, **fields).inference
    assert (clients.temperature, clients.top_p) == (0.0, 0.5)
    assert (official.temperature, round(official.top_p, 6)) == (1.0, 0.95)
    assert convert(top_p=0.5, **OFF).inference.top_p == 0.5


def test_max_completion_tokens_is_max_tokens() -> None:
    assert convert(max_completion_tokens=5).inference.max_tokens == 5
    assert convert(max_completion_tokens=5, max_tokens=6).inference.max_tokens == 5
    assert convert(max_completion_tokens=5, options=OFFICIAL).inference.max_tokens is None
    assert fails(max_completion_tokens=0).param == "max_tokens"
    assert fails(max_completion_tokens=-1).param == "max_completion_tokens"


def test_several_choices() -> None:
    assert convert(n=128).inference.n == 128
    assert fails(n=129).param == "n"
    assert fails(n=0).param == "n"


def test_other_sampling_fields_go_to_the_engine() -> None:
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "7": 2.5},
        "top_k": 0,
        "min_p": 0.05,
        "min_tokens": 3,
        "stop_token_ids": [1, 2],
        "allowed_token_ids": [5, 6],
        "ignore_eos": True,
        "logprobs_mode": "processed",
    }
    extra = convert(**fields).inference.extra
    assert extra == {
        **fields,
        "top_k": -1,
        "logit_bias": {5: -100, 7: 2.5},
        "stop_token_ids": (1, 2),
        "allowed_token_ids": (5, 6),
        "logprobs_mode": LogprobsMode.PROCESSED,
    }
    assert SamplingParams(**extra).ignore_eos
    assert convert(options=OFFICIAL, **fields).inference.extra == {}
    assert convert().inference.extra == {}


def test_top_logprobs_zero_asks_for_nothing() -> None:
    assert convert(top_logprobs=0).inference.top_logprobs == 0
    assert fails(top_logprobs=0, options=OFFICIAL).param == "top_logprobs"


# --- messages --------------------------------------------------------------------------------


def test_developer_is_system_and_reasoning_is_an_alias() -> None:
    developer = {"role": "developer", "content": "be brief"}
    answer = {"role": "assistant", "content": "", "reasoning": "hm"}
    messages = convert(developer, USER, answer).conversation.messages
    assert messages[0] == SystemMessage(PromptText.of("be brief"))
    assert messages[-1] == AssistantMessage("", "hm")
    both = {**answer, "reasoning_content": "yes"}
    assert convert(both).conversation.messages == (AssistantMessage("", "yes"),)
    assert convert(answer, options=OFFICIAL).conversation.messages == (AssistantMessage("", ""),)
    assert isinstance(fails(developer, options=OFFICIAL), InvalidBody)


def test_an_answer_that_ended_early_needs_no_content() -> None:
    cut = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": []}
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    messages = convert(cut, refused).conversation.messages
    assert messages == (AssistantMessage("", "hm"), AssistantMessage("no", ""))
    assert fails({"role": "assistant", "content": None}).param == "messages[0]"
    assert "empty array" in fails(cut, options=OFFICIAL).message


def test_parts_by_the_names_of_responses() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
        {"type": "input_image", "image_url": "http://x"},
        {"type": "image_url", "image_url": "http://y"},
        {"type": "file", "file": {"file_data": "data:image/png;base64,AAAA"}},
    ]
    (message,) = convert({"role": "user", "content": parts}).conversation.messages
    assert isinstance(message, UserMessage)
    assert message.content.shown("<i>") == "a\n\nb\n\nc\n\n<i>\n\n<i>\n\n<i>"
    assert [image.url for image in message.content.images] == ["http://x", "http://y", None]
    assert isinstance(fails({"role": "user", "content": parts}, options=OFFICIAL), InvalidBody)
    reminder = {"role": "latest_reminder", "content": [{"type": "text", "text": "r"}]}
    assert convert(reminder).conversation.messages[0].content == "r"
    pictured = {"role": "latest_reminder", "content": parts[3:4]}
    assert fails(pictured).param == "messages[0].content"


def test_calls_in_the_forms_that_clients_send() -> None:
    custom = {"id": "b", "type": "custom", "custom": {"name": "g", "input": "x\n"}}
    untyped = {"id": "c", "function": {"name": "f"}}
    messages = convert(
        calls(call("a", {"k": [1, 1e-7]}), custom, untyped),
        result("c", None),
        result("a"),
        result("b"),
    ).conversation.messages
    assert messages[0] == AssistantMessage(
        "",
        "",
        (
            ToolCall("a", "f", '{"k": [1, 1e-7]}'),
            ToolCall("b", "g", '{"input":"x\\n"}'),
            ToolCall("c", "f", "{}"),
        ),
    )
    assert messages[1] == ToolMessage(PromptText(), "c")
    assert fails(calls({"id": "a"}), result("a")).param == "messages[0].tool_calls[0].function"


def test_the_older_function_interface() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    answer = {"role": "function", "name": "f", "content": "done"}
    functions = [{"name": "f", "parameters": SCHEMA}, {"name": "g"}]
    converted = convert(old, answer, functions=functions, function_call={"name": "f"}, **OFF)
    assistant, tool = converted.conversation.messages
    assert isinstance(assistant, AssistantMessage) and isinstance(tool, ToolMessage)
    assert assistant.tool_calls == (ToolCall(tool.tool_call_id or "", "f", "{}"),)
    assert converted.conversation.tools == (ToolDefinition("f", None, SCHEMA),)
    assert converted.conversation.tool_choice is ToolChoice.REQUIRED
    assert converted.settings.legacy_functions
    assert convert(functions=functions, function_call="none").conversation.tools == ()
    assert fails(answer).param == "messages[0]"
    assert "content or tool_calls must be set" in fails(old).message
    said = {**old, "content": "x"}
    assert convert(said).conversation == convert(said, options=OFFICIAL).conversation
    tools = [function("f")]
    assert convert(function_call="none", tools=tools) == convert(tools=tools)
    assert fails(function_call="all", functions=functions).param == "function_call"


@pytest.mark.parametrize("options", [CLIENTS, OFFICIAL])
def test_orphans_are_refused(options: ConvertOptions) -> None:
    assert "must be a response to a preceding" in fails(result("a"), options=options).message
    assert "insufficient" in fails(calls(call("a")), USER, options=options).message
    wrong = fails(calls(call("a")), result("b"), options=options)
    assert wrong.message.endswith("did not have response messages: b")
    assert wrong.param == "messages[1].tool_call_id"


def test_attribution_line_is_removed_on_demand() -> None:
    text = "You help.\nx-anthropic-billing-header: v=1;\nBe brief."
    system = {"role": "system", "content": text}
    assert convert(system).conversation.messages[0].content == PromptText.of(text)
    stripped = convert(system, options=ConvertOptions(strip_attribution=True))
    assert stripped.conversation.messages[0].content == PromptText.of("You help.\nBe brief.")


# --- tools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", "any", function("f")])
def test_a_demanded_call_comes_after_the_reasoning(choice: Any) -> None:
    converted = convert(tools=[function("f")], tool_choice=choice)
    assert converted.conversation.tool_choice is ToolChoice.AUTO
    assert converted.inference.constraint is not None
    assert converted.inference.constraint.kind is ConstraintKind.TOOL_CALL_REQUIRED
    assert converted.parsing.parse_tool_calls and not converted.parsing.starts_in_tool_calls
    assert converted.parsing.thinking_stage is ThinkingStage.REASONING_START
    plain = convert(tools=[function("f")], tool_choice=choice, **OFF)
    assert plain.conversation.tool_choice is ToolChoice.REQUIRED
    assert plain.parsing.starts_in_tool_calls
    if choice == "required":
        refused = fails(tools=[function("f")], tool_choice=choice, options=OFFICIAL)
        assert refused.message == "Thinking mode does not support this tool_choice"


def test_choice_in_the_forms_that_clients_send() -> None:
    tools = [function("f"), function("g")]

    def kept(choice: Any) -> tuple[list[str], ToolChoice]:
        conversation = convert(tools=tools, tool_choice=choice, **OFF).conversation
        return [tool.name for tool in conversation.tools], conversation.tool_choice

    assert kept({"type": "auto"}) == (["f", "g"], ToolChoice.AUTO)
    assert kept({"type": "none"}) == ([], ToolChoice.NONE)
    assert kept({"type": "function", "name": "g"}) == (["g"], ToolChoice.REQUIRED)
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    assert kept({"type": "allowed_tools", "allowed_tools": allowed}) == (["g"], ToolChoice.REQUIRED)
    assert kept({"type": "allowed_tools", **allowed, "mode": "auto"}) == (["g"], ToolChoice.AUTO)
    unknown = {"mode": "auto", "tools": [{"type": "function", "name": "h"}]}
    error = fails(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": unknown})
    assert error.param == "tool_choice" and "'h'" in error.message
    for wrong in ("sometimes", {"type": "x"}, {"type": ["x"]}, {"type": "function"}, {"mode": 1}):
        assert isinstance(fails(tools=tools, tool_choice=wrong), InvalidBody)


def test_no_markup_when_no_call_is_wanted() -> None:
    fields = {"tools": [function("f")], "tool_choice": "none"}
    assert convert(**fields).parsing.suppress_markup
    assert not convert(options=OFFICIAL, **fields).parsing.suppress_markup
    assert not convert(tools=[function("f")]).parsing.suppress_markup


def test_tools_of_other_types_are_dropped() -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": SCHEMA}, {}]
    assert convert(tools=tools).conversation.tools == (ToolDefinition("f", None, SCHEMA),)
    assert convert(tools=tools[:1], tool_choice="required").conversation.tools == ()
    assert isinstance(fails(tools=tools[:1], options=OFFICIAL), InvalidBody)


def test_custom_tools_are_functions_with_one_input() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}
    custom = {"type": "custom", "custom": {"name": "c", "description": "d", "format": grammar}}
    converted = convert(tools=[custom, function("f")])
    tool = converted.conversation.tools[0]
    assert tool.name == "c"
    assert tool.description == "d\n\nThe input must match this lark grammar:\nstart: /a/"
    assert tool.parameters["required"] == ["input"]
    assert converted.settings.custom_tools == {"c"}
    patch = {"type": "custom", "custom": {"name": "apply_patch"}}
    description = convert(tools=[patch]).conversation.tools[0].description
    assert description is not None and description.startswith("Use the `apply_patch` tool")


def test_names_that_the_markup_can_carry() -> None:
    for name in ("a b", "mcp.x/y:z", "日本"):
        assert convert(tools=[function(name)]).conversation.tools[0].name == name
        assert "does not match" in fails(tools=[function(name)], options=OFFICIAL).message
    for name in ('a"', "<a>", "a\n", " a", "", "x" * 129, "｜DSML｜"):
        assert fails(tools=[function("ok"), function(name)]).param == "tools[1].function.name"


def test_schemas_that_the_official_reader_refuses() -> None:
    for parameters in ({}, {"properties": {"a": {"type": "string"}}}):
        assert convert(tools=[function("f", parameters)]).conversation.tools[0].parameters == (
            parameters
        )
        assert fails(tools=[function("f", parameters)], options=OFFICIAL).param == "tools[0]"
    optional = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/$defs/k"}]}}}
    strict = function("f", {**optional, "$defs": {"k": {"type": "null"}}}, strict=True)
    tool = convert(tools=[strict]).conversation.tools[0]
    assert (tool.parameters, tool.strict) == (strict["function"]["parameters"], True)
    wrong = fails(tools=[function("f", {"type": "strin"}, strict=True)])
    assert wrong.param == "tools[0].function.parameters.type"


def test_the_engine_gets_the_definitions_that_the_prompt_has_lost() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/k"}},
        "$defs": {"k": {"type": "null"}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for fields in ({"response_format": form}, {"tools": [function("f", schema, strict=True)]}):
        official, clients = (convert(options=options, **fields) for options in (OFFICIAL, CLIENTS))
        assert official.conversation == clients.conversation
        assert official.inference.constraint and clients.inference.constraint
        assert '"$defs":' not in official.inference.constraint.schema
        assert '"$defs":' in clients.inference.constraint.schema


def test_strict_tools_may_stand_beside_others_and_a_format() -> None:
    strict, loose = function("f", strict=True), function("g")
    assert len(convert(tools=[strict, loose]).conversation.tools) == 2
    assert convert(tools=[strict], response_format={"type": "text"}).parsing.parse_tool_calls
    mixed = fails(tools=[strict, loose], options=OFFICIAL)
    assert mixed.message.startswith("Cannot use strict tool with non-strict tool")
    form = {"type": "regex", "regex": "a"}
    refused = fails(tools=[strict], response_format=form, options=OFFICIAL)
    assert refused.param == "response_format"
    rules = convert(tools=[strict], response_format=form).rules
    assert rules is not None and rules.tools is not None and rules.format is not None


def test_settings_for_the_events() -> None:
    converted = convert(
        tools=[function("f")],
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert converted.stream and converted.settings.include_usage
    assert not converted.settings.parallel_tool_calls
    assert convert().settings.parallel_tool_calls


def test_remembered_tools_follow_level_and_choice() -> None:
    fields: dict[str, Any] = {"tools": [function("f"), function("g")], **OFF}
    first = convert(**fields).conversation.tools
    assert convert(**fields).conversation.tools is first
    assert convert(tool_choice=function("g"), **fields).conversation.tools == first[1:]
    assert convert(tool_choice="none", **fields).conversation.tools == ()
    large = function("f", description="d" * 300_000)
    assert convert(tools=[large]).conversation.tools[0].description == "d" * 300_000


# --- errors ----------------------------------------------------------------------------------


def test_null_means_absent_and_harmless_fields_are_ignored() -> None:
    names = [*REFUSED, "temperature", "stop", "thinking", "user", "tools", "stream_options"]
    assert convert(**dict.fromkeys(names)) == convert()
    harmless = {name: value for name, row in REFUSED.items() for value in row.harmless[:1]}
    assert convert(**harmless, user="u", store=True, metadata={"a": 1}, other=[1]) == convert()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    for value in (["x"], {"type": "json_object"}, 7):
        assert fails(**{name: value}).param == name
        convert(options=OFFICIAL, **{name: value})
    # true is not 1, false is not 0: JSON keeps them apart.
    for value in REFUSED[name].harmless:
        if isinstance(value, bool):
            assert fails(**{name: int(value)}).param == name


@pytest.mark.parametrize(
    "wish",
    [
        {"modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}},
        {"verbosity": "low"},
        {"web_search_options": {}},
        {"prediction": {"type": "content", "content": "x"}},
        {"service_tier": "flex", "safety_identifier": "u", "prompt_cache_key": "k"},
    ],
)
def test_wishes_are_ignored(wish: dict[str, Any]) -> None:
    assert convert(**wish) == convert()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, USER, USER]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}, USER]},
            "messages[0].prefix",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {}}, "thinking.type"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 101}, "reasoning_effort"),
        (
            {"chat_template_kwargs": {"reasoning_effort": 0}},
            "chat_template_kwargs.reasoning_effort",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10.0}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [7]}, "stop[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "logprobs_mode": "best"}, "logprobs_mode"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"tools": [function("f"), function("f")]}, "tools[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        ({"functions": [{"description": "x"}]}, "functions[0].name"),
        ({"functions": "f"}, "functions"),
        ({"response_format": {"type": "json_object"}}, "messages"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_an_error_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body = {"model": FLASH, "messages": [USER], **fields}
        convert_chat(json.dumps(body).encode(), ConvertOptions(max_messages=2))
    assert caught.value.param == param
