"""The neutral form of a chat: what every protocol is mapped to and every renderer reads.

Plain frozen data, already validated: protocols (`recipe/protocols`) build it, renderers
(`recipe/render`) turn it into a prompt. Text only for now; content never carries control tokens,
whatever spellings it contains.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.recipe.constants import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_MAX_TOKENS_MAX_EFFORT,
    DEFAULT_MAX_TOKENS_THINKING,
    EFFORT_NUMBER,
    ReasoningEffort,
)


@dataclass(frozen=True, slots=True)
class SystemMessage:
    """Instructions; may stand anywhere in the conversation."""

    content: str


@dataclass(frozen=True, slots=True)
class UserMessage:
    """What the user said."""

    content: str


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An earlier answer, or with `prefix` the beginning of the one to be written."""

    content: str
    reasoning_content: str | None = None
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class LatestReminder:
    """A reminder that goes between messages under a control token of its own."""

    content: str


Message = SystemMessage | UserMessage | AssistantMessage | LatestReminder


class OutputStage(Enum):
    """Where the answer of the model begins; a continuation keeps leading newlines."""

    CONTENT = "content"
    CONTENT_CONTINUATION = "content-continuation"
    REASONING = "reasoning"
    REASONING_CONTINUATION = "reasoning-continuation"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and how the next answer should be thought about.

    reasoning_effort: a name, a number 1..100 as the prompt writes it, or None for the usual one;
    it has no effect when `thinking` is off.
    """

    messages: tuple[Message, ...]
    thinking: bool = True
    reasoning_effort: ReasoningEffort | int | None = None

    @property
    def effort_number(self) -> int:
        """The number that the prompt names, 1..100."""
        effort = self.reasoning_effort
        if isinstance(effort, ReasoningEffort):
            return EFFORT_NUMBER[effort]
        return EFFORT_NUMBER[ReasoningEffort.HIGH] if effort is None else effort

    @property
    def output_stage(self) -> OutputStage:
        """What the first generated token belongs to."""
        if not self.thinking:
            return OutputStage.CONTENT
        last = self.messages[-1] if self.messages else None
        if isinstance(last, AssistantMessage) and last.prefix:
            if last.content:
                return OutputStage.CONTENT_CONTINUATION
            if last.reasoning_content:
                return OutputStage.REASONING_CONTINUATION
        return OutputStage.REASONING

    @property
    def default_max_tokens(self) -> int:
        """Answer length in tokens when the request names none, before the context limit."""
        if not self.thinking:
            return DEFAULT_MAX_TOKENS
        if self.effort_number == EFFORT_NUMBER[ReasoningEffort.MAX]:
            return DEFAULT_MAX_TOKENS_MAX_EFFORT
        return DEFAULT_MAX_TOKENS_THINKING
