"""Anthropic Messages request -> `ConvertedRequest` (spec recipe 9 and 6).

Contract: `convert_messages` takes the JSON of a body, also of a count_tokens request, and returns
a validated request, or raises InvalidBody / InvalidRequest in the order and with the texts of the
official codec. Level `clients` accepts more (each place is marked), with the same prompt for
everything that both accept. Called by the server, the command line and `headrace check recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import (
    Conversation,
    FormatKind,
    Message,
    PromptText,
    ResponseFormat,
    SystemMessage,
    ToolChoice,
    ToolDefinition,
)
from headrace.recipe.converted import (
    ConvertedRequest,
    InferenceOptions,
    ParsingOptions,
    Protocol,
    ThinkingStage,
)
from headrace.recipe.grammar.rules import answer_rules, schema_rule
from headrace.recipe.options import ConvertOptions, ModelVersion
from headrace.recipe.protocols.attribution import is_billing_header, strip_attribution
from headrace.recipe.protocols.form_fields import refuse_form_fields
from headrace.recipe.protocols.json_body import U32, U64, check_unsigned, decode_body, read_json
from headrace.recipe.protocols.messages_blocks import HistoryReader
from headrace.recipe.protocols.messages_settings import MessagesSettings
from headrace.recipe.protocols.messages_tools import (
    declared_tools,
    offer_tools,
    settle_offer,
)
from headrace.recipe.protocols.messages_wire import (
    AnyChoice,
    ClientRequest,
    JsonFormat,
    NamedChoice,
    NoneChoice,
    OfficialRequest,
    SystemBlock,
)
from headrace.recipe.protocols.models import resolve_model
from headrace.recipe.protocols.sampling import check_stops, draft_fields, resolve_sampling
from headrace.recipe.protocols.schema import check_schema, schema_fault
from headrace.recipe.protocols.thinking import resolve_thinking, settle_reasoning
from headrace.recipe.protocols.tools import Choice, SettledTools, check_choice, output_constraint

WireRequest = OfficialRequest | ClientRequest

_TEXT = ResponseFormat()
_NULL = b"null"
_AUTO = Choice()
_MISSING_THINKING = "The `content[].thinking` in the thinking mode must be passed back to the API."


def convert_messages(
    body: bytes | str | dict[str, Any], options: ConvertOptions
) -> ConvertedRequest:
    """Body -> request. Raises InvalidBody or InvalidRequest with the name of the field."""
    wire = _wire(body, options)
    thinking, effort, budget = _thinking(wire, options)
    declared = declared_tools(wire.tools)
    version = resolve_model(wire.model, options)
    offer = offer_tools(declared, version, options)
    history = settle_reasoning(
        _messages(wire, offer.by_name, version, options),
        thinking=thinking,
        tools_declared=bool(declared),
        options=options,
        message=_MISSING_THINKING,
    )
    asked = _choice(wire, offer.dropped, options)
    check_choice(asked, has_tools=bool(declared), options=options)
    settled = settle_offer(declared, asked, version, thinking=thinking, options=options)
    kept, choice = settled.tools, settled.choice
    if offer.tools:
        history = _without_lost_tools(history, kept)
    stops = check_stops(wire.stop_sequences, "stop_sequences")
    form = _TEXT if options.official else _response_format(wire)
    rule = None
    if form is not _TEXT:
        rule = schema_rule(form.value, f"{_given_format(wire)[0]}.schema")
    required, parallel = choice is ToolChoice.REQUIRED, _parallel(wire, options)
    inference = _inference(wire, settled, version, thinking, options, form)
    if choice is ToolChoice.REQUIRED and (thinking or asked.name is None):
        # clients: required-while-thinking. Left to the grammar of the engine, also `any`;
        # the prompt stays that of auto.
        choice = ToolChoice.AUTO
    return ConvertedRequest(
        Protocol.MESSAGES,
        options.level,
        wire.model,
        version,
        Conversation(history, thinking, kept, choice, effort),
        inference,
        ParsingOptions(
            parse_tool_calls=bool(kept),
            starts_in_tool_calls=choice is ToolChoice.REQUIRED,
            thinking_stage=ThinkingStage.REASONING_START if thinking else None,
            stops=stops,
            # clients: no-markup
            suppress_markup=choice is ToolChoice.NONE and not options.official,
        ),
        bool(wire.stream),
        MessagesSettings(
            thinking,
            None,
            budget,
            parallel,
        ),
        answer_rules(rule, settled.rules, required=required, parallel=parallel),
    )


def _thinking(wire: WireRequest, options: ConvertOptions) -> tuple[bool, Any, int | None]:
    """Mode, effort and, at level `clients`, the budget of the reasoning."""
    check_unsigned(wire.max_tokens, U32, "max_tokens")
    explicit, config = wire.thinking, wire.output_config
    if explicit is not None:
        check_unsigned(explicit.budget_tokens, U64, "thinking.budget_tokens")
    thinking, effort = resolve_thinking(
        type_=None if explicit is None else explicit.type,
        template=None if options.official else _template_switch(wire),
        effort=None if config is None else config.effort,
        options=options,
        effort_param="output_config.effort",
    )
    if options.official or explicit is None or not thinking:
        return thinking, effort, None
    return thinking, effort, explicit.budget_tokens


def _template_switch(wire: WireRequest) -> bool | None:
    """clients: thinking-switches. `chat_template_kwargs.thinking` or `.enable_thinking`."""
    given = bytes(wire.chat_template_kwargs)
    if given == _NULL:
        return None
    arguments = read_json(given)
    if isinstance(arguments, dict):
        for name in ("thinking", "enable_thinking"):
            if isinstance(arguments.get(name), bool):
                return bool(arguments[name])
    return None


def _wire(body: bytes | str | dict[str, Any], options: ConvertOptions) -> WireRequest:
    if options.official:
        return decode_body(body, OfficialRequest)
    wire = decode_body(body, ClientRequest)
    refuse_form_fields(wire, "output_config.format")
    return wire


def _messages(
    wire: WireRequest,
    tools: Mapping[str, ToolDefinition],
    version: ModelVersion,
    options: ConvertOptions,
) -> list[Message]:
    if not wire.messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    if len(wire.messages) > options.max_messages and not options.official:
        # clients: max-messages
        raise InvalidRequest(
            f"The request has {len(wire.messages)} messages; this server takes at most "
            f"{options.max_messages}.",
            param="messages",
        )
    reader = HistoryReader(version, tools, options)
    messages = reader.read(wire.messages)
    if wire.system is not None:
        text = _system_text(wire.system, options)
        messages.insert(0, SystemMessage(PromptText((text,))))
    return messages


def _system_text(system: str | list[SystemBlock], options: ConvertOptions) -> str:
    if isinstance(system, str):
        return strip_attribution(system) if options.strip_attribution else system
    texts = [block.text for block in system]
    if texts and is_billing_header(texts[0]):
        del texts[0]
    if options.strip_attribution:
        stripped = [strip_attribution(text) for text in texts]
        texts = [new for new, old in zip(stripped, texts, strict=True) if new or not old]
    return "\n\n".join(texts)


def _choice(wire: WireRequest, dropped: frozenset[str], options: ConvertOptions) -> Choice:
    choice = wire.tool_choice
    if isinstance(choice, NoneChoice):
        return Choice(ToolChoice.NONE)
    if isinstance(choice, NamedChoice):
        return _AUTO if choice.name in dropped else Choice(ToolChoice.REQUIRED, choice.name)
    if isinstance(choice, AnyChoice) and not options.official:
        return Choice(ToolChoice.REQUIRED)  # clients: any-is-required
    return _AUTO


def _parallel(wire: WireRequest, options: ConvertOptions) -> bool:
    """clients: one-call. `tool_choice.disable_parallel_tool_use` counts."""
    return options.official or not getattr(wire.tool_choice, "disable_parallel_tool_use", False)


def _without_lost_tools(
    messages: Sequence[Message], kept: tuple[ToolDefinition, ...]
) -> tuple[Message, ...]:
    """System messages offer only tools that the choice has left; what is empty then goes."""
    names = {tool.name for tool in kept}
    left: list[Message] = []
    for message in messages:
        if isinstance(message, SystemMessage) and message.tools:
            tools = tuple(tool for tool in message.tools if tool.name in names)
            if not tools and message.content.parts == ("",):
                continue
            if len(tools) != len(message.tools):
                message = replace(message, tools=tools)
        left.append(message)
    return tuple(left)


# --- what the engine is asked for ---------------------------------------------------------------


def _inference(
    wire: WireRequest,
    settled: SettledTools,
    version: ModelVersion,
    thinking: bool,
    options: ConvertOptions,
    form: ResponseFormat,
) -> InferenceOptions:
    inference = resolve_sampling(
        version=version,
        thinking=thinking,
        with_tools=bool(settled.tools),
        options=options,
        temperature=wire.temperature,
        top_p=wire.top_p,
        max_tokens=wire.max_tokens,
        max_tokens_clamped=True,
    )
    constraint, extra = settled.constraint, {}
    if not options.official:
        extra = _extra(wire)
        if isinstance(wire, ClientRequest):
            extra |= draft_fields(wire.coupling, wire.speculation)
        if constraint is None:
            constraint = output_constraint((), ToolChoice.AUTO, form)
    if constraint is None and not extra:
        return inference
    return replace(inference, constraint=constraint, extra=extra)


def _response_format(wire: WireRequest) -> ResponseFormat:
    """clients: output-format. Enforced, but not written into prompts.

    The official codec ignores it, so prompts have to stay as they are.
    """
    name, given = _given_format(wire)
    if given == _NULL:
        return _TEXT
    value = read_json(given)
    try:
        schema = msgspec.convert(value, JsonFormat).schema
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name}: {error}", param=name) from error
    if check_schema(schema) is not None:
        raise schema_fault(schema, f"{name}.schema")
    return ResponseFormat(FormatKind.JSON_SCHEMA, schema)


def _given_format(wire: WireRequest) -> tuple[str, bytes]:
    """Name and value of the field that asks for a format."""
    given = _NULL if wire.output_config is None else bytes(wire.output_config.format)
    older = bytes(wire.output_format)
    if given != _NULL and older != _NULL:
        raise InvalidRequest(
            "output_config.format and output_format both ask for a form; send one of them.",
            param="output_format",
        )
    return ("output_config.format", given) if given != _NULL else ("output_format", older)


def _extra(wire: WireRequest) -> dict[str, Any]:
    """clients: sampling-fields. What the engine understands beyond the official codec."""
    given = bytes(wire.top_k)
    if given != _NULL:
        top_k = read_json(given)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not -1 <= top_k < 2**31:
            raise InvalidRequest(
                "top_k must be a positive integer, or 0 or -1 for no limit", param="top_k"
            )
        return {"top_k": top_k or -1}
    return {}
