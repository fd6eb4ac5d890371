"""Level `clients`: what its events and complete responses do beyond the official ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from headrace.core.output import TokenLogprobs
from headrace.errors import EngineLost, Overloaded
from headrace.recipe.chunks import Chunk, DraftCounts, EngineFinish, Finish, Ready, Text, Tokens
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from tests.unit.recipe import golden
from tests.unit.recipe.streams import MARK, SCHEMA, body, call, data, run, stream

READY = Ready(9, 4, "fp")
CUT = f'hi<{MARK} calls>\n<{MARK} invoke name="f">\n<{MARK} parameter name="a" string="true">x'
INPUT = f'<{MARK} parameter name="input" string="true">a"b\nc</{MARK} parameter>\n'


def answer(text: str, end: EngineFinish = EngineFinish.STOP) -> list[Chunk]:
    return [READY, Text(text, 5), Finish(end)]


def both(
    protocol: str, request: Any, chunks: list[Chunk], level: Level = Level.CLIENTS
) -> tuple[list[Any], Any]:
    """Data of all events, and the complete response."""
    made = stream(protocol, request, level)
    events = data(run(made, chunks))
    return events, json.loads(made.response())


# --- Chat Completions ----------------------------------------------------------------------------


def test_usage_that_was_asked_for_has_a_chunk_of_its_own() -> None:
    request = body("chat", stream_options={"include_usage": True})
    events, _ = both("chat", request, answer("a"))
    *chunks, last = events
    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 14
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("asked", [False, None])
def test_usage_that_was_not_asked_for_rides_on_the_last_chunk(asked: bool | None) -> None:
    more = {} if asked is None else {"stream_options": {"include_usage": asked}}
    events, _ = both("chat", body("chat", **more), answer("a"))
    assert ["usage" in event for event in events] == [False, False, True]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("thinking", [False, True])
def test_usage_counts_drafts(thinking: bool) -> None:
    text = "r</think>a" if thinking else "a"
    chunks = [READY, Text(text, 5), Finish(EngineFinish.STOP, 0, DraftCounts(3, 2))]
    events, response = both("chat", body("chat", thinking=thinking), chunks)
    for usage in (events[-1]["usage"], response["usage"]):
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 3
        assert details["rejected_prediction_tokens"] == 2
    _, response = both("chat", body("chat", thinking=thinking), chunks, Level.OFFICIAL)
    assert "prediction" not in json.dumps(response)
    _, response = both("chat", body("chat", thinking=thinking), answer(text))
    assert "prediction" not in json.dumps(response)


def test_drafts_of_all_choices_are_counted_together() -> None:
    made = stream("chat", {**body("chat"), "n": 2})
    for choice, drafts in ((0, DraftCounts(3, 2)), (1, DraftCounts(1, 5))):
        for chunk in (READY, Text("a", 5), Finish(EngineFinish.STOP, 0, drafts)):
            made.push(chunk, choice)
    details = json.loads(made.response())["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 7}


def test_deltas_have_no_empty_keys() -> None:
    events, response = both("chat", body("chat", thinking=True), answer("r</think>a"))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [
        {"role": "assistant", "reasoning_content": ""},
        {"reasoning_content": "r"},
        {"content": "a"},
        {"content": ""},
    ]
    message = response["choices"][0]["message"]
    assert message["reasoning_content"] == "r" and message["content"] == "a"
    assert message["refusal"] is None and message["annotations"] == []


def test_call_cut_by_length_is_no_call_of_a_complete_chat_response() -> None:
    chunks = answer(call() + "\n" + CUT, EngineFinish.LENGTH)
    _, response = both("chat", body("chat", call=True), chunks)
    choice = response["choices"][0]
    assert choice["finish_reason"] == "length"
    assert [c["function"]["arguments"] for c in choice["message"]["tool_calls"]] == ['{"a": "x"}']
    _, response = both("chat", body("chat", call=True), answer(CUT, EngineFinish.LENGTH))
    assert "tool_calls" not in response["choices"][0]["message"]


def test_call_that_was_cut_before_its_name_takes_no_other_with_it() -> None:
    text = call() + f'\n<{MARK} calls>\n<{MARK} invoke name="g'
    for protocol in ("chat", "responses", "messages"):
        chunks = answer(text, EngineFinish.LENGTH)
        _, response = both(protocol, body(protocol, call=True), chunks)
        shown = json.dumps(response)
        assert "x" in shown and '"f"' in shown, protocol
        if protocol == "chat":
            assert len(response["choices"][0]["message"]["tool_calls"]) == 1
        elif protocol == "messages":
            assert response["content"][-1]["input"] == {"a": "x"}


def test_custom_tools_of_chat_carry_raw_input() -> None:
    request = body("chat", tools=[{"type": "custom", "custom": {"name": "c"}}])
    events, response = both("chat", request, answer(call("c", INPUT)))
    calls = [
        d["tool_calls"][0]
        for e in events
        for d in [e["choices"][0]["delta"]]
        if len(d) == 1 and "tool_calls" in d
    ]
    first, *rest = calls
    assert first["type"] == "custom" and first["custom"] == {"name": "c", "input": ""}
    assert "".join(part["custom"]["input"] for part in rest) == 'a"b\nc'
    whole = response["choices"][0]["message"]["tool_calls"][0]
    assert whole["type"] == "custom" and whole["custom"] == {"name": "c", "input": 'a"b\nc'}


def test_functions_are_answered_with_function_call() -> None:
    request = body("chat", functions=[{"name": "f", "parameters": SCHEMA}])
    events, response = both("chat", request, answer(call() + "\n" + call()))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert not any("tool_calls" in delta for delta in deltas)
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [part["name"] for part in parts if "name" in part] == ["f"]
    assert "".join(part["arguments"] for part in parts) == '{"a": "x"}'
    choice = response["choices"][0]
    assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a": "x"}'}


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@pytest.mark.parametrize(("level", "calls"), [(Level.CLIENTS, 1), (Level.OFFICIAL, 2)])
def test_client_that_takes_one_call_gets_one(protocol: str, level: Level, calls: int) -> None:
    more: dict[str, Any] = {"parallel_tool_calls": False}
    if protocol == "messages":
        more = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    two = call().replace(f"</{MARK} calls>", "") + call().partition(f"<{MARK} calls>\n")[2]
    events, response = both(protocol, body(protocol, call=True, **more), answer(two), level)
    assert json.dumps(response).count("call_0") == calls
    assert "call_01_" not in json.dumps(events) or calls == 2


@pytest.mark.parametrize("number", ["1e999", "-2.5E+400", "7" * 400 + ".5", '[1, {"b": 1e999}]'])
def test_arguments_with_numbers_beyond_floats_are_kept(number: str) -> None:
    """JSON numbers have no range; without them required arguments would be missing."""
    begin, _, rest = call().partition(f"<{MARK} parameter")
    value = f'<{MARK} parameter name="x" string="false">{number}</{MARK} parameter>\n'
    made = stream("messages", body("messages", call=True))
    run(made, answer(begin + value + f"<{MARK} parameter" + rest))
    whole = made.response().decode()
    [block] = [b for b in json.loads(whole, parse_float=str)["content"] if b["type"] == "tool_use"]
    assert block["input"]["x"] == json.loads(number, parse_float=str)
    assert f'"x": {number}' in whole


def test_choices_are_independent_and_counted_together() -> None:
    made = stream("chat", body("chat", n=2, stream_options={"include_usage": True}))
    first = run(made, answer("a"), 0)
    assert not made.finished
    last = run(made, answer("b"), 1)
    assert made.finished
    chunks = data(first + last)
    assert [c["choices"][0]["index"] for c in chunks[:-1]] == [0, 0, 0, 1, 1, 1]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 10
    choices = json.loads(made.response())["choices"]
    assert [(c["index"], c["message"]["content"]) for c in choices] == [(0, "a"), (1, "b")]


# --- all protocols -------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_answer_that_only_reasons_says_so(protocol: str) -> None:
    thinking = body(protocol, thinking=True)
    for text, expected in (("plan", True), ("plan</think>a", False)):
        events, response = both(protocol, thinking, answer(text))
        for shown in (json.dumps(events), json.dumps(response)):
            assert ('"finish_detail": "empty_after_reasoning"' in shown) is expected
    events, _ = both(protocol, thinking, answer("plan"), Level.OFFICIAL)
    assert "finish_detail" not in json.dumps(events)


def test_errors_inside_a_stream() -> None:
    for protocol in ("chat", "responses", "messages"):
        made = stream(protocol, body(protocol))
        before = len(made.push(READY)) + len(made.push(Text("hel", 1)))
        (event,) = made.fail(EngineLost("gone"))
        value = json.loads(event.data)
        if protocol == "chat":
            assert event.name is None and value["error"]["message"] == "gone"
        elif protocol == "messages":
            assert event.name == value["type"] == "error"
            assert value["error"]["message"] == "gone"
        else:
            assert event.name == value["type"] == "response.failed"
            assert value["sequence_number"] == before
            response = value["response"]
            assert response["status"] == "failed"
            assert response["error"] == {"code": "server_error", "message": "gone"}
            assert response["output"][0]["status"] == "incomplete"
            assert response["output"][0]["content"][0]["text"] == "hel"
            Response.model_validate(response)


def test_error_texts_are_always_encodable() -> None:
    for protocol in ("chat", "responses", "messages"):
        made = stream(protocol, body(protocol))
        assert json.loads(made.fail(Overloaded("bad \ud800 text"))[0].data)


# --- Messages ------------------------------------------------------------------------------------


def test_call_cut_by_length_is_no_tool_use_of_a_complete_message() -> None:
    chunks = answer(CUT, EngineFinish.LENGTH)
    events, message = both("messages", body("messages", call=True), chunks)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"] == [{"type": "text", "text": "hi"}]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    _, official = both("messages", body("messages", call=True), chunks, Level.OFFICIAL)
    assert official["content"][-1]["input"] == {}


def test_blocks_are_contiguous_and_signed() -> None:
    text = "r</think>a" + call() + "after"
    events, message = both("messages", body("messages", thinking=True, call=True), answer(text))
    kinds = ["thinking", "text", "tool_use", "text"]
    assert [block["type"] for block in message["content"]] == kinds
    starts = [e["index"] for e in events if e["type"] == "content_block_start"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]
    signatures = [
        e["delta"]["signature"] for e in events if e.get("delta", {}).get("signature") is not None
    ]
    assert signatures == ["r"] == [message["content"][0]["signature"]]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 4
    assert events[-2]["usage"]["output_tokens"] == 5


def test_signature_can_be_given() -> None:
    made = stream("messages", body("messages", thinking=True), signature="S")
    assert b'"signature":"S"' in b"".join(e.data for e in run(made, answer("r</think>a")))


# --- Responses -----------------------------------------------------------------------------------


def test_call_cut_by_length_is_incomplete() -> None:
    chunks = answer(CUT, EngineFinish.LENGTH)
    events, response = both("responses", body("responses", call=True), chunks)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


def test_custom_tools_of_any_name_carry_raw_input() -> None:
    request = body("responses", tools=[{"type": "custom", "name": "shell"}])
    events, response = both("responses", request, answer(call("shell", INPUT)))
    kind = "response.custom_tool_call_input"
    deltas = "".join(e["delta"] for e in events if e["type"] == f"{kind}.delta")
    done = [e["input"] for e in events if e["type"] == f"{kind}.done"]
    item = response["output"][-1]
    assert (item["type"], item["name"]) == ("custom_tool_call", "shell")
    assert deltas == done[0] == item["input"] == 'a"b\nc'


def test_echo_says_what_sampling_uses() -> None:
    request = body("responses", thinking=True, temperature=0.5)
    echoed = json.loads(stream("responses", request).response())["temperature"]
    official = json.loads(stream("responses", request, Level.OFFICIAL).response())
    assert official["temperature"] == 0.5
    converted = convert("responses", json.dumps(request).encode(), ConvertOptions())
    assert echoed == converted.inference.temperature


def test_usage_has_the_fields_that_the_sdk_requires() -> None:
    _, response = both("responses", body("responses"), answer("a"))
    details = response["usage"]["input_tokens_details"]
    assert details == {"cached_tokens": 4, "cache_write_tokens": 0}
    Response.model_validate(response)


def test_complete_chat_messages_have_the_fields_that_the_sdk_requires() -> None:
    for level, expected in (
        (Level.CLIENTS, {"refusal": None, "annotations": []}),
        (Level.OFFICIAL, {}),
    ):
        answer = stream("chat", body("chat"), level)
        run(answer, [Text("Hi"), Finish()])
        message = json.loads(answer.response())["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Hi", **expected}


def test_log_probabilities_keep_their_precision() -> None:
    (hello,) = golden.real_tokenizer().encode("hello")
    for level, expected in ((Level.CLIENTS, -0.123456789012), (Level.OFFICIAL, -0.12345679)):
        made = stream("chat", body("chat", logprobs=True), level, ids=True)
        run(made, [READY, Tokens([hello], [TokenLogprobs(-0.123456789012)]), Finish()])
        logprobs = json.loads(made.response())["choices"][0]["logprobs"]
        assert logprobs["content"][0]["logprob"] == expected
