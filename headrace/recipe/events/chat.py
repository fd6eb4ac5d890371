"""Chat Completions: chunks and the complete response.

Contract: one `ChatAnswer` per request, one writer per choice. The shapes are those that the SDKs
parse: per choice the first delta has the role and `finish_reason` comes once. Level `clients`
leaves keys without a value out of deltas and, when usage was asked for, sends it in a last chunk
with empty `choices`. Made by `stream.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.recipe.converted import ThinkingStage
from headrace.recipe.events.call_ids import new_call_id
from headrace.recipe.events.chat_calls import CallForm, ChatCall
from headrace.recipe.events.event import AnswerContext, Delta, Event, json_text, to_json
from headrace.recipe.events.logprobs import logprob_entries
from headrace.recipe.events.usage import Counts, chat_usage
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

DONE = b"[DONE]"

_FINISH = {
    AnswerEnd.STOP: "stop",
    AnswerEnd.STOP_SEQUENCE: "stop",
    AnswerEnd.END_OF_STREAM: "stop",
    AnswerEnd.LENGTH: "length",
    AnswerEnd.TOOL_CALLS: "tool_calls",
    AnswerEnd.CONTENT_FILTER: "content_filter",
}
_IN_REASONING = (ThinkingStage.REASONING_START, ThinkingStage.REASONING_CONTINUATION)


class ChatAnswer:
    """The writers of all choices, and the response they make together."""

    done = DONE

    def __init__(self, context: AnswerContext, choice_count: int) -> None:
        self._context = context
        self.counts = Counts()
        self.fingerprint: str | None = None
        self.unfinished = choice_count
        self.writers = [ChatWriter(context, self, choice) for choice in range(choice_count)]

    def response(self) -> bytes:
        """The complete response of everything so far."""
        context = self._context
        return to_json(
            {
                "id": context.response_id,
                "object": "chat.completion",
                "created": context.created,
                "model": context.model,
                "choices": [writer.complete() for writer in self.writers],
                "usage": chat_usage(self.counts),
                "system_fingerprint": self.fingerprint,
            }
        )


class ChatWriter:
    """Writes the chunks of one choice."""

    def __init__(self, context: AnswerContext, answer: ChatAnswer, choice: int) -> None:
        request = context.converted
        self.number = 0
        self._context = context
        self._answer = answer
        self._choice = choice
        self._official = context.official
        self._thinking = request.conversation.thinking
        self._include_usage = bool(request.settings.include_usage)
        self._null_usage = self._include_usage or not request.stream
        self._content: list[Part] = []
        self._reasoning: list[Part] | None = None
        self._calls: list[ChatCall] = []
        self._call: ChatCall | None = None
        self._call_begun = False  # a call whose name is not complete yet
        self._cut = False
        settings = request.settings
        self._custom_tools = settings.custom_tools
        self._legacy = settings.legacy_functions
        # clients: one-call. A further one is dropped; the model can ask again.
        one_call = settings.legacy_functions or not settings.parallel_tool_calls
        self._one_call = one_call and not context.official
        self._logprobs: dict[str, list[dict[str, Any]]] = {}
        self._finish: AnswerFinish | None = None
        self._head = b""
        self._tail = b""
        self._deltas: dict[type[Any], Delta] = {}

    def write(self, items: Sequence[Item]) -> list[Event]:
        """Chunks of the items, one each."""
        events: list[Event] = []
        for item in items:
            # Stored, as several branches ask for it; mypy narrows nothing by it: hence the waivers.
            kind = type(item)
            if kind is CallArguments:
                self._arguments(item.text, events)  # type: ignore[union-attr]
            elif kind is Content or kind is Reasoning:
                self._text(item, events)  # type: ignore[arg-type]
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
        """How a chunk of text is written."""
        return self._deltas.get(kind)

    def add_text(self, kind: TextKind, text: Part) -> None:
        """Text that was written by `delta`."""
        if kind is Content:
            self._content.append(text)
        elif kind is CallArguments:
            if self._call is not None:
                self._call.add(text)
        else:
            self._reasoning_parts().append(text)

    def fail(self, error: HeadraceError) -> list[Event]:
        """The error object as an event."""
        request = self._context.converted
        return [Event(*error_event(request.protocol, error, request.level))]

    def complete(self) -> dict[str, Any]:
        """The choice as it stands in a complete response."""
        message: dict[str, Any] = {"role": "assistant", "content": joined(self._content)}
        if self._reasoning is not None:
            message["reasoning_content"] = joined(self._reasoning)
        calls = self._calls
        finish = self._finish
        if self._cut:
            # clients: cut-call. It is no call of a complete response.
            calls = calls[:-1]
        for call in calls:
            call.add_to(message)
        if not self._official:
            # clients: sdk-fields
            message["refusal"] = None
            message["annotations"] = []
        choice = {
            "index": self._choice,
            "message": message,
            "logprobs": dict(sorted(self._logprobs.items())) or None,
            "finish_reason": None if finish is None else self._reason(finish.end),
        }
        if finish is not None and finish.empty_after_reasoning:
            choice["finish_detail"] = "empty_after_reasoning"
        return choice

    # --- one item each -----------------------------------------------------------------------

    def _start(self, start: Start, events: list[Event]) -> None:
        answer = self._answer
        answer.counts.prompt_tokens = start.prompt_tokens
        answer.counts.cached_tokens = start.cached_tokens
        answer.fingerprint = start.system_fingerprint
        self._prepare()
        delta: dict[str, Any] = {"role": "assistant"}
        if self._context.converted.parsing.thinking_stage in _IN_REASONING:
            delta["content"] = None
            delta["reasoning_content"] = ""
            self._reasoning_parts()
        else:
            delta["content"] = ""
            delta["reasoning_content"] = None
        events.append(self._chunk(self._shown(delta)))

    def _text(self, item: Content | Reasoning, events: list[Event]) -> None:
        kind = type(item)
        self.add_text(kind, item.text)
        name, prefix, suffix, _ = self._deltas[kind]
        if item.logprobs is None:
            events.append(Event(name, prefix + json_text(item.text)[1:-1] + suffix))
            return
        key = "content" if kind is Content else "reasoning_content"
        entries = logprob_entries(item.logprobs, self._context)
        self._logprobs.setdefault(key, []).extend(entries)
        delta = {"content": None, "reasoning_content": None, key: item.text}
        events.append(self._chunk(self._shown(delta), {key: entries}))

    def _named(self, name: str, events: list[Event]) -> None:
        self._end_call(events)
        self._call_begun = False
        index = len(self._calls)
        if index and self._one_call:
            return
        empty_thinking = self._thinking and not (self._reasoning and any(self._reasoning))
        form = CallForm.CUSTOM if name in self._custom_tools else CallForm.FUNCTION
        if self._legacy:
            form = CallForm.LEGACY
        call_id = new_call_id(index, empty_thinking=empty_thinking)
        self._call = ChatCall(form, index, call_id, name)
        self._calls.append(self._call)
        frame = self._call.delta_frame()
        if frame is not None:
            before, after = frame
            delta = Delta(None, self._head + before, after + self._tail)
            self._deltas[CallArguments] = delta
        events.append(self._chunk(self._call.first_delta()))

    def _arguments(self, text: str, events: list[Event]) -> None:
        delta = b"" if self._call is None else self._call.arguments(text)
        if delta:
            events.append(Event(None, self._head + delta + self._tail))

    def _end_call(self, events: list[Event]) -> None:
        """Nothing follows of the last call."""
        if self._call is not None:
            delta = self._call.end()
            if delta:
                events.append(Event(None, self._head + delta + self._tail))
            self._call = None
            self._deltas.pop(CallArguments, None)

    def _reason(self, end: AnswerEnd) -> str:
        if end is AnswerEnd.TOOL_CALLS and self._legacy:
            return "function_call"
        return _FINISH[end]

    def _end(self, finish: AnswerFinish, events: list[Event]) -> None:
        answer = self._answer
        self._cut = finish.open_call and self._call is not None and not self._call_begun
        self._end_call(events)
        self._finish = finish
        answer.unfinished -= 1
        answer.counts.add(finish.completion_tokens, finish.reasoning_tokens)
        if not self._official:
            # clients: draft-counts
            answer.counts.add_drafts(finish.drafts)
        last = not answer.unfinished
        # clients: usage-chunk
        own_chunk = self._include_usage and not self._official
        usage = chat_usage(answer.counts) if last and not own_chunk else None
        delta = self._shown({"content": "", "reasoning_content": None})
        detail = "empty_after_reasoning" if finish.empty_after_reasoning else None
        events.append(self._chunk(delta, None, self._reason(finish.end), usage, detail))
        if last and own_chunk:
            events.append(Event(None, self._envelope([], chat_usage(answer.counts))))

    # --- JSON --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Everything of the frequent chunks that does not change any more."""
        whole = self._chunk({}).data
        self._head, _, self._tail = whole.partition(b'"delta":{}')
        self._head += b'"delta":'
        other = {Content: "reasoning_content", Reasoning: "content"}
        for kind, key in ((Content, "content"), (Reasoning, "reasoning_content")):
            keys = {"content": None, "reasoning_content": None, key: ""}
            if not self._thinking and kind is Content:
                del keys[other[kind]]
            before, _, after = to_json(self._shown(keys)).partition(b'"%b":""' % key.encode())
            prefix = self._head + before + b'"%b":"' % key.encode()
            self._deltas[kind] = Delta(None, prefix, b'"' + after + self._tail)

    def _shown(self, delta: dict[str, Any]) -> dict[str, Any]:
        """The delta without keys that this level or mode leaves out."""
        if not self._official:
            # clients: no-empty-keys
            return {key: value for key, value in delta.items() if value is not None}
        if not self._thinking and delta.get("reasoning_content", "") is None:
            del delta["reasoning_content"]
        return delta

    def _chunk(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        usage: dict[str, Any] | None = None,
        detail: str | None = None,
    ) -> Event:
        choice: dict[str, Any] = {
            "index": self._choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if detail is not None:
            choice["finish_detail"] = detail
        return Event(None, self._envelope([choice], usage))

    def _envelope(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        context = self._context
        chunk: dict[str, Any] = {
            "id": context.response_id,
            "object": "chat.completion.chunk",
            "created": context.created,
            "model": context.model,
            "system_fingerprint": self._answer.fingerprint,
            "choices": choices,
        }
        if usage is not None or self._null_usage:
            chunk["usage"] = usage
        return msgspec.json.encode(chunk)

    def _reasoning_parts(self) -> list[Part]:
        if self._reasoning is None:
            self._reasoning = []
        return self._reasoning
