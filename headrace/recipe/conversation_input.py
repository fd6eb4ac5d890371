"""A conversation written by hand as JSON: the other direction of `conversation_json`.

Contract: the shape of the golden conversation cases, with the defaults and the refusals of the
official codec's own constructors; anything malformed is a ValueError that names the place. For
`headrace recipe --protocol conversation` and `headrace check recipe`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from headrace.recipe.constants import IMAGE_SPELLING, ReasoningEffort
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    FormatKind,
    ImageDetail,
    ImageSource,
    LatestReminder,
    Message,
    PromptText,
    ResponseFormat,
    SystemMessage,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)

Value = TypeVar("Value")


def conversation_from_json(value: Any) -> Conversation:
    """The conversation. Raises ValueError."""
    fields = _object(value, "conversation")
    return Conversation(
        messages=_items(fields, "messages", _message),
        thinking=_typed(fields, "thinking_mode", bool, True),
        tools=_items(fields, "tools", _tool),
        tool_choice=ToolChoice(fields.get("tool_choice", "auto")),
        reasoning_effort=_effort(fields.get("reasoning_effort")),
        response_format=_format(fields),
        task=_typed(fields, "task", str, None),
    )


def _format(fields: Mapping[str, Any]) -> ResponseFormat:
    schema, regex = fields.get("response_schema"), fields.get("response_regex")
    kind = fields.get("response_format", "text")
    if schema is not None and regex is not None:
        raise ValueError("response_schema and response_regex cannot be combined")
    if kind == "json_object":
        if schema is not None or regex is not None:
            raise ValueError(
                'response_format "json_object" cannot be combined with response_schema or '
                "response_regex"
            )
        return ResponseFormat(FormatKind.JSON_OBJECT)
    if schema is not None:
        return ResponseFormat(FormatKind.JSON_SCHEMA, schema)
    if regex is not None:
        return ResponseFormat(FormatKind.REGEX, _typed(fields, "response_regex", str, ""))
    if kind not in ("text", "json_schema", "regex"):
        raise ValueError(f"response_format: {kind!r} is not text or json_object")
    return ResponseFormat()


def _effort(value: Any) -> ReasoningEffort | int | None:
    if value is None or (type(value) is int and 1 <= value <= 100):
        return value
    return ReasoningEffort(value)


def _message(value: Any, place: str) -> Message:
    fields = _object(value, place)
    role = fields.get("role")
    content = _typed(fields, "content", str, "")
    if role == "system":
        tools = None if fields.get("tools") is None else _items(fields, "tools", _tool)
        return SystemMessage(_text(fields, content), tools)
    if role == "user":
        return UserMessage(_text(fields, content))
    if role == "assistant":
        return AssistantMessage(
            content,
            _typed(fields, "reasoning_content", str, None),
            None if fields.get("tool_calls") is None else _items(fields, "tool_calls", _call),
            _typed(fields, "prefix", bool, False),
        )
    if role == "tool":
        return ToolMessage(_text(fields, content), _typed(fields, "tool_call_id", str, None))
    if role == "latest_reminder":
        return LatestReminder(content)
    raise ValueError(
        f"{place}.role: {role!r} is not system, user, assistant, tool or latest_reminder"
    )


def _text(fields: Mapping[str, Any], content: str) -> PromptText:
    token = _typed(fields, "image_token", str, None)
    images = _items(fields, "images", _image)
    return PromptText.with_places(content, images, IMAGE_SPELLING if token is None else token)


def _image(value: Any, place: str) -> ImageSource:
    fields = _object(value, place)
    kind = fields.get("kind")
    if kind not in ("url", "data_url", "bytes"):
        raise ValueError(f"{place}.kind: {kind!r} is not url, data_url or bytes")
    data = _typed(fields, "data", str, None)
    return ImageSource(
        data_url=_typed(fields, "data_url", str, None),
        url=_typed(fields, "url", str, None),
        data=None if data is None else base64.b64decode(data, validate=True),
        detail=ImageDetail(fields.get("detail", "high")),
        path=_typed(fields, "path", str, ""),
    )


def _tool(value: Any, place: str) -> ToolDefinition:
    fields = _object(value, place)
    return ToolDefinition(
        name=_typed(fields, "name", str, ""),
        description=_typed(fields, "description", str, None),
        parameters=fields.get("parameters"),
        strict=_typed(fields, "strict", bool, None),
        defer_loading=_typed(fields, "defer_loading", bool, False),
    )


def _call(value: Any, place: str) -> ToolCall:
    fields = _object(value, place)
    return ToolCall(*(_typed(fields, key, str, "") for key in ("id", "name", "arguments")))


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object")
    return value


def _items(
    fields: Mapping[str, Any], key: str, read: Callable[[Any, str], Value]
) -> tuple[Value, ...]:
    values = fields.get(key)
    if values is None:
        return ()
    if not isinstance(values, list):
        raise ValueError(f"{key} must be a list")
    return tuple(read(value, f"{key}[{number}]") for number, value in enumerate(values))


def _typed(fields: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be of type {kind.__name__}")
    return value
