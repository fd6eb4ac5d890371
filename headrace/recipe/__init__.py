"""The token codec: protocol requests -> conversation -> prompt ids, output ids -> text and events.

A library of its own: importing it loads neither torch nor the engine, and each public name is
imported when it is first used. Every step is pure except for the wall clock in `created` of events.
`serve`, `generate` and `headrace recipe` use it; it uses only `core` and `errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.recipe.answer_text import AnswerText, TextDelta
    from headrace.recipe.binding import ConfigTokenIds, bind
    from headrace.recipe.chunks import Finish, Ready, Stopped, Text, Tokens
    from headrace.recipe.codec import Codec
    from headrace.recipe.constants import ReasoningEffort, SpecialTokens
    from headrace.recipe.conversation import (
        AssistantMessage,
        Conversation,
        LatestReminder,
        PromptText,
        SystemMessage,
        ToolMessage,
        UserMessage,
    )
    from headrace.recipe.converted import ConvertedRequest, Protocol
    from headrace.recipe.options import ConvertOptions, Level, ModelVersion
    from headrace.recipe.protocols.chat import convert_chat
    from headrace.recipe.protocols.convert import convert
    from headrace.recipe.protocols.messages import convert_messages
    from headrace.recipe.protocols.responses import convert_responses
    from headrace.recipe.render import RenderedPrompt
    from headrace.recipe.stream import AnswerStream, StreamBatch
    from headrace.recipe.tokenizer import Tokenizer

_PUBLIC = {
    "AnswerStream": "stream",
    "AnswerText": "answer_text",
    "AssistantMessage": "conversation",
    "Codec": "codec",
    "ConfigTokenIds": "binding",
    "Conversation": "conversation",
    "ConvertOptions": "options",
    "ConvertedRequest": "converted",
    "Finish": "chunks",
    "LatestReminder": "conversation",
    "Level": "options",
    "ModelVersion": "options",
    "PromptText": "conversation",
    "Protocol": "converted",
    "Ready": "chunks",
    "ReasoningEffort": "constants",
    "RenderedPrompt": "render",
    "SpecialTokens": "constants",
    "Stopped": "chunks",
    "StreamBatch": "stream",
    "SystemMessage": "conversation",
    "Text": "chunks",
    "TextDelta": "answer_text",
    "Tokenizer": "tokenizer",
    "Tokens": "chunks",
    "ToolMessage": "conversation",
    "UserMessage": "conversation",
    "bind": "binding",
    "convert": "protocols.convert",
    "convert_chat": "protocols.chat",
    "convert_messages": "protocols.messages",
    "convert_responses": "protocols.responses",
}

__all__ = [
    "AnswerStream",
    "AnswerText",
    "AssistantMessage",
    "Codec",
    "ConfigTokenIds",
    "Conversation",
    "ConvertOptions",
    "ConvertedRequest",
    "Finish",
    "LatestReminder",
    "Level",
    "ModelVersion",
    "PromptText",
    "Protocol",
    "Ready",
    "ReasoningEffort",
    "RenderedPrompt",
    "SpecialTokens",
    "Stopped",
    "StreamBatch",
    "SystemMessage",
    "Text",
    "TextDelta",
    "Tokenizer",
    "Tokens",
    "ToolMessage",
    "UserMessage",
    "bind",
    "convert",
    "convert_chat",
    "convert_messages",
    "convert_responses",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headrace.recipe' has no attribute {name!r}")
    return getattr(import_module(f"headrace.recipe.{_PUBLIC[name]}"), name)
