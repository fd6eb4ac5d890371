"""A converted request: everything later stages need, whatever the protocol was.

Made by `protocols/{chat,responses,messages}.py`; read by the renderers (conversation), the engine
side (inference), the output parser (parsing) and the events (settings). Frozen; the request body is
not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.recipe.conversation import Conversation
from headrace.recipe.grammar.rules import AnswerRules
from headrace.recipe.options import Level, ModelVersion


class Protocol(StrEnum):
    """The three public protocols."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


class ThinkingStage(StrEnum):
    """Where the answer begins in thinking mode; a continuation keeps leading newlines."""

    REASONING_START = "ReasoningStart"
    REASONING_CONTINUATION = "ReasoningContinuation"
    CONTENT_CONTINUATION = "ContentContinuation"


class ConstraintKind(StrEnum):
    """Kind of constraint that the engine is asked to enforce."""

    TOOL_CALL = "tool_call"
    TOOL_CALL_REQUIRED = "tool_call_required"
    JSON = "json"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What the answer must satisfy. schema: compact JSON of tools or schema, a pattern, or ""."""

    kind: ConstraintKind
    schema: str


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """Sampling as the official codec resolves it. Floats are rounded to f32.

    max_tokens: as requested, see `resolve_max_tokens`. extra: fields of level `clients` that the
    engine understands and the official codec ignores (top_k, min_p, logit_bias, penalties, n,
    stop_token_ids ...), by their request names, type-checked.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    logprobs: bool = False
    top_logprobs: int | None = None
    seed: int | None = None
    constraint: OutputConstraint | None = None
    n: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParsingOptions:
    """How to read the answer. thinking_stage: None outside thinking mode.

    parse_tool_calls is False when no tool was offered; `suppress_markup` (level `clients`,
    tool_choice none) then drops markup that appears all the same. engine_stops (level `clients`):
    `stops` are searched by the engine, which says so with a `Stopped`; here what may become one is
    only held back.
    """

    parse_tool_calls: bool = False
    starts_in_tool_calls: bool = False
    parse_json: bool = False
    thinking_stage: ThinkingStage | None = None
    stops: tuple[str, ...] = ()
    suppress_markup: bool = False
    engine_stops: bool = False


@dataclass(frozen=True, slots=True)
class ConvertedRequest:
    """Result of a conversion.

    settings: what the events of the protocol echo or need (a frozen dataclass of
    `protocols/<protocol>.py`: ChatSettings, ResponsesSettings, MessagesSettings). rules: level
    `clients`: what the answer is held to, None for nothing.
    """

    protocol: Protocol
    level: Level
    model: str
    version: ModelVersion
    conversation: Conversation
    inference: InferenceOptions
    parsing: ParsingOptions
    stream: bool
    settings: Any
    rules: AnswerRules | None = None
