"""One event of an answer, and what the writers of the three protocols have in common.

Contract: a writer turns the items of one choice into events and keeps what the complete response
needs, so that a complete answer is written once, from parts. `Delta` is everything of a text event
that stays the same while its block is open: `stream.py` writes most events with it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from headrace.errors import HeadraceError
from headrace.recipe.converted import ConvertedRequest
from headrace.recipe.options import Level
from headrace.recipe.parser.items import Item, TextKind
from headrace.recipe.parts import Part

# A string as JSON, with its quotes; control characters, quotes and backslashes are escaped.
json_text = msgspec.json.Encoder().encode
to_json = msgspec.json.Encoder().encode


class Event(NamedTuple):
    """A server-sent event: its name (None: only data) and its data, compact JSON."""

    name: str | None
    data: bytes


def sse_frame(event: Event) -> bytes:
    """The event as it goes over the wire."""
    name, data = event
    if name is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class Delta(NamedTuple):
    """The data of a text event: prefix + escaped text + suffix (+ its number + "}")."""

    name: str | None
    prefix: bytes
    suffix: bytes
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What is fixed before an answer begins.

    token_bytes: bytes of an id, for log probabilities. silent: no events are wanted, only the
    complete response.
    """

    converted: ConvertedRequest
    response_id: str
    model: str
    created: int
    token_bytes: Callable[[int], bytes]
    signature: str | None = None
    silent: bool = False

    @property
    def official(self) -> bool:
        """Whether the level is `official`."""
        return self.converted.level is Level.OFFICIAL


class Writer(Protocol):
    """Writer of one choice; `number` counts the events where the protocol numbers them."""

    number: int

    def write(self, items: Sequence[Item]) -> list[Event]:
        """Events of the items, in order."""
        ...

    def delta(self, kind: TextKind) -> Delta | None:
        """How text of this kind is written now; None when it would open another block first."""
        ...

    def add_text(self, kind: TextKind, text: Part) -> None:
        """Text that was written by `delta`."""
        ...

    def fail(self, error: HeadraceError) -> list[Event]:
        """The events of an error in the running answer."""
        ...
