"""Output items of a Responses answer: messages, reasoning and calls.

Contract: an item knows its own JSON at every moment (added, deltas, done, whole); the writer in
`responses.py` knows when each is due and numbers the events. Ids are made of the response id and
the place of the item in the output.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import InternalError
from headrace.recipe.events.custom_input import CustomInput
from headrace.recipe.events.event import Delta, Event, json_text, to_json
from headrace.recipe.json_text import parse_arguments
from headrace.recipe.parser.items import CallNamed, Content, Reasoning
from headrace.recipe.parts import Part, joined


class MessageItem:
    """Visible text. phase: `commentary` when a call follows directly."""

    kind: type[Any] = Content

    def __init__(self, response_id: str, index: int) -> None:
        self.index = index
        self.status = "in_progress"
        self.phase = "final_answer"
        self.parts: list[Part] = []
        self.logprobs: list[dict[str, Any]] = []
        self.id = f"msg_{response_id}_{index}"
        name = "response.output_text.delta"
        self._prefix = b'{"type":"%b","content_index":0,"delta":' % name.encode()
        self._ids = b',"item_id":%b,"logprobs":' % json_text(self.id)
        end = b',"output_index":%d,"sequence_number":' % index
        self._end = end
        self.delta = Delta(name, self._prefix + b'"', b'"' + self._ids + b"[]" + end, True)

    def place(self) -> dict[str, Any]:
        """Where a part stands."""
        return {"content_index": 0, "item_id": self.id, "output_index": self.index}

    def write_delta(self, text: str, number: int, entries: list[dict[str, Any]]) -> Event:
        """One piece of text with its log probabilities."""
        entries_json = to_json(entries)
        data = self._prefix + json_text(text) + self._ids + entries_json + self._end
        return Event("response.output_text.delta", b"%b%d}" % (data, number))

    def part(self, *, whole: bool = False) -> dict[str, Any] | None:
        """The one content part, empty or whole."""
        return {
            "type": "output_text",
            "annotations": [],
            "logprobs": self.logprobs if whole else [],
            "text": joined(self.parts) if whole else "",
        }

    def done(self, number: int) -> dict[str, Any] | None:
        """The event that ends the deltas."""
        self.parts[:] = [joined(self.parts)]  # it is needed several times from here on
        return {
            "type": "response.output_text.done",
            "content_index": 0,
            "item_id": self.id,
            "logprobs": self.logprobs,
            "output_index": self.index,
            "sequence_number": number,
            "text": joined(self.parts),
        }

    def added(self) -> dict[str, Any]:
        """The item before its first part."""
        return {**self.whole(), "content": []}

    def whole(self) -> dict[str, Any]:
        """The item as it stands."""
        return {
            "type": "message",
            "id": self.id,
            "status": self.status,
            "role": "assistant",
            "phase": self.phase,
            "content": [self.part(whole=True)],
        }


class ReasoningItem:
    """Reasoning, in clear; `encrypted_content` is a token that clients send back."""

    kind: type[Any] = Reasoning

    def __init__(self, response_id: str, index: int) -> None:
        self.index = index
        self.status = "in_progress"
        self.parts: list[Part] = []
        self.id = f"rs_{response_id}_{index}"
        self._encrypted = f"{response_id}-{index}"
        name = "response.reasoning_text.delta"
        prefix = b'{"type":"%b","content_index":0,"delta":"' % name.encode()
        suffix = b'","item_id":%b,"output_index":%d,"sequence_number":'
        self.delta = Delta(name, prefix, suffix % (json_text(self.id), index), True)

    def place(self) -> dict[str, Any]:
        """Where a part stands."""
        return {"content_index": 0, "item_id": self.id, "output_index": self.index}

    def write_delta(self, text: str, number: int, entries: list[dict[str, Any]]) -> Event:
        """One piece of text; log probabilities of reasoning are not shown."""
        return _delta_event(self.delta, text, number)

    def part(self, *, whole: bool = False) -> dict[str, Any] | None:
        """The one content part, empty or whole."""
        return {"type": "reasoning_text", "text": joined(self.parts) if whole else ""}

    def done(self, number: int) -> dict[str, Any] | None:
        """The event that ends the deltas."""
        self.parts[:] = [joined(self.parts)]  # it is needed several times from here on
        return {
            "type": "response.reasoning_text.done",
            "content_index": 0,
            "item_id": self.id,
            "output_index": self.index,
            "sequence_number": number,
            "text": joined(self.parts),
        }

    def added(self) -> dict[str, Any]:
        """The item before its first part."""
        return {**self.whole(), "content": []}

    def whole(self) -> dict[str, Any]:
        """The item as it stands."""
        return {
            "type": "reasoning",
            "id": self.id,
            "status": self.status,
            "content": [self.part(whole=True)],
            "summary": [],
            "encrypted_content": self._encrypted,
        }


class CallItem:
    """A call of a function, or with `custom` of a tool that takes raw text."""

    kind: type[Any] = CallNamed

    def __init__(
        self,
        response_id: str,
        index: int,
        call_id: str,
        name: str,
        namespace: str | None,
        *,
        custom: bool,
    ) -> None:
        self.index = index
        self.status = "in_progress"
        self.custom = custom
        self.parts: list[Part] = []
        self.id = f"{'ctc' if custom else 'fc'}_{response_id}_{index}"
        self._call_id = call_id
        self._name = name
        self._namespace = namespace
        self._input = CustomInput() if custom else None
        self._field = "input" if custom else "arguments"
        self._event = "custom_tool_call_input" if custom else "function_call_arguments"
        name = f"response.{self._event}.delta"
        prefix = b'{"type":"%b","delta":"' % name.encode()
        suffix = b'","item_id":%b,"output_index":%d,"sequence_number":'
        self.delta = Delta(name, prefix, suffix % (json_text(self.id), index), True)

    def read(self, text: str) -> str:
        """What a piece of the arguments adds to this item."""
        delta = text if self._input is None else self._input.feed(text)
        self.parts.append(delta)
        return delta

    def finish(self) -> str:
        """What was held back until the end."""
        rest = "" if self._input is None else self._input.finish()
        self.parts.append(rest)
        return rest

    def place(self) -> dict[str, Any]:
        """Where the item stands."""
        return {"item_id": self.id, "output_index": self.index}

    def write_delta(self, text: str, number: int, entries: list[dict[str, Any]]) -> Event:
        """One piece of arguments or input."""
        return _delta_event(self.delta, text, number)

    def part(self, *, whole: bool = False) -> dict[str, Any] | None:
        """Calls have no content parts."""
        return None

    def done(self, number: int) -> dict[str, Any] | None:
        """The event that ends the deltas."""
        self.parts[:] = [joined(self.parts)]  # it is needed several times from here on
        return {
            "type": f"response.{self._event}.done",
            self._field: joined(self.parts),
            "item_id": self.id,
            "output_index": self.index,
            "sequence_number": number,
        }

    def added(self) -> dict[str, Any]:
        """The item without arguments."""
        return {**self.whole(), self._field: ""}

    def whole(self) -> dict[str, Any]:
        """The item as it stands."""
        namespace = {} if self._namespace is None else {"namespace": self._namespace}
        return {
            "type": "function_call" if self._input is None else "custom_tool_call",
            "id": self.id,
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            **namespace,
            self._field: joined(self.parts),
        }


class SearchItem:
    """A call of the client's tool search; its arguments are a JSON value."""

    kind: type[Any] = CallNamed
    delta: Delta | None = None

    def __init__(self, response_id: str, index: int, call_id: str) -> None:
        self.index = index
        self.parts: list[Part] = []
        self.id = f"tsc_{response_id}_{index}"
        self._call_id = call_id
        self._status = "in_progress"
        self._arguments: dict[str, Any] = {}

    @property
    def status(self) -> str:
        """Status of the call; it completes only with arguments that are a JSON object."""
        return self._status

    @status.setter
    def status(self, status: str) -> None:
        arguments = parse_arguments(joined(self.parts)) if status == "completed" else None
        self._arguments = arguments or {}
        self._status = "incomplete" if arguments is None else status

    def place(self) -> dict[str, Any]:
        """Where the item stands."""
        return {"item_id": self.id, "output_index": self.index}

    def write_delta(self, text: str, number: int, entries: list[dict[str, Any]]) -> Event:
        """Never called: the arguments come whole with the end of the item."""
        raise InternalError("The arguments of a tool search have no deltas.")

    def part(self, *, whole: bool = False) -> dict[str, Any] | None:
        """Calls have no content parts."""
        return None

    def done(self, number: int) -> dict[str, Any] | None:
        """There are no deltas to end."""
        return None

    def added(self) -> dict[str, Any]:
        """The item without arguments."""
        return self.whole()

    def whole(self) -> dict[str, Any]:
        """The item as it stands."""
        return {
            "type": "tool_search_call",
            "id": self.id,
            "status": self.status,
            "call_id": self._call_id,
            "execution": "client",
            "arguments": self._arguments,
        }


OutputItem = MessageItem | ReasoningItem | CallItem | SearchItem


def _delta_event(delta: Delta, text: str, number: int) -> Event:
    data = b"%b%b%b%d}" % (delta.prefix, json_text(text)[1:-1], delta.suffix, number)
    return Event(delta.name, data)
