"""Responses request -> ConvertedRequest (spec recipe 8 and the shared rules of 6).

Contract: `convert_responses` takes a JSON body and gives a checked conversation with everything
that later stages need, or raises InvalidBody (the body does not fit the protocol) or
InvalidRequest. The checks run in the order of the official codec. Called by the server's route and
the command line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET

from headrace.errors import InvalidRequest
from headrace.recipe.constants import ReasoningEffort
from headrace.recipe.conversation import (
    Conversation,
    FormatKind,
    Message,
    PromptText,
    ResponseFormat,
    SystemMessage,
    ToolChoice,
    ToolDefinition,
    UserMessage,
)
from headrace.recipe.converted import (
    ConvertedRequest,
    InferenceOptions,
    ParsingOptions,
    Protocol,
    ThinkingStage,
)
from headrace.recipe.grammar.rules import (
    FormatRule,
    answer_rules,
    json_object_rule,
    schema_rule,
)
from headrace.recipe.options import ConvertOptions, ModelVersion
from headrace.recipe.protocols.attribution import strip_attribution
from headrace.recipe.protocols.form_fields import refuse_form_fields
from headrace.recipe.protocols.json_body import read_json
from headrace.recipe.protocols.models import resolve_model
from headrace.recipe.protocols.responses_input import read_input
from headrace.recipe.protocols.responses_read import read_items, read_request
from headrace.recipe.protocols.responses_settings import ResponsesSettings
from headrace.recipe.protocols.responses_store import ResponseStore
from headrace.recipe.protocols.responses_tools import (
    ToolTable,
    choice_echo,
    read_choice,
    read_tools,
)
from headrace.recipe.protocols.responses_wire import WireResponses, WireText
from headrace.recipe.protocols.sampling import draft_fields, resolve_sampling, shortest_f32
from headrace.recipe.protocols.schema import check_response_schema, has_definitions
from headrace.recipe.protocols.thinking import resolve_thinking, settle_reasoning
from headrace.recipe.protocols.tools import (
    check_choice,
    check_strict_mixing,
    output_constraint,
    settle_tools,
    tool_rules,
)

NO_JSON_WORD = (
    "Response input messages must contain the word 'json' in some form to use 'text.format' of "
    "type 'json_object'."
)
NO_REASONING = "The `reasoning_text` in the thinking mode must be passed back to the API."
LOGPROBS_INCLUDE = "message.output_text.logprobs"
ENCRYPTED_INCLUDE = "reasoning.encrypted_content"
_THINKING_TYPES = ("enabled", "adaptive", "disabled")


def convert_responses(
    body: bytes | str | dict[str, Any],
    options: ConvertOptions,
    store: ResponseStore | None = None,
) -> ConvertedRequest:
    """A request body, converted. store: earlier answers, level `clients`."""
    wire = read_request(body, official=options.official)
    thinking, effort = _thinking(wire, options)
    version = resolve_model(wire.model, options)
    if not options.official:
        refuse_form_fields(wire, "text.format")
    earlier = () if options.official else _earlier_items(wire, store)
    table, messages = _read_messages(wire, earlier, version, options, thinking=thinking)
    choice, candidates = read_choice(wire.tool_choice, table, options)
    check_choice(choice, has_tools=bool(wire.tools or candidates), options=options)
    tools, kind = settle_tools(candidates, choice, thinking=thinking, options=options)
    format_, normalised = _response_format(wire, messages, options)
    if options.official:
        # clients: strict-mixing. Beside other tools and any format.
        check_strict_mixing(tools, has_response_format=format_.kind is not FormatKind.TEXT)
    inference = _sampling(wire, version, options, thinking=thinking, with_tools=bool(tools))
    constraint = output_constraint(tools, kind, format_, normalised_schema=normalised)
    rule = None if options.official else _format_rule(wire, format_, normalised)
    rules = tool_rules(candidates, tools, options)
    items = _items_to_store(body, wire, earlier, store)
    # clients: required-while-thinking. The grammar forces the call, behind the reasoning.
    opens_call = kind is ToolChoice.REQUIRED and not thinking
    return ConvertedRequest(
        protocol=Protocol.RESPONSES,
        level=options.level,
        model=wire.model,
        version=version,
        conversation=Conversation(
            messages=_with_kept_tools(messages, tools) if table.found else messages,
            thinking=thinking,
            tools=tools,
            tool_choice=ToolChoice.AUTO if kind is ToolChoice.REQUIRED and thinking else kind,
            reasoning_effort=effort,
            response_format=format_,
        ),
        inference=replace(inference, constraint=constraint) if constraint else inference,
        parsing=ParsingOptions(
            parse_tool_calls=bool(tools),
            starts_in_tool_calls=opens_call,
            parse_json=format_.kind is FormatKind.JSON_OBJECT,
            thinking_stage=ThinkingStage.REASONING_START if thinking else None,
            # clients: no-markup
            suppress_markup=kind is ToolChoice.NONE and not options.official,
        ),
        stream=bool(wire.stream),
        settings=_settings(wire, table, format_, options, items),
        rules=answer_rules(
            rule,
            rules,
            required=kind is ToolChoice.REQUIRED,
            parallel=wire.parallel_tool_calls is not False,
        ),
    )


def _thinking(
    wire: WireResponses, options: ConvertOptions
) -> tuple[bool, ReasoningEffort | int | None]:
    type_: str | None = None
    template: bool | None = None
    if not options.official:
        # clients: thinking-switches. Those of the other protocols, where they are well-formed.
        if isinstance(wire.thinking, dict) and wire.thinking.get("type") in _THINKING_TYPES:
            type_ = wire.thinking["type"]
        if isinstance(wire.chat_template_kwargs, dict):
            switches = map(wire.chat_template_kwargs.get, ("thinking", "enable_thinking"))
            template = next((value for value in switches if isinstance(value, bool)), None)
    return resolve_thinking(
        type_=type_,
        template=template,
        effort=None if wire.reasoning is None else wire.reasoning.effort,
        options=options,
        effort_param="reasoning.effort",
    )


# --- messages ------------------------------------------------------------------------------------


def _read_messages(
    wire: WireResponses,
    earlier: tuple[bytes, ...],
    version: ModelVersion,
    options: ConvertOptions,
    *,
    thinking: bool,
) -> tuple[ToolTable, tuple[Message, ...]]:
    """The tools, which items may have found, and the messages of earlier and new items."""
    items = read_items(earlier) if earlier else []
    first_index = -len(items)
    if isinstance(wire.input, list):
        items = [*items, *wire.input] if items else wire.input
    table = read_tools(wire.tools or (), items, first_index, version, options)
    messages = _instructions(wire, options)
    _check_input(wire, has_history=bool(earlier))
    if items:
        read_input(
            items, first_index, table, version, options, thinking=thinking, messages=messages
        )
    if isinstance(wire.input, str):
        messages.append(UserMessage(PromptText.of(wire.input)))
    if len(messages) > options.max_messages and not options.official:
        # clients: max-messages
        raise InvalidRequest(
            f"The request has {len(messages)} messages; this server takes at most "
            f"{options.max_messages}.",
            param="input",
        )
    settled = settle_reasoning(
        messages,
        thinking=thinking,
        tools_declared=bool(table.tools),
        options=options,
        message=NO_REASONING,
    )
    return table, settled


def _earlier_items(wire: WireResponses, store: ResponseStore | None) -> tuple[bytes, ...]:
    """clients: kept-history. The conversation that the request goes on with."""
    for name in ("conversation", "prompt"):
        if getattr(wire, name) is not None:
            raise InvalidRequest(
                f"{name} is not supported. Pass the whole conversation as input instead.",
                param=name,
            )
    previous = wire.previous_response_id
    if not isinstance(previous, str):
        return ()
    if store is None:
        raise InvalidRequest(
            "previous_response_id is not supported, for this server stores no responses. Pass the "
            "whole conversation as input instead.",
            param="previous_response_id",
        )
    stored = store.get(previous)
    if stored is None:
        raise InvalidRequest(
            f"Previous response with id '{previous}' not found.", param="previous_response_id"
        )
    return stored.items


def _items_to_store(
    body: bytes | str | dict[str, Any],
    wire: WireResponses,
    earlier: tuple[bytes, ...],
    store: ResponseStore | None,
) -> tuple[bytes, ...] | None:
    """All items of the conversation as JSON texts, if there is a store and the client wants it."""
    if store is None or wire.store is False:
        return None
    if isinstance(wire.input, str):
        message = {"type": "message", "role": "user", "content": wire.input}
        return (*earlier, msgspec.json.encode(message))
    if not wire.input:
        return earlier
    if isinstance(body, dict):
        return (*earlier, *map(msgspec.json.encode, body["input"]))
    raw = msgspec.json.decode(body, type=_RawInput)
    return (*earlier, *map(bytes, raw.input))


class _RawInput(msgspec.Struct):
    """The items of a request as they were written."""

    input: list[msgspec.Raw]


def _instructions(wire: WireResponses, options: ConvertOptions) -> list[Message]:
    text = wire.instructions
    if text and options.strip_attribution:
        text = strip_attribution(text)
    return [SystemMessage(PromptText.of(text))] if text else []


def _check_input(wire: WireResponses, *, has_history: bool) -> None:
    if wire.input is None and not wire.instructions and not has_history:
        raise InvalidRequest("Either input or instructions must be provided", param="input")
    if wire.input == [] and not has_history:
        raise InvalidRequest("Input items array must not be empty", param="input")


def _with_kept_tools(
    messages: tuple[Message, ...], tools: tuple[ToolDefinition, ...]
) -> tuple[Message, ...]:
    """Found tools as they are after the choice; a message whose tools are all gone is dropped."""
    kept = {tool.name: tool for tool in tools}
    result: list[Message] = []
    for message in messages:
        if isinstance(message, SystemMessage) and message.tools is not None:
            left = tuple(kept[tool.name] for tool in message.tools if tool.name in kept)
            if not left:
                continue
            message = replace(message, tools=left)
        result.append(message)
    return tuple(result)


# --- answer format and sampling ------------------------------------------------------------------


def _response_format(
    wire: WireResponses, messages: tuple[Message, ...], options: ConvertOptions
) -> tuple[ResponseFormat, Any]:
    """The format, and the normalised schema of a strict one."""
    format_ = wire.text.format if wire.text is not None else UNSET
    if format_ is UNSET or format_.type == "text":
        return ResponseFormat(), None
    if format_.type == "json_object":
        if not any(_says_json(message) for message in messages):
            raise InvalidRequest(NO_JSON_WORD, param="input")
        return ResponseFormat(FormatKind.JSON_OBJECT), None
    schema = read_json(format_.schema)
    normalised = check_response_schema(
        schema, strict=bool(format_.strict), official=options.official, param="text.format.schema"
    )
    return ResponseFormat(FormatKind.JSON_SCHEMA, schema), normalised


def _format_rule(
    wire: WireResponses, format_: ResponseFormat, normalised: Any
) -> FormatRule | None:
    given = wire.text.format if wire.text is not None else UNSET
    if given is UNSET or format_.kind is FormatKind.TEXT:
        return None
    if format_.kind is FormatKind.JSON_OBJECT:
        return json_object_rule("text.format")
    schema = format_.value
    close = normalised is not None and not has_definitions(schema)
    return schema_rule(schema, "text.format.schema", strict=bool(given.strict), close=close)


def _says_json(message: Message) -> bool:
    content = message.content
    if isinstance(content, str):
        return "json" in content.lower()
    return any("json" in part.lower() for part in content.parts)


def _sampling(
    wire: WireResponses,
    version: ModelVersion,
    options: ConvertOptions,
    *,
    thinking: bool,
    with_tools: bool,
) -> InferenceOptions:
    # clients: include-logprobs
    asked = not options.official and _includes(wire, LOGPROBS_INCLUDE)
    try:
        inference = resolve_sampling(
            version=version,
            thinking=thinking,
            with_tools=with_tools,
            options=options,
            temperature=wire.temperature,
            top_p=wire.top_p,
            max_tokens=wire.max_output_tokens,
            logprobs=wire.top_logprobs is not None or asked,
            top_logprobs=wire.top_logprobs,
        )
    except InvalidRequest as error:
        if error.param == "max_tokens":
            error.param = "max_output_tokens"
        raise
    extra = {} if options.official else draft_fields(wire.coupling, wire.speculation)
    return replace(inference, extra=extra) if extra else inference


def _includes(wire: WireResponses, name: str) -> bool:
    return isinstance(wire.include, list) and name in wire.include


# --- what the response object echoes -------------------------------------------------------------


def _settings(
    wire: WireResponses,
    table: ToolTable,
    format_: ResponseFormat,
    options: ConvertOptions,
    items: tuple[bytes, ...] | None,
) -> ResponsesSettings:
    reasoning = wire.reasoning
    more: dict[str, Any] = {}
    if reasoning is not None:
        summary = reasoning.summary or reasoning.generate_summary
        more["reasoning"] = {"effort": reasoning.effort, "summary": summary}
    if wire.text is not None:
        more["text"] = _text_echo(wire.text, format_)
    if not options.official:
        more |= _client_settings(wire, items)
    return ResponsesSettings(
        instructions=wire.instructions,
        max_output_tokens=wire.max_output_tokens,
        temperature=1.0 if wire.temperature is None else shortest_f32(wire.temperature),
        top_p=1.0 if wire.top_p is None else shortest_f32(wire.top_p),
        top_logprobs=wire.top_logprobs or 0,
        user=wire.user,
        tool_choice=choice_echo(wire.tool_choice),
        tools=tuple(table.echo),
        namespace_tools=table.pairs,
        declared_names=table.declared_pairs,
        custom_tools=frozenset(table.custom),
        tool_search=table.tool_search,
        **more,
    )


def _client_settings(wire: WireResponses, items: tuple[bytes, ...] | None) -> dict[str, Any]:
    """clients: echo. More of what was asked for."""
    more: dict[str, Any] = {"store": items is not None, "input_items": items}
    if isinstance(wire.previous_response_id, str):
        more["previous_response_id"] = wire.previous_response_id
    if isinstance(wire.metadata, dict):
        more["metadata"] = wire.metadata
    if wire.parallel_tool_calls is False:
        more["parallel_tool_calls"] = False
    if wire.truncation == "auto":
        more["truncation"] = "auto"
    if _includes(wire, ENCRYPTED_INCLUDE):
        more["wants_encrypted_reasoning"] = True
    return more


def _text_echo(text: WireText, format_: ResponseFormat) -> dict[str, Any]:
    given = text.format
    echo: dict[str, Any] = {"type": "text"}
    if given is not UNSET:
        echo["type"] = given.type
        if given.type == "json_schema":
            echo["name"] = given.name
            echo["schema"] = format_.value
            echo["description"] = given.description
            echo["strict"] = given.strict
    return {"format": echo, "verbosity": text.verbosity}
