"""Tools of a request: names, schemas, choice and the constraint for the engine (spec recipe 6.3).

Contract: protocol modules turn their own tool forms into `ToolDefinition`s and call, in this
order, `check_tool_name`, `settle_tools`, `check_strict_mixing`, `output_constraint`; every error
has the text of the official codec.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import FormatKind, ResponseFormat, ToolChoice, ToolDefinition
from headrace.recipe.converted import ConstraintKind, OutputConstraint
from headrace.recipe.grammar.tool_rules import ToolRule, ToolRules, tool_rule
from headrace.recipe.json_text import compact_json
from headrace.recipe.options import ConvertOptions
from headrace.recipe.protocols.schema import (
    check_schema,
    has_definitions,
    normalise_strict,
    schema_fault,
)

MAX_NAME_BYTES = 128
_REMEMBERED_BYTES = 262_144  # longer lists of tools are read every time
_NAME = re.compile(r"[a-zA-Z0-9_-]+\Z")
# What would end the attribute of a call in the prompt, or look like its markup.
_UNSAFE_IN_NAME = re.compile(r"[\x00-\x1f\x7f\"<>｜]")


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request says about calling; a named choice has kind REQUIRED."""

    kind: ToolChoice = ToolChoice.AUTO
    name: str | None = None


@dataclass(frozen=True, slots=True)
class SettledTools:
    """Tools that are kept, the choice that holds, and the constraint of both.

    rules: level `clients`: what calls of the tools are held to.
    """

    tools: tuple[ToolDefinition, ...] = ()
    choice: ToolChoice = ToolChoice.AUTO
    constraint: OutputConstraint | None = None
    rules: ToolRules | None = None


def check_tool_name(name: str, path: str, *, official: bool = True) -> None:
    """InvalidRequest unless the name of the tool at `path` has a form that prompts can carry.

    official: only letters, digits, `_` and `-`; otherwise all that the markup of calls can carry.
    """
    if _NAME.match(name) and len(name) <= MAX_NAME_BYTES:
        return
    # clients: tool-names. Dots, blanks and the like.
    safe = bool(name) and name == name.strip() and not _UNSAFE_IN_NAME.search(name)
    if not official and safe and len(name.encode()) <= MAX_NAME_BYTES:
        return
    if not name:
        problem = (
            "empty string. Expected a string with minimum length 1, but got an empty string "
            "instead."
        )
    elif len(name.encode()) > MAX_NAME_BYTES:
        problem = (
            f"string too long. Expected a string with maximum length {MAX_NAME_BYTES}, but got a "
            f"string with length {len(name.encode())} instead."
        )
    else:
        problem = (
            "string does not match pattern. Expected a string that matches the pattern "
            "'^[a-zA-Z0-9_-]+$'."
        )
    raise InvalidRequest(f"Invalid '{path}.name': {problem}", param=f"{path}.name")


def unknown_tool(name: str, options: ConvertOptions) -> InvalidRequest:
    """A choice of a tool that is not there. clients: choice-without-tools, by the field's name."""
    field = (
        "tool_call" if options.official else "tool_choice"
    )  # the official text has no such field
    return InvalidRequest(
        f"Invalid value for '{field}': no function named '{name}' was specified in the 'tools' "
        "parameter.",
        param="tool_choice",
    )


def settle_tools(
    tools: Sequence[ToolDefinition], choice: Choice, *, thinking: bool, options: ConvertOptions
) -> tuple[tuple[ToolDefinition, ...], ToolChoice]:
    """The tools that the choice leaves, with checked schemas, and the choice that then holds."""
    if choice.kind is ToolChoice.NONE:
        return (), ToolChoice.NONE
    if not tools:
        return (), ToolChoice.AUTO
    kept = tuple(_settled(tools, options))
    kind = choice.kind
    if choice.name is not None:
        kept = tuple(tool for tool in kept if tool.name == choice.name)
        if not kept:
            raise unknown_tool(choice.name, options)
    if kind is ToolChoice.REQUIRED and thinking and options.official:
        # clients: required-while-thinking
        raise InvalidRequest("Thinking mode does not support this tool_choice", param="tool_choice")
    return kept, kind


def check_choice(choice: Choice, *, has_tools: bool, options: ConvertOptions) -> None:
    """clients: choice-without-tools. A call that has to come needs tools."""
    if choice.kind is ToolChoice.REQUIRED and not has_tools and not options.official:
        raise InvalidRequest(
            "tool_choice: a call is demanded, but the request has no tools; declare some, or use "
            "auto or none.",
            param="tool_choice",
        )


def check_strict_mixing(tools: Sequence[ToolDefinition], *, has_response_format: bool) -> None:
    """InvalidRequest when strict tools stand beside others, or beside a response format."""
    strict = sum(tool.strict is True for tool in tools)
    if not strict:
        return
    if strict != len(tools):
        raise InvalidRequest(
            "Cannot use strict tool with non-strict tool in the same request", param="tools"
        )
    if has_response_format:
        raise InvalidRequest(
            "response_format should not be used with tools", param="response_format"
        )


def tool_rules(
    declared: Sequence[ToolDefinition], kept: Sequence[ToolDefinition], options: ConvertOptions
) -> ToolRules | None:
    """What calls of the kept tools are held to: their schemas as they were declared.

    None without tools and at level `official`. Raises InvalidRequest for strict tools whose schemas
    cannot be enforced, with the path of the keyword.
    """
    if options.official or not kept:
        return None
    written = {tool.name: tool for tool in declared}
    shown = tuple((tool, written[tool.name].parameters) for tool in kept)
    key = msgspec.json.encode(
        [(tool.name, tool.strict, tool.path, tool.parameters, schema) for tool, schema in shown]
    )
    read = _tool_rules if len(key) > _REMEMBERED_BYTES else _remembered_tool_rules
    return read(key)


def _tool_rules(key: bytes) -> ToolRules:
    rules: list[ToolRule] = []
    for name, strict, path, parameters, schema in msgspec.json.decode(key):
        tool = ToolDefinition(name, None, parameters, strict, path=path)
        # The normal form of the official codec has all properties, and no others.
        close = bool(strict) and parameters != schema and not has_definitions(schema)
        rules.append(tool_rule(tool, schema, close=close))
    return ToolRules(tuple(rules))


_remembered_tool_rules = lru_cache(maxsize=64)(_tool_rules)


def output_constraint(
    tools: Sequence[ToolDefinition],
    choice: ToolChoice,
    response_format: ResponseFormat,
    *,
    normalised_schema: Any = None,
) -> OutputConstraint | None:
    """What the engine should enforce. normalised_schema: instead of the schema as written."""
    if tools and choice is not ToolChoice.NONE:
        required = choice is ToolChoice.REQUIRED
        return OutputConstraint(
            ConstraintKind.TOOL_CALL_REQUIRED if required else ConstraintKind.TOOL_CALL,
            compact_json([_described(tool) for tool in tools]),
        )
    match response_format.kind:
        case FormatKind.JSON_OBJECT:
            return OutputConstraint(ConstraintKind.JSON, "")
        case FormatKind.JSON_SCHEMA:
            schema = response_format.value if normalised_schema is None else normalised_schema
            return OutputConstraint(ConstraintKind.JSON, compact_json(schema))
        case FormatKind.REGEX:
            return OutputConstraint(ConstraintKind.REGEX, response_format.value)
    return None


def custom_function(
    name: str, description: str | None, syntax: Any, grammar: Any
) -> ToolDefinition:
    """A free-form (custom) tool as a function whose one parameter is its input.

    syntax, grammar: of its `format`; they count where they are text.
    """
    texts = [description] if description else []
    if isinstance(grammar, str):
        kind = f"{syntax} grammar" if isinstance(syntax, str) else "grammar"
        texts.append(f"The input must match this {kind}:\n{grammar}")
    parameters = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"input": {"type": "string", "description": "The raw input of the tool."}},
        "required": ["input"],
    }
    return ToolDefinition(name, "\n\n".join(texts) or None, parameters)


def _settled(tools: Sequence[ToolDefinition], options: ConvertOptions) -> list[ToolDefinition]:
    names: set[str] = set()
    settled: list[ToolDefinition] = []
    for number, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidRequest("Tool names must be unique.", param=f"tools[{number}]")
        names.add(tool.name)
        try:
            parameters = _parameters(tool, options)
        except InvalidRequest as error:
            error.param = error.param or f"tools[{number}]"
            raise
        if parameters is not tool.parameters:
            tool = replace(tool, parameters=parameters)
        settled.append(tool)
    return settled


def _parameters(tool: ToolDefinition, options: ConvertOptions) -> Any:
    schema = tool.parameters
    if tool.strict:
        try:
            return normalise_strict(schema, top="tool")
        except InvalidRequest:
            # clients: strict-schemas. What the official reader cannot take (references,
            # optional properties) stand as written.
            if options.official:
                raise
            problem = _schema_problem(schema, options)
            if problem is not None:
                raise _schema_fault(tool, problem) from None
            return schema
    if schema is None:
        return {}
    problem = _schema_problem(schema, options)
    if problem is not None:
        if not options.official and tool.path:
            raise _schema_fault(tool, problem)
        raise InvalidRequest(f"Invalid schema for function '{tool.name}': {problem}")
    return schema


def _schema_fault(tool: ToolDefinition, problem: str) -> InvalidRequest:
    """clients: schema-places. The fault by its place, else the type that is missing."""
    path = tool.path or f"tools.{tool.name}"
    if check_schema(tool.parameters) is not None:
        return schema_fault(tool.parameters, path)
    return InvalidRequest(f"{path}.type: {problem}", param=f"{path}.type")


def _schema_problem(schema: Any, options: ConvertOptions) -> str | None:
    problem = check_schema(schema)
    if problem is not None:
        return problem
    type_ = schema.get("type") if isinstance(schema, dict) else None
    if type_ == "object" or (type_ is None and isinstance(schema, dict) and not options.official):
        # clients: schema-without-type
        return None
    return f"schema must be a JSON Schema of 'type: \"object\"', got 'type: {compact_json(type_)}'."


def _described(tool: ToolDefinition) -> dict[str, Any]:
    described: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        },
    }
    if tool.defer_loading:
        described["defer_loading"] = True
    return described
