"""Plain JSON forms of conversations and options, in the shape of the golden cases.

For people (`headrace recipe render --json`) and for comparison (`headrace check recipe`); nothing
is read back from them.
"""

from __future__ import annotations

import base64
from typing import Any

from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    FormatKind,
    ImageSource,
    Message,
    PromptText,
    SystemMessage,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.converted import InferenceOptions, ParsingOptions


def conversation_to_json(conversation: Conversation, image_token: str) -> dict[str, Any]:
    """A conversation; `image_token` stands at the places of images."""
    form = conversation.response_format
    effort = conversation.reasoning_effort
    shown = {
        "thinking_mode": conversation.thinking,
        "reasoning_effort": effort if effort is None or isinstance(effort, int) else effort.value,
        "tool_choice": conversation.tool_choice.value,
        "tools": [tool_to_json(tool) for tool in conversation.tools],
        "response_format": form.kind.value,
        "response_schema": form.value if form.kind is FormatKind.JSON_SCHEMA else None,
        "response_regex": form.value if form.kind is FormatKind.REGEX else None,
        "messages": [message_to_json(entry, image_token) for entry in conversation.messages],
    }
    if conversation.task is not None:
        shown["task"] = conversation.task
    return shown


def tool_to_json(tool: ToolDefinition) -> dict[str, Any]:
    """A tool definition."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }


def message_to_json(message: Message, image_token: str) -> dict[str, Any]:
    """A message of any role."""
    match message:
        case SystemMessage(content, tools):
            shown_tools = None if tools is None else [tool_to_json(tool) for tool in tools]
            return {"role": "system", **_content(content, image_token), "tools": shown_tools}
        case UserMessage(content):
            return {"role": "user", **_content(content, image_token)}
        case AssistantMessage(content, reasoning, calls, prefix):
            return {
                "role": "assistant",
                "content": content,
                "reasoning_content": reasoning,
                "tool_calls": None
                if calls is None
                else [
                    {"id": call.id, "name": call.name, "arguments": call.arguments}
                    for call in calls
                ],
                "prefix": prefix,
            }
        case ToolMessage(content, call_id):
            return {"role": "tool", **_content(content, image_token), "tool_call_id": call_id}
    return {"role": "latest_reminder", "content": message.content}


def inference_to_json(inference: InferenceOptions) -> dict[str, Any]:
    """Sampling; `n` and `extra` only when they say something, floats to 6 digits."""
    constraint = inference.constraint
    shown: dict[str, Any] = {
        "max_tokens": inference.max_tokens,
        "temperature": round(inference.temperature, 6),
        "top_p": round(inference.top_p, 6),
        "logprobs": inference.logprobs,
        "top_logprobs": inference.top_logprobs,
        "seed": inference.seed,
        "output_constraint": None
        if constraint is None
        else {"kind": constraint.kind.value, "schema": constraint.schema},
    }
    if inference.n != 1:
        shown["n"] = inference.n
    if inference.extra:
        shown["extra"] = dict(inference.extra)
    return shown


def parsing_to_json(parsing: ParsingOptions) -> dict[str, Any]:
    """How the answer is read."""
    stage = parsing.thinking_stage
    shown: dict[str, Any] = {
        "parse_tool_calls": parsing.parse_tool_calls,
        "starts_in_tool_calls": parsing.starts_in_tool_calls,
        "parse_json_output": parsing.parse_json,
        "thinking_initial_stage": None if stage is None else stage.value,
        "stop_sequences": list(parsing.stops),
    }
    if parsing.suppress_markup:
        shown["suppress_markup"] = True
    return shown


def _content(content: PromptText, image_token: str) -> dict[str, Any]:
    return {
        "content": content.shown(image_token),
        "images": [image_to_json(image) for image in content.images],
    }


def image_to_json(image: ImageSource) -> dict[str, Any]:
    """A source of an image; bytes as base64."""
    shown: dict[str, Any] = {"detail": image.detail.value, "path": image.path}
    if image.data_url is not None:
        return {"kind": "data_url", **shown, "data_url": image.data_url}
    if image.url is not None:
        return {"kind": "url", **shown, "url": image.url}
    data = base64.b64encode(image.data or b"").decode()
    return {"kind": "bytes", **shown, "data": data}
