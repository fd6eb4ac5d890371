"""One call in a Chat Completions answer: its deltas and its place in the complete message.

Contract: index, id, type and name come once, in the first delta. Level `clients` has two more
forms: calls of custom tools carry raw input, requests with the older `functions` get
`function_call`.
Used by `chat.py`.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from headrace.recipe.events.custom_input import CustomInput
from headrace.recipe.events.event import json_text
from headrace.recipe.parts import Part, joined


class CallForm(Enum):
    """How the client reads the call."""

    FUNCTION = auto()
    CUSTOM = auto()
    LEGACY = auto()


# Everything of an arguments delta before the text and after it.
_DELTAS = {
    CallForm.FUNCTION: (b'{"tool_calls":[{"index":%d,"function":{"arguments":', b"}}]}"),
    CallForm.CUSTOM: (b'{"tool_calls":[{"index":%d,"custom":{"input":', b"}}]}"),
    CallForm.LEGACY: (b'{"function_call":{"arguments":', b"}}"),
}


class ChatCall:
    """A call whose name is known."""

    def __init__(self, form: CallForm, index: int, call_id: str, name: str) -> None:
        self.form = form
        self._index = index
        self._id = call_id
        self._name = name
        self._parts: list[Part] = []
        self._input = CustomInput() if form is CallForm.CUSTOM else None
        before, self._after = _DELTAS[form]
        self._before = before if form is CallForm.LEGACY else before % index

    def first_delta(self) -> dict[str, Any]:
        """The delta that names the call."""
        if self.form is CallForm.LEGACY:
            return {"function_call": self._body("")}
        return {"tool_calls": [self._entry("")]}

    def arguments(self, text: str) -> bytes:
        """The delta, JSON, of a piece of arguments; empty when it says nothing yet."""
        return self._delta(text if self._input is None else self._input.feed(text))

    def delta_frame(self) -> tuple[bytes, bytes] | None:
        """What is around the escaped text of such a delta; None where it is not just that."""
        if self._input is not None:
            return None
        return self._before + b'"', b'"' + self._after

    def add(self, text: Part) -> None:
        """Arguments whose delta was written otherwise."""
        self._parts.append(text)

    def end(self) -> bytes:
        """The delta of what was held back until the end of the call."""
        return b"" if self._input is None else self._delta(self._input.finish())

    def add_to(self, message: dict[str, Any]) -> None:
        """Put the call into a complete message."""
        text = joined(self._parts)
        if self.form is CallForm.LEGACY:
            message["function_call"] = self._body(text)
        else:
            message.setdefault("tool_calls", []).append(self._entry(text))

    def _delta(self, text: str) -> bytes:
        if not text and self._input is not None:
            return b""
        self._parts.append(text)
        return self._before + json_text(text) + self._after

    def _entry(self, text: str) -> dict[str, Any]:
        kind = "custom" if self.form is CallForm.CUSTOM else "function"
        return {"index": self._index, "id": self._id, "type": kind, kind: self._body(text)}

    def _body(self, text: str) -> dict[str, str]:
        field = "input" if self.form is CallForm.CUSTOM else "arguments"
        return {"name": self._name, field: text}
