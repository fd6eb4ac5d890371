"""The neutral form of a chat: what every protocol is mapped to and every renderer reads.

Plain frozen data, already validated: protocols (`recipe/protocols`) build it, renderers
(`recipe/render`) turn it into a prompt. Content never carries control tokens, whatever spellings it
contains; the place of an image is a `PromptText` part of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.recipe.constants import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_MAX_TOKENS_MAX_EFFORT,
    DEFAULT_MAX_TOKENS_THINKING,
    EFFORT_NUMBER,
    ReasoningEffort,
)


class ImageDetail(StrEnum):
    """How many pixels of an image matter; all but `low` are equal."""

    LOW = "low"
    HIGH = "high"
    ORIGINAL = "original"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as the request names it; exactly one of data_url, url, data is set.

    path: where in the request it stands, for errors about it.
    """

    data_url: str | None = None
    url: str | None = None
    data: bytes | None = None
    detail: ImageDetail = ImageDetail.HIGH
    path: str = ""


@dataclass(frozen=True, slots=True)
class PromptText:
    """Text with places for images: parts[0], image 0, parts[1], image 1, ..., parts[-1].

    len(parts) = number of places + 1. `images` may hold more sources than there are places when a
    conversation is built by hand; the surplus is ignored by renderers.
    """

    parts: tuple[str, ...] = ("",)
    images: tuple[ImageSource, ...] = ()

    @classmethod
    def of(cls, text: str) -> PromptText:
        """Text without images."""
        return cls((text,))

    @classmethod
    def with_places(
        cls, text: str, images: tuple[ImageSource, ...], image_token: str
    ) -> PromptText:
        """The first len(images) occurrences of `image_token` become places, later ones stay text.

        Raises ValueError when `image_token` is empty.
        """
        if not image_token:
            raise ValueError("image_token must not be empty")
        return cls(tuple(text.split(image_token, len(images))), images)

    def shown(self, image_token: str) -> str:
        """The text with `image_token` at the places, for people and for comparison."""
        return self.parts[0] if len(self.parts) == 1 else image_token.join(self.parts)


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function the model may call. parameters: JSON value (a JSON schema), {} when absent.

    path: where in the request its schema stands, for errors about it.
    """

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None
    defer_loading: bool = False
    path: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history; `arguments` is JSON text as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class SystemMessage:
    """Instructions; may stand anywhere. tools: declared at this place (V4.1 renders them)."""

    content: PromptText
    tools: tuple[ToolDefinition, ...] | None = None


@dataclass(frozen=True, slots=True)
class UserMessage:
    """What the user said."""

    content: PromptText


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An earlier answer, or with `prefix` the beginning of the one to be written.

    reasoning_content: None = absent. tool_calls: None = absent, which V4 renders unlike ().
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class ToolMessage:
    """Result of a call; without an id it belongs to no call."""

    content: PromptText
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class LatestReminder:
    """A reminder that goes between messages under a control token of its own."""

    content: str


Message = SystemMessage | UserMessage | AssistantMessage | ToolMessage | LatestReminder


class ToolChoice(StrEnum):
    """Whether the answer may, must or must not call tools (a named tool acts as required)."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class FormatKind(StrEnum):
    """What the answer has to look like."""

    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """value: the JSON schema as written (JSON_SCHEMA), the pattern (REGEX), else None."""

    kind: FormatKind = FormatKind.TEXT
    value: Any = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and how the next answer should be written.

    reasoning_effort: a name, a number 1..100 as V4.1 prompts write it, or None for the usual one;
    it has no effect when `thinking` is off. task: spelling of a task token that the prompt ends
    with (`<｜title｜>`), or None.
    """

    messages: tuple[Message, ...]
    thinking: bool = True
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    reasoning_effort: ReasoningEffort | int | None = None
    response_format: ResponseFormat = ResponseFormat()
    task: str | None = None

    @property
    def renders_tools(self) -> bool:
        """Whether the prompt describes tools; then past reasoning is kept too."""
        return self.tool_choice is not ToolChoice.NONE and bool(self.tools)

    @property
    def effort_number(self) -> int:
        """The number that a V4.1 prompt names, 1..100."""
        effort = self.reasoning_effort
        if isinstance(effort, ReasoningEffort):
            return EFFORT_NUMBER[effort]
        return EFFORT_NUMBER[ReasoningEffort.HIGH] if effort is None else effort

    @property
    def default_max_tokens(self) -> int:
        """Answer length in tokens when the request names none, before the context limit."""
        if not self.thinking:
            return DEFAULT_MAX_TOKENS
        if self.reasoning_effort in (ReasoningEffort.MAX, 100):
            return DEFAULT_MAX_TOKENS_MAX_EFFORT
        return DEFAULT_MAX_TOKENS_THINKING
