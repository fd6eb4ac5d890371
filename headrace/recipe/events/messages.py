"""Messages: events and the complete response.

Contract: blocks are opened one after the other with contiguous indexes; in thinking mode the first
one is a thinking block even when no reasoning follows, and every thinking block ends with a
signature. At level `clients` a complete response never holds a call that was cut. Made by
`stream.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from headrace.errors import HeadraceError
from headrace.recipe.events.call_ids import new_call_id
from headrace.recipe.events.event import AnswerContext, Delta, Event, json_text, to_json
from headrace.recipe.events.usage import Counts, messages_usage
from headrace.recipe.json_text import parse_arguments
from headrace.recipe.parser.items import (
    AnswerEnd,
    AnswerFinish,
    CallArguments,
    CallBegin,
    CallNamed,
    Content,
    Item,
    Reasoning,
    Start,
    TextKind,
)
from headrace.recipe.parts import Part, joined
from headrace.recipe.protocols.errors_wire import error_event

_STOP_REASON = {
    AnswerEnd.STOP: "end_turn",
    AnswerEnd.END_OF_STREAM: "end_turn",
    AnswerEnd.STOP_SEQUENCE: "stop_sequence",
    AnswerEnd.LENGTH: "max_tokens",
    AnswerEnd.TOOL_CALLS: "tool_use",
    AnswerEnd.CONTENT_FILTER: "refusal",
}
# Name of the text in a block, and type and field of its deltas.
_FIELDS = {Content: ("text", "text_delta"), Reasoning: ("thinking", "thinking_delta")}


@dataclass(slots=True)
class _Block:
    """One content block; kind: CallNamed stands for tool_use."""

    kind: type[Any]
    start: dict[str, Any]
    parts: list[Part] = field(default_factory=list)


class MessagesAnswer:
    """The one writer of an answer, and its complete response."""

    done: bytes | None = None

    def __init__(self, context: AnswerContext, choice_count: int) -> None:
        del choice_count  # the protocol has one choice
        self._writer = MessagesWriter(context)
        self.writers = [self._writer]

    def response(self) -> bytes:
        """The complete response of everything so far."""
        return to_json(self._writer.message())


class MessagesWriter:
    """Writes the events of an answer."""

    def __init__(self, context: AnswerContext) -> None:
        self.number = 0
        self._context = context
        settings = context.converted.settings
        self._thinking = settings.thinking
        self._signature = context.signature or settings.signature or context.response_id
        self._counts = Counts()
        self._blocks: list[_Block] = []
        self._open: _Block | None = None
        self._delta = Delta(None, b"", b"")
        self._call_count = 0
        self._call_begun = False  # a call whose name is not complete yet
        self._cut = False
        # clients: one-call. The model can ask again.
        self._one_call = not settings.parallel_tool_calls and not context.official
        self._official = context.official
        self._reasoned = False
        self._finish: AnswerFinish | None = None

    def write(self, items: Sequence[Item]) -> list[Event]:
        """Events of the items."""
        events: list[Event] = []
        for item in items:
            # Stored, as several branches ask for it; mypy narrows nothing by it: hence the waivers.
            kind = type(item)
            if kind is CallArguments:
                if self._open is not None and self._open.kind is CallNamed:
                    self._add(item.text, events)  # type: ignore[union-attr]
            elif kind is Content or kind is Reasoning:
                if self._open is None or self._open.kind is not kind:
                    self._open_text(kind, events)
                self._reasoned = self._reasoned or (kind is Reasoning and bool(item.text))  # type: ignore[union-attr]
                self._add(item.text, events)  # type: ignore[union-attr]
            elif kind is CallBegin:
                self._call_begun = True
            elif kind is CallNamed:
                self._named(item.name, events)  # type: ignore[union-attr]
            elif kind is Start:
                self._start(item, events)  # type: ignore[arg-type]
            else:
                self._end(item, events)  # type: ignore[arg-type]
        return [] if self._context.silent else events

    def delta(self, kind: TextKind) -> Delta | None:
        """How text of the open block is written."""
        block = CallNamed if kind is CallArguments else kind
        return self._delta if self._open is not None and self._open.kind is block else None

    def add_text(self, kind: TextKind, text: Part) -> None:
        """Text that was written by `delta`."""
        if self._open is not None:
            self._open.parts.append(text)
            self._reasoned = self._reasoned or kind is Reasoning

    def fail(self, error: HeadraceError) -> list[Event]:
        """The error event."""
        request = self._context.converted
        return [Event(*error_event(request.protocol, error, request.level))]

    def message(self) -> dict[str, Any]:
        """The complete message so far."""
        finish = self._finish
        blocks = self._blocks
        if self._cut:
            # clients: cut-call. It must not look like one with empty input.
            blocks = blocks[:-1]
        message = self._envelope([self._whole(block) for block in blocks])
        if finish is not None:
            message["stop_reason"] = _STOP_REASON[finish.end]
            message["stop_sequence"] = finish.stop
            if finish.empty_after_reasoning:
                message["finish_detail"] = "empty_after_reasoning"
        return message

    # --- one item each -----------------------------------------------------------------------

    def _start(self, start: Start, events: list[Event]) -> None:
        self._counts.prompt_tokens = start.prompt_tokens
        self._counts.cached_tokens = start.cached_tokens
        events.append(_event("message_start", message=self._envelope([])))
        if self._thinking:
            self._open_text(Reasoning, events)

    def _open_text(self, kind: type[Any], events: list[Event]) -> None:
        name, delta = _FIELDS[kind]
        start = {"type": name, name: ""}
        if kind is Reasoning:
            start["signature"] = ""
        self._open_block(_Block(kind, start), delta, name, events)

    def _named(self, name: str, events: list[Event]) -> None:
        self._call_begun = False
        if self._call_count and self._one_call:
            self._close(events)
            return
        empty_thinking = self._thinking and not self._reasoned
        call_id = new_call_id(self._call_count, empty_thinking=empty_thinking)
        self._call_count += 1
        start = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self._open_block(_Block(CallNamed, start), "input_json_delta", "partial_json", events)

    def _open_block(self, block: _Block, delta: str, name: str, events: list[Event]) -> None:
        self._close(events)
        index = len(self._blocks)
        self._blocks.append(block)
        self._open = block
        events.append(_event("content_block_start", index=index, content_block=block.start))
        if index == 0:
            events.append(_event("ping"))
        prefix = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":"' % (
            index,
            delta.encode(),
            name.encode(),
        )
        self._delta = Delta("content_block_delta", prefix, b'"}}')

    def _add(self, text: str, events: list[Event]) -> None:
        # Callers have seen to it that a block is open.
        self._open.parts.append(text)  # type: ignore[union-attr]
        name, prefix, suffix, _ = self._delta
        events.append(Event(name, prefix + json_text(text)[1:-1] + suffix))

    def _close(self, events: list[Event]) -> None:
        block = self._open
        if block is None:
            return
        index = len(self._blocks) - 1
        if block.kind is Reasoning:
            signature = {"type": "signature_delta", "signature": self._signature}
            events.append(_event("content_block_delta", index=index, delta=signature))
        events.append(_event("content_block_stop", index=index))
        self._open = None

    def _end(self, finish: AnswerFinish, events: list[Event]) -> None:
        self._finish = finish
        in_call = self._open is not None and self._open.kind is CallNamed
        self._cut = finish.open_call and in_call and not self._call_begun
        self._counts.add(finish.completion_tokens, finish.reasoning_tokens)
        self._close(events)
        delta = {"stop_reason": _STOP_REASON[finish.end], "stop_sequence": finish.stop}
        if finish.empty_after_reasoning:
            delta["finish_detail"] = "empty_after_reasoning"
        events.append(_event("message_delta", delta=delta, usage=messages_usage(self._counts)))
        events.append(_event("message_stop"))

    # --- JSON --------------------------------------------------------------------------------

    def _envelope(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._context.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": messages_usage(self._counts),
        }

    def _whole(self, block: _Block) -> dict[str, Any]:
        whole = dict(block.start)
        text = joined(block.parts)
        if block.kind is CallNamed:
            whole["input"] = self._input(text)
        else:
            whole[_FIELDS[block.kind][0]] = text
        if block.kind is Reasoning and block is not self._open:
            whole["signature"] = self._signature
        return whole

    def _input(self, text: str) -> dict[str, Any] | Raw:
        value = parse_arguments(text)
        if value is None and not self._official:
            # clients: far-numbers. Arguments fit their schema as they are written.
            with suppress(msgspec.MsgspecError):
                msgspec.json.decode(text, type=dict[str, Raw])
                return Raw(text.encode())
        return value or {}


def _event(kind: str, **fields: Any) -> Event:
    return Event(kind, to_json({"type": kind, **fields}))
