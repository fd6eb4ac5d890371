"""What went wrong in other codecs (docs/user-reports.md), at level `clients`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.recipe.chunks import EngineFinish, Finish, Ready, Text
from headrace.recipe.conversation import ToolChoice
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.options import ConvertOptions
from headrace.recipe.protocols.convert import convert
from headrace.recipe.render import render
from tests.unit.recipe.answers import block, parameter, read, read_ids
from tests.unit.recipe.answers import call as call_text
from tests.unit.recipe.golden import real_tokenizer
from tests.unit.recipe.streams import MODEL, SCHEMA, body, call, data, run, stream

FALSE = ' string="false"'
OPTIONS = ConvertOptions()


def prompt_of(protocol: str, **request: Any) -> str:
    converted = convert(protocol, json.dumps({"model": MODEL, **request}).encode(), OPTIONS)
    return render(converted.conversation, converted.version, OPTIONS.special).text


def answered(protocol: str, text: str, **request: Any) -> tuple[list[Any], Any]:
    """Data of all events, and the complete response, of an answer in single characters."""
    made = stream(protocol, body(protocol, **request))
    events = data(run(made, [Ready(9, 4), *map(Text, text), Finish()]))
    return events, json.loads(made.response())


# --- structured output ---------------------------------------------------------------------------


def test_so1_json_after_the_reasoning_is_content() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    _, response = answered("chat", 't</think>{"a":"1"}', thinking=True, response_format=schema)
    message = response["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ('{"a":"1"}', "t")


def test_so2_a_format_does_not_switch_thinking_off() -> None:
    request = body("chat", thinking=True, response_format={"type": "regex", "regex": "a"})
    converted = convert("chat", json.dumps(request).encode(), OPTIONS)
    assert converted.conversation.thinking
    assert converted.parsing.thinking_stage is ThinkingStage.REASONING_START


# --- calls ---------------------------------------------------------------------------------------


def test_co1_markup_after_a_redirection_ends_the_value() -> None:
    answer = read(block(call_text(parameter("command", "ls 2>&1"))))
    assert answer.arguments == [{"command": "ls 2>&1"}]


def test_co3_co4_types_are_those_that_were_written() -> None:
    values = [
        parameter("yes", "true", FALSE),
        parameter("text", "true"),
        parameter("count", "5", FALSE),
        parameter("config", '{"a":1}', FALSE),
    ]
    expected = {"yes": True, "text": "true", "count": 5, "config": {"a": 1}}
    assert read(block(call_text(*values))).arguments == [expected]


def test_co5_text_that_looks_like_a_marker_is_shown_at_the_end() -> None:
    assert read("1 + 1 = 2 <").content == "1 + 1 = 2 <"


def test_co7_a_cut_call_looks_complete_at_no_length() -> None:
    text = block(call_text(parameter("a", "x"), parameter("n", "5", FALSE)))
    for length in range(len(text)):
        answer = read(text[:length], finish=EngineFinish.LENGTH)
        assert answer.end is not None and answer.end.end == "length"
        assert answer.end.open_call or answer.arguments in ([], [{"a": "x", "n": 5}])


def test_co14_ids_one_by_one_give_whole_characters() -> None:
    text = "👩‍🚀世界ď"
    assert read_ids(real_tokenizer().encode(text)).content == text


def test_co18_the_prompt_decides_whether_there_is_reasoning() -> None:
    request = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    converted = convert("messages", json.dumps(request).encode(), OPTIONS)
    assert converted.parsing.thinking_stage is ThinkingStage.REASONING_START
    assert prompt_of("messages", **request).endswith("<think>")


def test_co19_a_named_call_begins_inside_of_its_block() -> None:
    request = body("chat", call=True, tool_choice={"type": "function", "function": {"name": "f"}})
    converted = convert("chat", json.dumps(request).encode(), OPTIONS)
    assert converted.conversation.tool_choice is ToolChoice.REQUIRED
    rest = call_text(parameter("a", "x"))
    answer = read(rest, ParsingOptions(parse_tool_calls=True, starts_in_tool_calls=True))
    assert (answer.content, answer.calls) == ("", [["f", '{"a": "x"}']])


# --- protocols -----------------------------------------------------------------------------------


def test_ap1_codex_gets_every_event_of_a_message() -> None:
    events, _ = answered("responses", "hi")
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_ap7_usage_of_messages_says_what_came_from_the_cache() -> None:
    events, _ = answered("messages", "hi")
    for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert usage["cache_read_input_tokens"] == 4
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] == 5


def test_ap9_every_delta_of_a_call_has_its_index() -> None:
    events, _ = answered("chat", call() + call("f"), call=True)
    deltas = [
        delta
        for event in events
        for choice in event["choices"]
        for delta in choice["delta"].get("tool_calls", ())
    ]
    assert {delta["index"] for delta in deltas} == {0, 1}
    assert len([delta for delta in deltas if "id" in delta]) == 2
    assert all(
        ("id" in delta) == ("type" in delta) == ("name" in delta["function"]) for delta in deltas
    )


def test_ap11_ap15_the_protocols_give_one_prompt() -> None:
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    asked = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
    chat = prompt_of(
        "chat",
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "t", "reasoning_content": "r", "tool_calls": [asked]},
            {"role": "tool", "tool_call_id": "c", "content": "o"},
        ],
        tools=[{"type": "function", "function": function}],
    )
    responses = prompt_of(
        "responses",
        instructions="s",
        input=[
            {"role": "user", "content": "u"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "x"}'},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        tools=[{"type": "function", **function}],
    )
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "x"}}
    thought = {"type": "thinking", "thinking": "r", "signature": "?"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "o"}
    messages = prompt_of(
        "messages",
        system="s",
        messages=[
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "t"}, used]},
            {"role": "user", "content": [result]},
        ],
        tools=[{"name": "f", "description": "d", "input_schema": SCHEMA}],
    )
    assert "<think>r</think>t\n\n<｜DSML｜ calls>" in chat
    assert chat == responses == messages


@pytest.mark.parametrize("role", ["system", "developer"])
def test_ap13_later_instructions_stay_where_they_are(role: str) -> None:
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": role, "content": "c"},
        {"role": "user", "content": "d"},
    ]
    expected = "<｜System｜>c<｜User｜>d<｜Assistant｜><think>"
    assert prompt_of("chat", messages=history).endswith(expected)
    assert prompt_of("responses", input=history).endswith(expected)
    if role == "system":
        assert prompt_of("messages", messages=history, max_tokens=9).endswith(expected)


def test_ap22_what_codex_sends_is_no_error() -> None:
    plain = prompt_of("responses", input="hi")
    more = {
        "tools": [],
        "tool_choice": "auto",
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "store": False,
        "parallel_tool_calls": False,
    }
    assert prompt_of("responses", input="hi", **more) == plain


def test_ap24_stop_strings_leave_the_reasoning_alone() -> None:
    parsing = ParsingOptions(thinking_stage=ThinkingStage.REASONING_START, stops=("STOP",))
    answer = read("a STOP b</think>c STOP d", parsing)
    assert (answer.reasoning, answer.content) == ("a STOP b", "c ")
