"""Responses: events and the complete response.

Contract: every output item comes as a full group of added, delta and done events, as Codex needs;
`sequence_number` counts all events without gaps. An item opens with its first text or call name and
closes when another opens or the answer ends. Made by `stream.py`; the items themselves are in
`responses_items.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.recipe.events.call_ids import new_call_id
from headrace.recipe.events.event import AnswerContext, Delta, Event, to_json
from headrace.recipe.events.logprobs import logprob_entries
from headrace.recipe.events.responses_items import (
    CallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    SearchItem,
)
from headrace.recipe.events.usage import Counts, responses_usage
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
from headrace.recipe.parts import Part
from headrace.recipe.protocols.errors_wire import error_body

_INCOMPLETE = {
    AnswerEnd.LENGTH: "max_output_tokens",
    AnswerEnd.CONTENT_FILTER: "content_filter",
}


class ResponsesAnswer:
    """The one writer of an answer, and its complete response."""

    done: bytes | None = None

    def __init__(self, context: AnswerContext, choice_count: int) -> None:
        del choice_count  # the protocol has one choice
        self._writer = ResponsesWriter(context)
        self.writers = [self._writer]

    def response(self) -> bytes:
        """The complete response of everything so far."""
        return to_json(self._writer.response())


class ResponsesWriter:
    """Writes the events of an answer; `number` is the next sequence number."""

    def __init__(self, context: AnswerContext) -> None:
        self.number = 0
        self._context = context
        self._settings = context.converted.settings
        self._thinking = context.converted.conversation.thinking
        self._base = _fixed_fields(context)
        self._counts = Counts()
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._call_count = 0
        self._call_begun = False  # a call whose name is not complete yet
        # clients: one-call. The model can ask again.
        self._one_call = not self._settings.parallel_tool_calls and not context.official
        self._reasoned = False
        self._status = "in_progress"
        self._finish: AnswerFinish | None = None
        self._error: dict[str, Any] | None = None
        self._completed_at: int | None = None

    def write(self, items: Sequence[Item]) -> list[Event]:
        """Events of the items."""
        events: list[Event] = []
        for item in items:
            # Stored, as several branches ask for it; mypy narrows nothing by it: hence the waivers.
            kind = type(item)
            if kind is CallArguments:
                self._arguments(item.text, events)  # type: ignore[union-attr]
            elif kind is Content or kind is Reasoning:
                self._text(item, events)  # type: ignore[arg-type]
            elif kind is CallNamed:
                self._named(item.name, events)  # type: ignore[union-attr]
            elif kind is Start:
                self._start(item, events)  # type: ignore[arg-type]
            elif kind is CallBegin:
                self._call_begun = True
            else:
                self._end(item, events)  # type: ignore[arg-type]
        return [] if self._context.silent else events

    def delta(self, kind: TextKind) -> Delta | None:
        """How text of the open item is written."""
        item = self._open
        if kind is CallArguments:
            return item.delta if isinstance(item, CallItem) and not item.custom else None
        return item.delta if item is not None and item.kind is kind else None

    def add_text(self, kind: TextKind, text: Part) -> None:
        """Text that was written by `delta`."""
        if self._open is not None:
            self._open.parts.append(text)
            self._reasoned = self._reasoned or kind is Reasoning

    def fail(self, error: HeadraceError) -> list[Event]:
        """`response.failed` with everything so far."""
        self._status = "failed"
        request = self._context.converted
        fields = error_body(error, request.protocol, request.level)[1]["error"]
        code = "server_error" if error.http_status >= 500 else fields["code"]
        self._error = {"code": code, "message": fields["message"]}
        if self._open is not None:
            self._open.status = "incomplete"
            self._open = None
        return [self._event("response.failed", {"response": self.response()})]

    def response(self) -> dict[str, Any]:
        """The response object as it stands."""
        finish = self._finish
        response = dict(self._base)
        response["status"] = self._status
        response["completed_at"] = self._completed_at
        response["error"] = self._error
        response["output"] = [item.whole() for item in self._items]
        if finish is not None:
            reason = _INCOMPLETE.get(finish.end)
            response["incomplete_details"] = None if reason is None else {"reason": reason}
            response["usage"] = responses_usage(self._counts, official=self._context.official)
            if finish.empty_after_reasoning:
                response["finish_detail"] = "empty_after_reasoning"
        return response

    # --- one item each -----------------------------------------------------------------------

    def _start(self, start: Start, events: list[Event]) -> None:
        self._counts.prompt_tokens = start.prompt_tokens
        self._counts.cached_tokens = start.cached_tokens
        response = self.response()
        for name in ("response.created", "response.in_progress"):
            events.append(self._event(name, {"response": response}))

    def _text(self, item: Content | Reasoning, events: list[Event]) -> None:
        kind = type(item)
        out = self._open
        if out is None or out.kind is not kind:
            number, response_id = len(self._items), self._context.response_id
            out = (MessageItem if kind is Content else ReasoningItem)(response_id, number)
            self._open_item(out, events)
        out.parts.append(item.text)
        self._reasoned = self._reasoned or (kind is Reasoning and bool(item.text))
        entries: list[dict[str, Any]] = []
        if item.logprobs is not None and isinstance(out, MessageItem):
            entries = logprob_entries(item.logprobs, self._context)
            out.logprobs.extend(entries)
        events.append(out.write_delta(item.text, self._next(), entries))

    def _named(self, name: str, events: list[Event]) -> None:
        settings = self._settings
        self._call_begun = False
        if self._call_count and self._one_call:
            self._close("completed", events)
            return
        if isinstance(self._open, MessageItem):
            self._open.phase = "commentary"
        call_id = new_call_id(
            self._call_count, empty_thinking=self._thinking and not self._reasoned
        )
        self._call_count += 1
        response_id, number = self._context.response_id, len(self._items)
        item: OutputItem
        if name == "tool_search" and settings.tool_search:
            item = SearchItem(response_id, number, call_id)
        else:
            custom = name in settings.custom_tools
            namespace, local = settings.namespace_tools.get(name, (None, name))
            item = CallItem(response_id, number, call_id, local, namespace, custom=custom)
        self._open_item(item, events)

    def _arguments(self, text: str, events: list[Event]) -> None:
        item = self._open
        if isinstance(item, CallItem):
            delta = item.read(text)
            if delta or not item.custom:
                events.append(item.write_delta(delta, self._next(), []))
        elif isinstance(item, SearchItem):
            item.parts.append(text)

    def _open_item(self, item: OutputItem, events: list[Event]) -> None:
        self._close("completed", events)
        self._items.append(item)
        self._open = item
        added = {"item": item.added(), "output_index": item.index}
        events.append(self._event("response.output_item.added", added))
        part = item.part()
        if part is not None:
            events.append(
                self._event("response.content_part.added", {**item.place(), "part": part})
            )

    def _close(self, status: str, events: list[Event]) -> None:
        item = self._open
        if item is None:
            return
        self._open = None
        item.status = status
        if isinstance(item, CallItem):
            rest = item.finish()
            if rest:
                events.append(item.write_delta(rest, self._next(), []))
        done = item.done(self.number)
        if done is not None:
            self.number += 1
            events.append(Event(done["type"], to_json(done)))
        part = item.part(whole=True)
        if part is not None:
            events.append(self._event("response.content_part.done", {**item.place(), "part": part}))
        item_done = {"item": item.whole(), "output_index": item.index}
        events.append(self._event("response.output_item.done", item_done))

    def _end(self, finish: AnswerFinish, events: list[Event]) -> None:
        self._finish = finish
        self._counts.add(finish.completion_tokens, finish.reasoning_tokens)
        status = "incomplete" if finish.end in _INCOMPLETE else "completed"
        # clients: cut-call. It says so, whatever ended the answer.
        in_call = isinstance(self._open, CallItem | SearchItem) and not self._call_begun
        cut = finish.open_call and in_call
        self._close("incomplete" if cut else status, events)
        self._status = status
        self._completed_at = int(time.time())
        events.append(self._event(f"response.{status}", {"response": self.response()}))

    # --- JSON --------------------------------------------------------------------------------

    def _next(self) -> int:
        number = self.number
        self.number = number + 1
        return number

    def _event(self, name: str, fields: dict[str, Any]) -> Event:
        number = self._next()
        if self._context.silent:
            return Event(name, b"")
        return Event(name, to_json({"type": name, **fields, "sequence_number": number}))


def _fixed_fields(context: AnswerContext) -> dict[str, Any]:
    """The response object; what changes later is None or empty."""
    settings = context.converted.settings
    inference = context.converted.inference
    official = context.official
    # clients: sampling-honoured. What sampling really uses.
    temperature = settings.temperature if official else inference.temperature
    top_p = settings.top_p if official else inference.top_p
    return {
        "id": context.response_id,
        "object": "response",
        "created_at": context.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "content_filters": None,
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": None,
        "instructions": settings.instructions,
        "max_output_tokens": settings.max_output_tokens,
        "max_tool_calls": None,
        "model": context.model,
        "moderation": None,
        "output": [],
        "parallel_tool_calls": settings.parallel_tool_calls,
        "presence_penalty": 0.0,
        "previous_response_id": settings.previous_response_id,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": settings.reasoning,
        "safety_identifier": None,
        "service_tier": "default",
        "store": settings.store,
        "temperature": temperature,
        "text": settings.text,
        "tool_choice": settings.tool_choice,
        # Tools can be long and go out three times.
        "tools": msgspec.Raw(to_json(settings.tools)),
        "top_logprobs": settings.top_logprobs,
        "top_p": top_p,
        "truncation": settings.truncation,
        "usage": None,
        "user": settings.user,
        "metadata": settings.metadata,
    }
