"""Errors about schemas name the place in the field that the client sent, in all three protocols."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import ContextTooLong, HeadraceError, InvalidRequest
from headrace.recipe import convert_chat, convert_messages, convert_responses
from headrace.recipe.converted import ConvertedRequest
from headrace.recipe.options import ConvertOptions, Level
from tests.unit.recipe.grammars import tiny_codec

CONVERT: dict[str, Callable[..., ConvertedRequest]] = {
    "chat": convert_chat,
    "responses": convert_responses,
    "messages": convert_messages,
}
USER = [{"role": "user", "content": "json"}]
BASE: dict[str, dict[str, Any]] = {
    "chat": {"messages": USER},
    "responses": {"input": "json"},
    "messages": {"messages": USER, "max_tokens": 9},
}
FORM = {
    "chat": "response_format.json_schema.schema",
    "responses": "text.format.schema",
    "messages": "output_config.format.schema",
}
TOOL = {
    "chat": "tools[0].function.parameters",
    "responses": "tools[0].parameters",
    "messages": "tools[0].input_schema",
}
PROTOCOLS = tuple(CONVERT)


def form(protocol: str, schema: Any) -> dict[str, Any]:
    if protocol == "chat":
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        }
    given = {"type": "json_schema", "name": "x", "schema": schema}
    if protocol == "responses":
        return {"text": {"format": given}}
    del given["name"]
    return {"output_config": {"format": given}}


def tool(protocol: str, schema: Any, strict: bool) -> dict[str, Any]:
    fields = {"name": "f", "description": "d", "strict": strict}
    if protocol == "chat":
        return {"tools": [{"type": "function", "function": {**fields, "parameters": schema}}]}
    if protocol == "responses":
        return {"tools": [{"type": "function", **fields, "parameters": schema}]}
    return {"tools": [{**fields, "input_schema": schema}]}


def convert(protocol: str, level: Level = Level.CLIENTS, **fields: Any) -> ConvertedRequest:
    body = {"model": "DeepSeek-V4.1-Flash", **BASE[protocol], **fields}
    return CONVERT[protocol](json.dumps(body).encode(), ConvertOptions(level=level))


def refused(protocol: str, level: Level = Level.CLIENTS, **fields: Any) -> HeadraceError:
    with pytest.raises(InvalidRequest) as caught:
        convert(protocol, level, **fields)
    return caught.value


ENDLESS = {"type": "object", "required": ["m"], "properties": {"m": {"$ref": "#/$defs/n"}}}
# Wrong for every reader of schemas, and where.
INVALID: list[tuple[Any, str]] = [
    ("hello", ""),
    ('{"type": "object"}', ""),
    (5, ""),
    ([1], ""),
    ({"type": "object", "properties": "x"}, ".properties"),
    ({"type": "object", "properties": {"a": "hello"}}, ".properties.a"),
    ({"type": "object", "properties": {"a b": {"type": 3}}}, ".properties['a b'].type"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}, ".properties.a.$ref"),
    ({"type": "object", "properties": {"a": {"$ref": 5}}}, ".properties.a.$ref"),
    ({"type": "object", "properties": {"a": {"minLength": -1}}}, ".properties.a.minLength"),
    ({"type": "object", "description": 5}, ".description"),
    (
        {
            "type": "object",
            "properties": {"a": {"not": {}}, "b": {"items": {"anyOf": [{"$ref": "#/no"}]}}},
        },
        ".properties.b.items.anyOf[0].$ref",
    ),
]
# Schemas that cannot be kept.
UNFIT: list[tuple[Any, str]] = [
    (
        {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
        | {"$defs": {"n": ENDLESS}},
        ".$defs.n.properties.m.$ref",
    ),
    (
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        ".properties.a.$ref",
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}},
        ".properties.a.minimum",
    ),
    ({"type": "object", "properties": {"x": {"enum": list(range(5001))}}}, ".properties.x.enum"),
    ({"type": "object", "properties": {"x": {"enum": [1, 2**60]}}}, ".properties.x.enum[1]"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("schema", "place"), INVALID)
def test_what_is_no_schema_is_named_with_its_place(protocol: str, schema: Any, place: str) -> None:
    for error, path in (
        (refused(protocol, **form(protocol, schema)), FORM[protocol]),
        (refused(protocol, **tool(protocol, schema, False)), TOOL[protocol]),
        (refused(protocol, **tool(protocol, schema, True)), TOOL[protocol]),
    ):
        assert error.param == path + place
        assert error.message.startswith(f"{path}{place}: ")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("schema", "place"), UNFIT)
def test_what_cannot_be_kept_is_named_with_its_place(
    protocol: str, schema: Any, place: str
) -> None:
    for error, path in (
        (refused(protocol, **form(protocol, schema)), FORM[protocol]),
        (refused(protocol, **tool(protocol, schema, True)), TOOL[protocol]),
    ):
        assert error.param == path + place
        assert error.message.startswith(f"{path}{place}: ")


def test_the_official_texts_stay() -> None:
    error = refused("chat", Level.OFFICIAL, **tool("chat", {"type": "strin"}, False))
    assert (error.param, "Invalid schema for function 'f'" in error.message) == ("tools[0]", True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_long_schema_is_what_makes_a_prompt_long(protocol: str) -> None:
    values = [f"value number {number}" for number in range(5000)]
    schema = {"type": "object", "properties": {"a": {"type": "null"}, "x": {"enum": values}}}
    request = convert(protocol, **tool(protocol, schema, False))
    codec, path = tiny_codec(), f"{TOOL[protocol]}.properties.x.enum"
    with pytest.raises(ContextTooLong) as caught:
        codec.encode(request, context_limit=4096)
    assert caught.value.param == path and path in caught.value.message
    with pytest.raises(ContextTooLong) as caught:
        codec.sampling(request, len(codec.encode(request)), 4096)
    assert caught.value.param == path and path in caught.value.message


@pytest.mark.parametrize(
    ("protocol", "field"), [("chat", "messages"), ("responses", "input"), ("messages", "messages")]
)
def test_a_long_text_is_named_as_such(protocol: str, field: str) -> None:
    text = [{"role": "user", "content": "word " * 9000}]
    request = convert(protocol, **tool(protocol, {"type": "object"}, False), **{field: text})
    with pytest.raises(ContextTooLong) as caught:
        tiny_codec().encode(request, context_limit=1024)
    assert caught.value.param == field


DEMANDS: list[tuple[str, Any]] = [
    ("chat", {"type": "function", "function": {"name": "f"}}),
    ("responses", "required"),
    ("responses", {"type": "function", "name": "f"}),
    ("messages", {"type": "any"}),
    ("messages", {"type": "tool", "name": "f"}),
]


@pytest.mark.parametrize(("protocol", "choice"), DEMANDS)
@pytest.mark.parametrize("fields", [{}, {"tools": []}])
def test_a_demanded_call_needs_tools(protocol: str, choice: Any, fields: dict[str, Any]) -> None:
    error = refused(protocol, tool_choice=choice, **fields)
    assert error.param == "tool_choice"
    assert error.message.startswith("tool_choice: ")
    convert(protocol, Level.OFFICIAL, tool_choice=choice, **fields)


def test_choices_that_demand_nothing_need_no_tools() -> None:
    for protocol in PROTOCOLS:
        for name in ("auto", "none"):
            convert(protocol, tool_choice={"type": name} if protocol == "messages" else name)
    # As golden cases of the official codec have it.
    convert("chat", tool_choice="required")
