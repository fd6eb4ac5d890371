"""Structured output over HTTP with the embedded model and the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema_rs
import openai
import pytest

import headrace
from tests.server.test_end_to_end import Served

MODEL = Path(headrace.__file__).parent / "assets" / "tiny"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "degrees": {"type": "integer", "minimum": -20, "maximum": 40},
        "sky": {"enum": ["clear", "cloudy"]},
    },
    "required": ["city", "degrees", "sky"],
    "additionalProperties": False,
}
VALID = jsonschema_rs.validator_for(SCHEMA).is_valid
USER: Any = [{"role": "user", "content": "The weather in Bern, as json."}]
FUNCTION = {"name": "report", "description": "Report the weather.", "parameters": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": {**FUNCTION, "strict": True}}
OFF: Any = {"thinking": {"type": "disabled"}}
ON: Any = {"thinking": {"type": "enabled"}}
NAMED = {"type": "function", "function": {"name": "report"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(MODEL, tmp_path_factory.mktemp("log") / "log")
    yield server
    server.process.kill()
    server.process.wait(10)


@pytest.fixture
def chat(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def checked(text: str | None) -> Any:
    value = json.loads(text or "")
    assert VALID(value), text
    return value


@pytest.mark.parametrize("thinking", [OFF, ON])
def test_a_schema_by_chat(chat: openai.OpenAI, thinking: Any) -> None:
    """SO-1, SO-2: the JSON is the content, and thinking stays what it was."""
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
    }
    choice = chat.chat.completions.create(
        model="tiny",
        messages=USER,
        response_format=form,
        seed=1,
        max_completion_tokens=120,
        extra_body=thinking,
    ).choices[0]
    if choice.finish_reason == "stop":
        checked(choice.message.content)
    else:
        assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [CHAT_TOOL], "tool_choice": "required"},
        {"tools": [CHAT_TOOL], "tool_choice": NAMED},
        {"tools": [CHAT_TOOL], "response_format": {"type": "json_object"}},
        {"tools": [CHAT_TOOL]},
    ],
)
def test_reasoning_does_not_end_an_answer_that_is_bound(
    chat: openai.OpenAI, fields: dict[str, Any]
) -> None:
    """A model that wants nothing but EOS: it may end where calls may come, not where one has to."""
    choice = chat.chat.completions.create(
        model="tiny",
        messages=USER,
        max_completion_tokens=12,
        logit_bias={"1": 100},
        extra_body=ON,
        **fields,
    ).choices[0]
    free = fields.keys() == {"tools"}
    assert choice.finish_reason == ("stop" if free else "length")


def test_a_streamed_answer_is_the_same(chat: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": USER,
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}},
        "seed": 5,
        "max_completion_tokens": 200,
        "extra_body": OFF,
    }
    whole = chat.chat.completions.create(**fields).choices[0].message.content
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in chat.chat.completions.create(stream=True, **fields)
        if chunk.choices
    ]
    assert "".join(parts) == whole
    checked(whole)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_choice": ["maybe", "never"]}, {"maybe", "never"}),
        ({"guided_regex": "[ab]{3}c"}, {f"{a}{b}{c}c" for a in "ab" for b in "ab" for c in "ab"}),
        ({"guided_grammar": 'root ::= "x" ("y" | "z")'}, {"xy", "xz"}),
        ({"guided_grammar": 'start: "q" start? "r"'}, None),
        ({"structured_outputs": {"choice": ["one"]}}, {"one"}),
    ],
)
def test_forms_of_other_servers(
    chat: openai.OpenAI, fields: dict[str, Any], expected: set[str] | None
) -> None:
    answer = chat.chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=60, seed=3, extra_body={**OFF, **fields}
    )
    choice = answer.choices[0]
    content = choice.message.content or ""
    if expected is not None:
        assert choice.finish_reason == "stop" and content in expected
    elif choice.finish_reason == "stop":
        assert content and content.count("q") == content.count("r")


@pytest.mark.parametrize(("choice", "thinking"), [("required", OFF), (NAMED, OFF), (NAMED, ON)])
def test_a_demanded_call_by_chat(chat: openai.OpenAI, choice: Any, thinking: Any) -> None:
    """SO-5: also while thinking."""
    answer = chat.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=[CHAT_TOOL],
        tool_choice=choice,
        seed=1,
        max_completion_tokens=150,
        parallel_tool_calls=False,
        extra_body=thinking,
    ).choices[0]
    if answer.finish_reason == "length":
        return
    assert answer.finish_reason == "tool_calls", answer
    [call] = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "report"
    checked(call.function.arguments)


def test_responses(chat: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}
    answer = chat.responses.create(
        model="tiny",
        input="The weather in Bern, as json.",
        text=form,
        max_output_tokens=300,
        extra_body=OFF,
    )
    assert answer.status == "completed"
    checked(answer.output_text)
    tool: Any = {"type": "function", "strict": True, **FUNCTION}
    answer = chat.responses.create(
        model="tiny",
        input="The weather in Bern.",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
        extra_body=OFF,
    )
    [item] = answer.output
    assert item.type == "function_call" and item.name == "report"
    checked(item.arguments)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "report"}])
def test_messages(claude: anthropic.Anthropic, choice: Any) -> None:
    tool: Any = {"name": "report", "description": "Report.", "input_schema": SCHEMA}
    answer = claude.messages.create(
        model="tiny",
        max_tokens=300,
        messages=USER,
        tools=[tool],
        tool_choice={**choice, "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
    )
    assert answer.stop_reason == "tool_use"
    [block] = [entry for entry in answer.content if entry.type == "tool_use"]
    assert VALID(block.input)


def test_a_schema_by_messages(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model="tiny",
        max_tokens=300,
        messages=USER,
        thinking={"type": "disabled"},
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    )
    assert answer.stop_reason == "end_turn"
    [block] = answer.content
    assert block.type == "text"
    checked(block.text)


NESTED: Any = {"type": "integer"}
for _ in range(70):
    NESTED = {"type": "array", "items": NESTED}
BAD: list[tuple[Any, str]] = [
    ({"type": "string", "pattern": "(a+)+(?=b)"}, ".pattern"),
    ({"items": {"type": "string", "pattern": "(a{1,1000}){1,1000}"}}, ".items.pattern"),
    (NESTED, ""),
    ({"enum": ["x" * 600_000]}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
    ({"type": "integer", "minimum": 2, "maximum": 1}, ".minimum"),
    ({"type": "object", "properties": {"a": {"not": {}}}}, ".properties.a.not"),
]


@pytest.mark.parametrize(("schema", "path"), BAD)
def test_bad_schemas_are_a_400_with_their_path(served: Served, schema: Any, path: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = served.chat(response_format=form)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    root = "response_format.json_schema.schema"
    assert error["param"].startswith(root) and error["param"].endswith(path)
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize("choice", ["required", "auto", {"name": "f"}])
@pytest.mark.parametrize("stream", [False, True])
def test_strict_tools_that_nothing_can_call_are_a_400(
    served: Served, choice: Any, stream: bool
) -> None:
    """Before anything is generated, with the tool and the parameter."""
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^abcde$", "maxLength": 3}},
        "required": ["a"],
        "additionalProperties": False,
    }
    function = {"name": "f", "strict": True, "parameters": parameters}
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    tools = [{"type": "function", "function": function}]
    response = served.chat(tools=tools, tool_choice=choice, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_grammar", "tools")
    assert "f.a: no text meets a pattern together with" in error["message"]


def test_unknown_keywords_of_strict_schemas_are_a_400(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLen": 3}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    error = served.chat(response_format=form).json()["error"]
    assert error["param"] == "response_format.json_schema.schema.properties.a.maxLen"
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    error = served.chat(tools=tools).json()["error"]
    assert error["param"] == "tools[0].function.parameters.properties.a.maxLen"


def test_what_only_the_compiler_sees_is_a_400_with_its_field(served: Served) -> None:
    schema = {"type": "string", "pattern": "^a{5}$", "maxLength": 3}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        response = served.chat(response_format=form, stream=stream)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (
            "invalid_grammar",
            "response_format.json_schema.schema",
        )
    lark = served.chat(guided_grammar="start: nothing_here")
    assert (lark.status_code, lark.json()["error"]["param"]) == (400, "guided_grammar")
    # Others are not disturbed.
    assert served.chat(max_tokens=3).status_code == httpx.codes.OK


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes", "no"]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "w", "schema": SCHEMA},
            }
        },
        {"guided_grammar": 'start: "a" start | "b"'},
        {"tools": [CHAT_TOOL], "tool_choice": NAMED},
    ],
)
def test_ids_that_leave_nothing_of_a_form_are_a_400(
    served: Served, fields: dict[str, Any], n: int, stream: bool
) -> None:
    before = failures(served)
    response = served.chat(allowed_token_ids=[1], n=n, stream=stream, **OFF, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request_error", "allowed_token_ids")
    assert error["message"].startswith("allowed_token_ids excludes every token")
    assert failures(served) == before
    assert served.chat(max_tokens=3).status_code == httpx.codes.OK


def failures(served: Served) -> float:
    """Failed requests by the engine's own count."""
    text = httpx.get(f"{served.url}/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("headrace_engine_failed_total")]
    return float(line.split()[1])
