"""Messages requests: parity at level `official`, and every difference of level `clients`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import InvalidBody, InvalidRequest
from headrace.recipe.constants import ReasoningEffort
from headrace.recipe.conversation import (
    AssistantMessage,
    FormatKind,
    SystemMessage,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.converted import ConstraintKind, ConvertedRequest, ThinkingStage
from headrace.recipe.options import (
    ConvertOptions,
    Level,
    WebSearch,
)
from headrace.recipe.protocols.messages import convert_messages

OFFICIAL = ConvertOptions(level=Level.OFFICIAL)
CLIENTS = ConvertOptions()
FLASH = "DeepSeek-V4.1-Flash"
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
OTHER_TOOL = {"name": "g", "input_schema": {"type": "object"}}


def convert(
    *messages: dict[str, Any], options: ConvertOptions = CLIENTS, **fields: Any
) -> ConvertedRequest:
    body = {"model": FLASH, "messages": list(messages or (USER,)), **fields}
    return convert_messages(json.dumps(body).encode(), options)


def fails(*messages: dict[str, Any], options: ConvertOptions = CLIENTS, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        convert(*messages, options=options, **fields)
    return caught.value.message


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def call(id_: str, name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def result(id_: str, content: Any = "done", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **fields}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def image(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


# --- history at both levels -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [OFFICIAL, CLIENTS])
def test_tool_turn_keeps_order_and_writes_spaced_arguments(options: ConvertOptions) -> None:
    converted = convert(
        USER,
        assistant(
            {"type": "thinking", "thinking": "a", "signature": "s"},
            {"type": "thinking", "thinking": "b"},
            text("one"),
            text(""),
            text("two"),
            call("t2", x=1e-05, y=1e-07, z={"k": None}),
            call("t1"),
        ),
        user(result("t1", [text("p"), text("q")], is_error=True), result("t2"), text("next")),
        options=options,
    )
    _, answer, first, second, last = converted.conversation.messages
    assert isinstance(answer, AssistantMessage)
    assert (answer.content, answer.reasoning_content) == ("one\n\n\n\ntwo", "a\n\nb")
    assert [entry.arguments for entry in answer.tool_calls or ()] == [
        '{"x": 0.00001, "y": 1e-7, "z": {"k": null}}',
        "{}",
    ]
    assert isinstance(first, ToolMessage) and first.tool_call_id == "t1"
    assert first.content.parts == ("p\n\nq",)
    assert isinstance(second, ToolMessage) and second.tool_call_id == "t2"
    assert last == UserMessage(replace(last.content, parts=("next",)))  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [OFFICIAL, CLIENTS])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [user(result("t"))],
            "unexpected `messages.0.content.0: tool_use_id` found in `tool_result` blocks: t. Each "
            "`tool_result` block must have a corresponding `tool_use` block in the previous "
            "message.",
        ),
        (
            [assistant(call("t")), user(result("t"), result("t"))],
            "messages.1.content.1: each tool_use must have a single result. Found multiple "
            "`tool_result` blocks with id: t",
        ),
        (
            [assistant(call("b"), call("a")), user(result("a"))],
            "messages.0:`tool_use` ids were found without `tool_result` blocks immediately after: "
            "b. Each `tool_use` block must have a corresponding `tool_result` block in the next "
            "message.",
        ),
        (
            [assistant(call("b"), call("a")), user(text("x"), result("a"))],
            "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: "
            "a, b. Each `tool_use` block must have a corresponding `tool_result` block in the next "
            "message.",
        ),
        ([user()], "messages.0: all messages must have non-empty content"),
        (
            [assistant(call("a"), call("a"))],
            "messages.0.content.1: `tool_use` ids must be unique",
        ),
    ],
)
def test_results_must_answer_calls(
    messages: list[dict[str, Any]], expected: str, options: ConvertOptions
) -> None:
    assert fails(*messages, options=options) == expected


@pytest.mark.parametrize("options", [OFFICIAL, CLIENTS])
def test_deferred_tools_come_with_their_reference(options: ConvertOptions) -> None:
    deferred = {**OTHER_TOOL, "defer_loading": True}
    converted = convert(
        assistant(call("t")),
        user(result("t", [{"type": "tool_reference", "tool_name": "g"}]), text("x")),
        {
            "role": "system",
            "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}],
        },
        tools=[TOOL, deferred],
        options=options,
    )
    *_, last_user, found, added = converted.conversation.messages
    assert isinstance(last_user, UserMessage)
    assert isinstance(found, SystemMessage) and [t.name for t in found.tools or ()] == ["g"]
    assert isinstance(added, SystemMessage) and [t.name for t in added.tools or ()] == ["f"]


def test_v4_has_neither_images_nor_system_turns() -> None:
    converted = convert(
        user(image(type="base64", media_type="image/png", data="@@")),
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": ""},
        model="DeepSeek-V4-Pro",
        options=OFFICIAL,
    )
    assert [message.content.parts for message in converted.conversation.messages] == [  # type: ignore[union-attr]
        ("[Unsupported Image]",),
        ("<system-reminder>\nbe brief\n</system-reminder>",),
    ]


@pytest.mark.parametrize(
    ("data", "repaired"),
    [("QQ=", "QQ=="), ("QQ===", "QQ=="), ("QUJD=", "QUJD"), ("QUI=", "QUI="), ("====", "")],
)
def test_padding_of_images_is_repaired(data: str, repaired: str) -> None:
    converted = convert(user(image(type="base64", media_type="image/jpg", data=data)))
    source = converted.conversation.messages[0].content.images[0]  # type: ignore[union-attr]
    assert source.data_url == f"data:image/jpeg;base64,{repaired}"
    assert source.path == "messages.0.content[0]"


@pytest.mark.parametrize("data", ["QQ", "QR==", "Q===", "QU JD", "-_-_", "Q=Q", "é="])
def test_malformed_base64_is_refused(data: str) -> None:
    block = image(type="base64", media_type="image/png", data=data)
    assert fails(user(text("x"), block)) == "messages.0.content[1]: base64 decode error"
    in_result = fails(assistant(call("t")), user(result("t", [block])))
    assert in_result == "messages.1.content.0.tool_result.content[0]: base64 decode error"


def test_invalid_url_is_quoted() -> None:
    url = 'a"\\\n\x7f\u200be\u0301é｜'
    assert fails(user(image(type="url", url=url))) == (
        'messages.0.content[0]: invalid url: "a\\"\\\\\\n\\u{7f}\\u{200b}e\\u{301}é｜"'
    )


def test_first_system_block_with_billing_header_is_dropped() -> None:
    header = text("X-Anthropic-Billing-Header: cc_version=2; cch=1")
    for options in (OFFICIAL, CLIENTS):
        converted = convert(system=[header, text("a"), text("b")], options=options)
        assert converted.conversation.messages[0].content.parts == ("a\n\nb",)  # type: ignore[union-attr]
    kept = convert(system=[text("a"), header], options=CLIENTS).conversation.messages[0]
    assert "cch=1" in kept.content.parts[0]  # type: ignore[union-attr]


def test_choice_of_dropped_web_search_means_auto() -> None:
    options = replace(OFFICIAL, messages_web_search=WebSearch.DROP)
    search = {"type": "web_search_20250305", "name": "web_search"}
    choice = {"type": "tool", "name": "web_search"}
    converted = convert(tools=[search, TOOL], tool_choice=choice, options=options)
    assert converted.conversation.tool_choice is ToolChoice.AUTO
    message = fails(tools=[{**search, "name": "find"}], tool_choice=choice, options=options)
    assert message.startswith("Invalid value for 'tool_call': no function named 'web_search'")
    assert fails(tools=[search]) == "tools[0]: server tools are not supported"


def test_bodies_of_a_wrong_form_fail_before_the_model_is_looked_up() -> None:
    for fields in (
        {"tools": [{"description": "no name"}]},
        {"tools": [{"name": "f", "description": 5}]},
        {"output_config": {"effort": "huge"}},
        {"max_tokens": -1},
        {"thinking": {"type": "auto"}},
    ):
        with pytest.raises(InvalidBody):
            convert(model="unknown", options=OFFICIAL, **fields)


def test_tools_that_are_sent_again_are_not_read_again() -> None:
    tools = [{**TOOL, "description": "remembered"}]
    first, second = convert(tools=tools), convert(tools=tools)
    assert first.conversation.tools[0] is second.conversation.tools[0]
    other = convert(tools=tools, options=OFFICIAL, tool_choice={"type": "none"})
    assert other.conversation.tools == ()


# --- level clients --------------------------------------------------------------------------------


def test_clients_redacted_thinking_is_dropped() -> None:
    block = {"type": "redacted_thinking", "data": "xyz"}
    converted = convert(USER, assistant(block, text("a")), USER)
    assert converted.conversation.messages[1] == AssistantMessage("a", "")
    with pytest.raises(InvalidBody):
        convert(USER, assistant(block, text("a")), options=OFFICIAL)


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_clients_any_is_required_by_grammar_with_the_prompt_of_auto(thinking: str) -> None:
    fields = {"tools": [TOOL, OTHER_TOOL], "thinking": {"type": thinking}}
    converted = convert(tool_choice={"type": "any"}, **fields)
    official = convert(tool_choice={"type": "any"}, options=OFFICIAL, **fields)
    assert converted.conversation == official.conversation
    assert converted.parsing.parse_tool_calls and not converted.parsing.starts_in_tool_calls
    assert converted.inference.constraint is not None
    assert converted.inference.constraint.kind is ConstraintKind.TOOL_CALL_REQUIRED
    assert official.inference.constraint is not None
    assert official.inference.constraint.kind is ConstraintKind.TOOL_CALL


def test_clients_named_tool_in_thinking_mode() -> None:
    choice = {"type": "tool", "name": "g"}
    converted = convert(tools=[TOOL, OTHER_TOOL], tool_choice=choice)
    assert [tool.name for tool in converted.conversation.tools] == ["g"]
    assert converted.conversation.tool_choice is ToolChoice.AUTO
    assert not converted.parsing.starts_in_tool_calls
    assert converted.parsing.thinking_stage is ThinkingStage.REASONING_START
    assert converted.inference.constraint is not None
    assert converted.inference.constraint.kind is ConstraintKind.TOOL_CALL_REQUIRED
    with pytest.raises(InvalidRequest, match="Thinking mode does not support this tool_choice"):
        convert(tools=[TOOL, OTHER_TOOL], tool_choice=choice, options=OFFICIAL)


def test_named_tool_outside_thinking_mode_opens_the_block_in_the_prompt() -> None:
    for options in (OFFICIAL, CLIENTS):
        converted = convert(
            tools=[TOOL, OTHER_TOOL],
            tool_choice={"type": "tool", "name": "g"},
            thinking={"type": "disabled"},
            options=options,
        )
        assert converted.conversation.tool_choice is ToolChoice.REQUIRED
        assert converted.parsing.starts_in_tool_calls


def test_clients_markup_is_suppressed_when_calls_are_forbidden() -> None:
    converted = convert(tools=[TOOL], tool_choice={"type": "none"})
    assert converted.parsing.suppress_markup and not converted.parsing.parse_tool_calls
    official = convert(tools=[TOOL], tool_choice={"type": "none"}, options=OFFICIAL)
    assert not official.parsing.suppress_markup


def test_clients_custom_type_is_a_client_tool() -> None:
    tool = {**TOOL, "type": "custom"}
    assert convert(tools=[tool]).conversation.tools == convert(tools=[TOOL]).conversation.tools
    assert fails(tools=[tool], options=OFFICIAL) == "tools[0]: server tools are not supported"


def test_clients_names_that_the_markup_can_carry() -> None:
    tool = {**TOOL, "name": "mcp.look up"}
    assert convert(tools=[tool]).conversation.tools[0].name == "mcp.look up"
    assert "does not match" in fails(tools=[tool], options=OFFICIAL)
    assert "does not match" in fails(tools=[{**TOOL, "name": 'a"b'}])


@pytest.mark.parametrize(
    ("type_", "name", "parameter"),
    [
        ("bash_20250124", "bash", "command"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "old_str"),
        ("text_editor_20250124", "str_replace_editor", "view_range"),
        ("computer_20250124", "computer", "coordinate"),
        ("memory_20250818", "memory", "old_path"),
    ],
)
def test_clients_anthropic_tools_are_offered(type_: str, name: str, parameter: str) -> None:
    tool = {"type": type_, "name": name, "display_width_px": 1024}
    (offered,) = convert(tools=[tool]).conversation.tools
    assert offered.name == name
    assert offered.description
    assert parameter in offered.parameters["properties"]
    assert fails(tools=[tool], options=OFFICIAL) == "tools[0]: server tools are not supported"


def test_clients_hosted_tools_are_dropped() -> None:
    hosted = {"type": "web_fetch_20250910", "name": "web_fetch"}
    converted = convert(
        USER,
        assistant(
            {"type": "server_tool_use", "id": "s", "name": "web_fetch", "input": {}},
            {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {}},
            text("found"),
        ),
        USER,
        tools=[hosted, TOOL],
        tool_choice={"type": "tool", "name": "web_fetch"},
    )
    assert [tool.name for tool in converted.conversation.tools] == ["f"]
    assert converted.conversation.tool_choice is ToolChoice.AUTO
    assert converted.conversation.messages[1] == AssistantMessage("found", "")
    assert fails(tools=[hosted], options=OFFICIAL) == "tools[0]: server tools are not supported"


def test_clients_top_k_goes_to_the_engine() -> None:
    assert convert(top_k=5).inference.extra == {"top_k": 5}
    assert convert(top_k=0).inference.extra == {"top_k": -1}
    assert convert(top_k=5, options=OFFICIAL).inference.extra == {}
    for wrong in ("5", 1.5, True, -2):
        assert fails(top_k=wrong).startswith("top_k must be")


def test_clients_temperature_counts_in_thinking_mode() -> None:
    assert convert(temperature=0, top_p=0.5).inference.temperature == 0.0
    assert convert(temperature=0, top_p=0.5).inference.top_p == 0.5
    assert convert(temperature=0, options=OFFICIAL).inference.temperature == 1.0


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_clients_output_format_constrains_without_changing_the_prompt(place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "title": "T"}}
    given = {"format": form} if place == "output_config" else form
    converted = convert(**{place: given})
    assert converted.conversation.response_format.kind is FormatKind.TEXT
    assert converted.inference.constraint is not None
    assert converted.inference.constraint.kind is ConstraintKind.JSON
    assert converted.inference.constraint.schema == '{"type":"object","title":"T"}'
    assert convert(options=OFFICIAL, **{place: given}).inference.constraint is None
    form["schema"] = {"type": 5}
    assert fails(**{place: given}).startswith(
        "output_config.format.schema.type: "
        if place == "output_config"
        else "output_format.schema.type: "
    )


def test_clients_settings() -> None:
    converted = convert(
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2048},
    )
    assert converted.settings.thinking
    assert converted.settings.thinking_budget == 2048
    assert not converted.settings.parallel_tool_calls
    official = convert(thinking={"type": "enabled", "budget_tokens": 2048}, options=OFFICIAL)
    assert official.settings.thinking_budget is None


def test_clients_effort_may_be_a_number() -> None:
    assert convert(output_config={"effort": 33}).conversation.reasoning_effort == 33
    assert convert(output_config={"effort": "max"}).conversation.reasoning_effort is (
        ReasoningEffort.MAX
    )
    with pytest.raises(InvalidBody):
        convert(output_config={"effort": 33}, options=OFFICIAL)


def test_clients_precedence_of_the_thinking_switches() -> None:
    off = {"thinking": False}
    effort = {"effort": "high"}
    assert not convert(chat_template_kwargs=off, output_config=effort).conversation.thinking
    explicit = convert(chat_template_kwargs=off, thinking={"type": "adaptive"})
    assert explicit.conversation.thinking
    assert convert(chat_template_kwargs=off, options=OFFICIAL).conversation.thinking
    assert convert(chat_template_kwargs="odd").conversation.thinking


def test_clients_text_after_calls_is_kept_in_front_of_them() -> None:
    turn = assistant(text("before"), call("t"), text("after"), text(""))
    converted = convert(USER, turn, user(result("t")))
    answer = converted.conversation.messages[1]
    assert isinstance(answer, AssistantMessage)
    assert answer.content == "before\n\nafter"
    assert fails(USER, turn, user(result("t")), options=OFFICIAL).startswith("messages.1.2: ")


def test_clients_results_may_be_spread_over_user_messages() -> None:
    messages = [assistant(call("a"), call("b")), user(result("b")), user(result("a"), text("x"))]
    converted = convert(*messages)
    kinds = [type(message) for message in converted.conversation.messages]
    assert kinds == [AssistantMessage, ToolMessage, ToolMessage, UserMessage]
    assert fails(*messages, options=OFFICIAL).startswith("messages.0:`tool_use` ids")
    assert fails(*messages[:2]).startswith("messages.0:`tool_use` ids")


def test_clients_assistant_messages_in_a_row_are_one_turn() -> None:
    messages = [
        assistant({"type": "thinking", "thinking": "r"}, text("one"), call("a")),
        {"role": "assistant", "content": "two"},
        assistant(call("b")),
        user(result("a"), result("b")),
    ]
    answer = convert(*messages).conversation.messages[0]
    assert isinstance(answer, AssistantMessage)
    assert (answer.content, answer.reasoning_content) == ("one\n\ntwo", "r")
    assert [entry.id for entry in answer.tool_calls or ()] == ["a", "b"]
    assert fails(*messages, options=OFFICIAL).startswith("messages.1: `tool_use` ids")
    twice = [messages[0], assistant(call("a"))]
    assert fails(*twice) == "messages.1.content.0: `tool_use` ids must be unique"


def test_clients_search_results_are_text() -> None:
    block = {
        "type": "search_result",
        "title": "T",
        "source": "https://x",
        "content": [text("p"), text("q")],
    }
    converted = convert(assistant(call("t")), user(result("t", [block]), block))
    for message in converted.conversation.messages[1:]:
        assert message.content.parts == ("T\nhttps://x\np\nq",)  # type: ignore[union-attr]
    with pytest.raises(InvalidBody):
        convert(user(block), options=OFFICIAL)


def test_clients_data_url_in_a_url_source() -> None:
    url = "data:image/png;base64,QUJD"
    converted = convert(user(image(type="url", url=url)))
    assert converted.conversation.messages[0].content.images[0].data_url == url  # type: ignore[union-attr]
    assert fails(user(image(type="url", url=url)), options=OFFICIAL).endswith(f'url: "{url}"')


def test_clients_unknown_block_is_named() -> None:
    with pytest.raises(InvalidBody, match="audio") as caught:
        convert(user({"type": "audio", "data": "x"}))
    assert caught.value.param == "messages[0].content[0].type"


def test_strip_attribution_removes_the_line_everywhere() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=abc;"
    options = replace(CLIENTS, strip_attribution=True)
    for system in (f"{line}\nYou are", [text("You are"), text(line)], f"You are\n{line}"):
        (first, second, _) = convert(
            {"role": "system", "content": line}, USER, system=system, options=options
        ).conversation.messages
        assert first.content.parts[0].strip() == "You are"  # type: ignore[union-attr]
        assert second == SystemMessage(replace(second.content, parts=("",)))  # type: ignore[union-attr]
    assert line in convert(system=line).conversation.messages[0].content.parts[0]  # type: ignore[union-attr]


def test_clients_number_of_messages_is_limited() -> None:
    few = replace(CLIENTS, max_messages=2)
    assert len(convert(USER, USER, options=few).conversation.messages) == 2
    assert fails(USER, USER, USER, options=few).startswith("The request has 3 messages")


def test_count_tokens_request_needs_no_limit() -> None:
    assert convert(USER, system="s", tools=[TOOL]).inference.max_tokens is None
    assert convert(max_tokens=10**6).inference.max_tokens == 393_216
