"""What an answer consists of, in order: the seam between the output parser and the events.

One `Start`, then pieces of reasoning and content and calls (`CallBegin`, `CallNamed`,
`CallArguments`*) as they are decided, then one `AnswerFinish`. `logprobs` are those of the whole
source piece that an item was cut from (spec recipe 10.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.core.output import TokenLogprobs
from headrace.recipe.chunks import NO_DRAFTS, DraftCounts


class AnswerEnd(StrEnum):
    """Why an answer ended, as the protocols tell it apart."""

    STOP = "stop"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    END_OF_STREAM = "end_of_stream"


@dataclass(frozen=True, slots=True)
class PieceLogprobs:
    """Ids of a source piece and one entry for each."""

    ids: tuple[int, ...]
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """The answer begins; zeros and None when no `Ready` came first."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    system_fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the visible answer."""

    text: str
    logprobs: PieceLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str
    logprobs: PieceLogprobs | None = None


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins; its name is not complete yet."""


@dataclass(frozen=True, slots=True)
class CallNamed:
    """The name of the call that began last is complete."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the arguments of that call."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerFinish:
    """The answer ended.

    stop: the matched stop sequence. completion_tokens: over all processed pieces, markup included.
    reasoning_tokens: None outside thinking mode or when unknown. empty_after_reasoning: level
    `clients`: reasoning came, then neither content nor a call. open_call: level `clients`: the last
    call was cut off (its arguments are not complete). drafts: as in `chunks.Finish`.
    """

    end: AnswerEnd
    stop: str | None = None
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    empty_after_reasoning: bool = False
    open_call: bool = False
    drafts: DraftCounts = NO_DRAFTS


Item = Start | Content | Reasoning | CallBegin | CallNamed | CallArguments | AnswerFinish
# What a piece of text can become; arguments only where they are a string value.
TextKind = type[Content] | type[Reasoning] | type[CallArguments]
