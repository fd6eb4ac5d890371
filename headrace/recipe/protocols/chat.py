"""Chat Completions request -> `ConvertedRequest`.

Contract: `convert_chat` takes the body and raises InvalidBody (it is no such request) or
InvalidRequest (what it asks for cannot be); the checks run in the order of the official codec
(spec recipe 7). Level `clients` takes more, see `chat_wire.py`. Called by the server, the command
line and the golden checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.errors import InvalidRequest
from headrace.recipe.constants import ReasoningEffort
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    FormatKind,
    Message,
    ResponseFormat,
    ToolChoice,
    ToolMessage,
)
from headrace.recipe.converted import (
    ConvertedRequest,
    InferenceOptions,
    ParsingOptions,
    Protocol,
    ThinkingStage,
)
from headrace.recipe.grammar.rules import (
    GUIDED_FIELDS,
    AnswerRules,
    FormatRule,
    answer_rules,
    guided_rule,
    json_object_rule,
    regex_rule,
    schema_rule,
)
from headrace.recipe.options import ConvertOptions, MissingReasoning, ModelVersion
from headrace.recipe.protocols.chat_messages import read_messages
from headrace.recipe.protocols.chat_refused import refuse_unsupported
from headrace.recipe.protocols.chat_sampling import chat_sampling, check_numbers, extra_sampling
from headrace.recipe.protocols.chat_settings import ChatSettings
from headrace.recipe.protocols.chat_tools import (
    DeclaredTools,
    read_choice,
    read_tools,
    settle,
)
from headrace.recipe.protocols.chat_wire import (
    ClientRequest,
    Format,
    JsonObjectFormat,
    JsonSchemaFormat,
    OfficialRequest,
    RegexFormat,
)
from headrace.recipe.protocols.json_body import decode_body, read_json
from headrace.recipe.protocols.models import resolve_model
from headrace.recipe.protocols.sampling import check_stops
from headrace.recipe.protocols.schema import check_response_schema, has_definitions
from headrace.recipe.protocols.thinking import resolve_thinking, settle_reasoning
from headrace.recipe.protocols.tools import (
    SettledTools,
    check_choice,
    check_strict_mixing,
    check_tool_name,
    output_constraint,
)

PREFIX_NOT_LAST = (
    "Invalid completion message: prefix set true with message which is not final message or "
    "message role is not assistant"
)
_MISSING_REASONING = "The `reasoning_content` in the thinking mode must be passed back to the API."
# Members of an enumeration are slow to look up before Python 3.12.
_CHAT = Protocol.CHAT
_AUTO, _NONE, _REQUIRED = ToolChoice.AUTO, ToolChoice.NONE, ToolChoice.REQUIRED
_REASONING_START = ThinkingStage.REASONING_START
_PLAIN_SETTINGS = ChatSettings()
_ANY_TEXT = ResponseFormat()
_ANY_OBJECT = ResponseFormat(FormatKind.JSON_OBJECT)
_Wire = OfficialRequest | ClientRequest


def convert_chat(body: bytes | str | dict[str, Any], options: ConvertOptions) -> ConvertedRequest:
    """Body -> everything that later stages need."""
    wire = _wire(body, options)
    check_numbers(wire)
    thinking, effort = _thinking(wire, options)
    choice, allowed = read_choice(wire)
    declared = read_tools(wire, options.model_versions.get(wire.model), options.level)
    if isinstance(wire, ClientRequest):
        _check_client(wire, options)
    version = resolve_model(wire.model, options)
    if declared.bad_name is not None:
        check_tool_name(*declared.bad_name, official=options.official)
    messages = _messages(wire, version, thinking, declared, options)
    form, prefix = wire.response_format, _prefix(messages)
    if isinstance(form, JsonObjectFormat):
        _check_word(messages)
    # Only by name: golden cases of the official codec ask for auto where it is `required`.
    check_choice(choice, has_tools=bool(declared.key[0]) or not choice.name, options=options)
    settled = settle(declared, choice, allowed, thinking=thinking, options=options)
    if prefix is not None:
        _check_prefix_use(form, messages, declared)
    stops = check_stops(wire.stop)
    _check_stream(wire)
    response_format, normalised = _response_format(form, options)
    rule = None if options.official else _format_rule(wire, response_format, normalised, prefix)
    if settled.tools and options.official:
        # clients: strict-mixing. Beside other tools and any format.
        check_strict_mixing(settled.tools, has_response_format=form is not None)
    kind = settled.choice
    inference = _inference(wire, version, thinking, settled, options, response_format, normalised)
    # clients: required-while-thinking. The call comes after the reasoning, by the grammar.
    after_reasoning = kind is _REQUIRED and thinking
    settings = _settings(wire, declared)
    return ConvertedRequest(
        _CHAT,
        options.level,
        wire.model,
        version,
        Conversation(
            tuple(messages),
            thinking,
            settled.tools,
            _AUTO if after_reasoning else kind,
            effort,
            response_format,
        ),
        inference,
        ParsingOptions(
            bool(settled.tools),
            kind is _REQUIRED and not after_reasoning,
            isinstance(form, JsonObjectFormat),
            _stage(thinking, prefix),
            stops,
            # clients: no-markup
            kind is _NONE and not options.official,
        ),
        bool(wire.stream),
        settings,
        _rules(rule, settled, settings),
    )


def _wire(body: bytes | str | dict[str, Any], options: ConvertOptions) -> _Wire:
    if options.official:
        return decode_body(body, OfficialRequest)
    # clients: unread-fields. What is wrong with them is not looked for.
    return decode_body(body, ClientRequest, exact=False)


def _rules(
    rule: FormatRule | None, settled: SettledTools, settings: ChatSettings
) -> AnswerRules | None:
    required, parallel = settled.choice is _REQUIRED, settings.parallel_tool_calls
    return answer_rules(rule, settled.rules, required=required, parallel=parallel)


def _thinking(wire: _Wire, options: ConvertOptions) -> tuple[bool, ReasoningEffort | int | None]:
    type_ = None if wire.thinking is None else wire.thinking.type
    template = wire.chat_template_kwargs if isinstance(wire, ClientRequest) else None
    if template is None:
        return resolve_thinking(
            type_=type_, template=None, effort=wire.reasoning_effort, options=options
        )
    switch = template.enable_thinking if template.thinking is None else template.thinking
    if wire.reasoning_effort is not None:
        return resolve_thinking(
            type_=type_, template=switch, effort=wire.reasoning_effort, options=options
        )
    return resolve_thinking(
        type_=type_,
        template=switch,
        effort=template.reasoning_effort,
        options=options,
        effort_param="chat_template_kwargs.reasoning_effort",
    )


def _check_client(wire: ClientRequest, options: ConvertOptions) -> None:
    refuse_unsupported(wire)
    if len(wire.messages) > options.max_messages:
        raise InvalidRequest(
            f"The request has {len(wire.messages)} messages; this server takes at most "
            f"{options.max_messages}.",
            param="messages",
        )


def _messages(
    wire: _Wire,
    version: ModelVersion,
    thinking: bool,
    declared: DeclaredTools,
    options: ConvertOptions,
) -> Sequence[Message]:
    if not wire.messages:
        raise InvalidRequest("Empty input messages", param="messages")
    messages = read_messages(wire.messages, version=version, thinking=thinking, options=options)
    if options.missing_reasoning is MissingReasoning.FILL_EMPTY:
        return messages
    return settle_reasoning(
        messages,
        thinking=thinking,
        tools_declared=bool(declared.tools),
        options=options,
        message=_MISSING_REASONING,
    )


def _prefix(messages: Sequence[Message]) -> AssistantMessage | None:
    """The beginning of the answer, when the last message is one."""
    prefix = None
    for number, message in enumerate(messages):
        if message.__class__ is AssistantMessage and message.prefix:
            if number != len(messages) - 1:
                raise InvalidRequest(PREFIX_NOT_LAST, param=f"messages[{number}].prefix")
            prefix = message
    return prefix


def _check_word(messages: Sequence[Message]) -> None:
    for message in messages:
        content = message.content
        texts = (content,) if isinstance(content, str) else content.parts
        if any("json" in text.lower() for text in texts):
            return
    raise InvalidRequest(
        "Prompt must contain the word 'json' in some form to use 'response_format' of type "
        "'json_object'.",
        param="messages",
    )


def _check_prefix_use(
    form: Format | None, messages: Sequence[Message], declared: DeclaredTools
) -> None:
    if isinstance(form, JsonObjectFormat):
        raise InvalidRequest(
            "response_format json_object should not be used with prefix", param="response_format"
        )
    if declared.tools or any(isinstance(message, ToolMessage) for message in messages):
        raise InvalidRequest("Function call should not be used with prefix", param="tools")


def _check_stream(wire: _Wire) -> None:
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest(
            "stream_options should be set along with stream = true", param="stream_options"
        )


def _response_format(form: Format | None, options: ConvertOptions) -> tuple[ResponseFormat, Any]:
    """The format, and the normal form of a strict schema."""
    if form is None:
        return _ANY_TEXT, None
    if isinstance(form, JsonObjectFormat):
        return _ANY_OBJECT, None
    if isinstance(form, RegexFormat):
        return ResponseFormat(FormatKind.REGEX, form.regex), None
    if not isinstance(form, JsonSchemaFormat):
        return _ANY_TEXT, None
    schema = read_json(form.json_schema.schema)
    normalised = check_response_schema(
        schema,
        strict=bool(form.json_schema.strict),
        official=options.official,
        param="response_format.json_schema.schema",
    )
    return ResponseFormat(FormatKind.JSON_SCHEMA, schema), normalised


def _format_rule(
    wire: _Wire,
    response_format: ResponseFormat,
    normalised: Any,
    prefix: AssistantMessage | None,
) -> FormatRule | None:
    """clients: guided. The form of the answer, also by the fields that vLLM has for it."""
    rule = _given_rule(wire, response_format, normalised)
    if rule is not None and prefix is not None:
        # The form would be that of the whole answer, whose beginning is given.
        raise InvalidRequest(f"{rule.path}: cannot be used with prefix.", param=rule.path)
    return rule


def _given_rule(wire: _Wire, response_format: ResponseFormat, normalised: Any) -> FormatRule | None:
    form, rule = wire.response_format, None
    if isinstance(form, JsonObjectFormat):
        rule = json_object_rule("response_format")
    elif isinstance(form, RegexFormat):
        rule = regex_rule(form.regex, "response_format.regex")
    elif isinstance(form, JsonSchemaFormat):
        schema = response_format.value
        rule = schema_rule(
            schema,
            "response_format.json_schema.schema",
            strict=bool(form.json_schema.strict),
            close=normalised is not None and not has_definitions(schema),
        )
    if not isinstance(wire, ClientRequest):
        return rule
    fields = {name: value for name in GUIDED_FIELDS if (value := getattr(wire, name)) is not None}
    if not fields and wire.structured_outputs is None:
        return rule
    return guided_rule(fields, wire.structured_outputs, rule)


def _inference(
    wire: _Wire,
    version: ModelVersion,
    thinking: bool,
    settled: SettledTools,
    options: ConvertOptions,
    response_format: ResponseFormat,
    normalised: Any,
) -> InferenceOptions:
    inference = chat_sampling(
        wire, version=version, thinking=thinking, with_tools=bool(settled.tools), options=options
    )
    constraint = settled.constraint
    if constraint is None and response_format is not _ANY_TEXT:
        constraint = output_constraint(
            (), settled.choice, response_format, normalised_schema=normalised
        )
    extra = extra_sampling(wire, inference.max_tokens) if isinstance(wire, ClientRequest) else {}
    if constraint is None and not extra:
        return inference
    return replace(inference, constraint=constraint, extra=extra)


def _stage(thinking: bool, prefix: AssistantMessage | None) -> ThinkingStage | None:
    if not thinking:
        return None
    if prefix is None:
        return _REASONING_START
    if prefix.content:
        return ThinkingStage.CONTENT_CONTINUATION
    if prefix.reasoning_content:
        return ThinkingStage.REASONING_CONTINUATION
    return _REASONING_START


def _settings(wire: _Wire, declared: DeclaredTools) -> ChatSettings:
    include_usage = wire.stream_options is not None and bool(wire.stream_options.include_usage)
    if declared.tools or include_usage:
        return ChatSettings(
            include_usage, wire.parallel_tool_calls is not False, declared.custom, declared.legacy
        )
    return _PLAIN_SETTINGS
