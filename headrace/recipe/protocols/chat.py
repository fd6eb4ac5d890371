"""Chat Completions request -> conversation and sampling.

Contract: `parse_chat` takes the JSON bytes of a body and returns a fully validated `ChatRequest`,
or raises InvalidRequest whose `param` is the offending field. A field that asks for something this
version cannot do is refused (`protocols/chat_refused.py`), never ignored; fields that change
nothing in the answer are ignored. Called by `serve/routes/chat.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.core.sampling import SamplingParams
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.recipe.constants import EFFORT_BY_NAME, ReasoningEffort
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    LatestReminder,
    Message,
    SystemMessage,
    UserMessage,
)
from headrace.recipe.protocols.chat_refused import refuse_unsupported
from headrace.recipe.protocols.chat_sampling import SamplingFields, chat_sampling
from headrace.recipe.protocols.json_body import convert_body, decode_body

BILLING_HEADER = "x-anthropic-billing-header"
PREFIX_NOT_LAST = (
    "Invalid completion message: prefix set true with message which is not final message or "
    "message role is not assistant"
)


class WirePart(msgspec.Struct):
    """One part of a content list."""

    type: str
    text: str | None = None


class WireMessage(msgspec.Struct):
    """One message as clients send it; `name` and unknown fields are ignored."""

    role: str
    content: str | list[WirePart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None
    tool_calls: list[object] | None = None
    function_call: dict[str, object] | None = None


class WireThinking(msgspec.Struct):
    """`thinking`: the explicit switch; the budget is read and not used."""

    type: str
    budget_tokens: int | None = None


class WireStreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class WireTemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`chat_template_kwargs`: the spellings by which other servers switch thinking."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | int | None = None


class WireChatRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions: the fields that are used."""

    model: str
    messages: list[WireMessage]
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    thinking: WireThinking | None = None
    reasoning_effort: str | int | None = None
    chat_template_kwargs: WireTemplateOptions | None = None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the server decides: the thinking mode where the request is silent, and limits."""

    default_thinking_mode: bool = True
    max_messages: int = 4096


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated chat request; `sampling.max_tokens` is None where the request names none."""

    model: str
    conversation: Conversation
    sampling: SamplingParams
    stream: bool
    include_usage: bool


def parse_chat(body: bytes, options: ChatOptions) -> ChatRequest:
    """Body -> request. Raises InvalidRequest with the name of the field."""
    fields = decode_body(body)
    refuse_unsupported(fields)
    wire = convert_body(fields, WireChatRequest)
    if not wire.messages:
        raise InvalidRequest("messages: Empty input messages", param="messages")
    if len(wire.messages) > options.max_messages:
        raise InvalidRequest(
            f"The request has {len(wire.messages)} messages; this server takes at most "
            f"{options.max_messages}.",
            param="messages",
        )
    stream = bool(wire.stream)
    if wire.stream_options is not None and not stream:
        raise InvalidRequest(
            "stream_options should be set along with stream = true", param="stream_options"
        )
    thinking, effort = _thinking(wire, options)
    return ChatRequest(
        model=wire.model,
        conversation=Conversation(_messages(wire.messages, thinking), thinking, effort),
        sampling=chat_sampling(wire),
        stream=stream,
        include_usage=bool(wire.stream_options and wire.stream_options.include_usage),
    )


def resolve_max_tokens(
    conversation: Conversation, requested: int | None, prompt_tokens: int, context_limit: int
) -> int:
    """Answer length in tokens that fits the context; ContextTooLong says limit and length."""
    total = prompt_tokens + (requested or 0)
    if total > context_limit or prompt_tokens >= context_limit:
        raise ContextTooLong(
            f"This model's maximum context length is {context_limit} tokens. However, you "
            f"requested {total} tokens ({prompt_tokens} in the messages, {requested or 0} in the "
            "completion). Please reduce the length of the messages or completion.",
            param="messages",
        )
    return min(requested or conversation.default_max_tokens, context_limit - prompt_tokens)


def _thinking(
    wire: WireChatRequest, options: ChatOptions
) -> tuple[bool, ReasoningEffort | int | None]:
    """Precedence: `thinking` > chat_template_kwargs > effort > the server's default."""
    template = wire.chat_template_kwargs or WireTemplateOptions()
    effort, effort_param = wire.reasoning_effort, "reasoning_effort"
    if effort is None and template.reasoning_effort is not None:
        effort, effort_param = template.reasoning_effort, "chat_template_kwargs.reasoning_effort"
    known = _effort(effort, effort_param)
    switches = [
        _thinking_type(wire.thinking),
        template.thinking,
        template.enable_thinking,
        None if effort is None else effort != "none",
        options.default_thinking_mode,
    ]
    thinking = next(switch for switch in switches if switch is not None)
    return thinking, known if thinking else None


def _thinking_type(thinking: WireThinking | None) -> bool | None:
    if thinking is None:
        return None
    if thinking.budget_tokens is not None and thinking.budget_tokens < 0:
        raise InvalidRequest(
            "thinking.budget_tokens must not be negative.", param="thinking.budget_tokens"
        )
    if thinking.type in ("enabled", "adaptive"):
        return True
    if thinking.type == "disabled":
        return False
    raise InvalidRequest(
        f'thinking.type must be "enabled", "adaptive" or "disabled", got "{thinking.type}".',
        param="thinking.type",
    )


def _effort(value: str | int | None, param: str) -> ReasoningEffort | int | None:
    if value is None or value == "none":
        return None
    if isinstance(value, int):
        if 1 <= value <= 100:
            return value
        raise InvalidRequest(f"{param} as a number must be in [1, 100], got {value}.", param=param)
    effort = EFFORT_BY_NAME.get(value)
    if effort is None:
        names = ", ".join(["none", *EFFORT_BY_NAME])
        raise InvalidRequest(
            f'{param} must be one of {names} or a number 1..100, got "{value}".', param=param
        )
    return effort


def _messages(wire: list[WireMessage], thinking: bool) -> tuple[Message, ...]:
    messages: list[Message] = []
    for index, message in enumerate(wire):
        path = f"messages[{index}]"
        if message.prefix and (message.role != "assistant" or index != len(wire) - 1):
            raise InvalidRequest(PREFIX_NOT_LAST, param=f"{path}.prefix")
        if message.tool_calls is not None or message.function_call is not None:
            name = "tool_calls" if message.tool_calls is not None else "function_call"
            raise InvalidRequest(
                f"{path}.{name}: this server does not support tools yet.", param=f"{path}.{name}"
            )
        content = _content(message, path)
        match message.role:
            case "system" | "developer":
                content = _without_billing_header(content)
                if content:
                    messages.append(SystemMessage(content))
            case "user":
                messages.append(UserMessage(content))
            case "assistant":
                reasoning = message.reasoning_content
                if reasoning is None:
                    reasoning = message.reasoning
                messages.append(
                    AssistantMessage(
                        content, (reasoning or "") if thinking else None, bool(message.prefix)
                    )
                )
            case "latest_reminder":
                messages.append(LatestReminder(content))
            case "tool" | "function":
                raise InvalidRequest(
                    f"{path}.role: this server does not support tools yet, so the role "
                    f'"{message.role}" cannot be used.',
                    param=f"{path}.role",
                )
            case _:
                raise InvalidRequest(
                    f"{path}.role must be system, developer, user, assistant or latest_reminder, "
                    f'got "{message.role}".',
                    param=f"{path}.role",
                )
    return tuple(messages)


def _content(message: WireMessage, path: str) -> str:
    """Text of a message; the parts of a list are joined with a blank line."""
    content = message.content
    if content is None:
        if message.role == "assistant":
            raise InvalidRequest(
                "Invalid assistant message: content or tool_calls must be set",
                param=f"{path}.content",
            )
        raise InvalidRequest(f"{path}.content is missing.", param=f"{path}.content")
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        part_path = f"{path}.content[{number}]"
        if part.type != "text":
            raise InvalidRequest(
                f'{part_path}.type: this server takes only "text" parts, got "{part.type}".',
                param=f"{part_path}.type",
            )
        if part.text is None:
            raise InvalidRequest(f"{part_path}.text is missing.", param=f"{part_path}.text")
        texts.append(part.text)
    return "\n\n".join(texts)


def _without_billing_header(content: str) -> str:
    """Cut the attribution line that some agents put in front of their system prompt."""
    if not content.startswith(BILLING_HEADER):
        return content
    starts = [start for start in (content.find("\n"), content.find("You are")) if start >= 0]
    return content[min(starts) :].lstrip() if starts else ""
