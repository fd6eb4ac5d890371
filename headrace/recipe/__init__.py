"""The token codec: protocol requests -> conversation -> prompt ids, output ids -> text and events.

A library of its own: importing it loads neither torch nor the engine. Every step is pure except
for the wall clock in `created` of events. `serve` and `LLM` use it; it uses only `core`, `errors`.
"""

from __future__ import annotations

from headrace.recipe.binding import ConfigTokenIds, bind
from headrace.recipe.codec import ChatCodec
from headrace.recipe.constants import ReasoningEffort, SpecialTokens
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    LatestReminder,
    OutputStage,
    SystemMessage,
    UserMessage,
)
from headrace.recipe.parser import OutputDelta, OutputParser
from headrace.recipe.render.prompt import RenderedPrompt, Segment
from headrace.recipe.render.v41 import render
from headrace.recipe.tokenizer import Tokenizer

__all__ = [
    "AssistantMessage",
    "ChatCodec",
    "ConfigTokenIds",
    "Conversation",
    "LatestReminder",
    "OutputDelta",
    "OutputParser",
    "OutputStage",
    "ReasoningEffort",
    "RenderedPrompt",
    "Segment",
    "SpecialTokens",
    "SystemMessage",
    "Tokenizer",
    "UserMessage",
    "bind",
    "render",
]
