"""Makes streams and runs chunks through them, for the tests of events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from headrace.recipe.chunks import Chunk
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.events.event import Event
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from headrace.recipe.stream import AnswerStream
from tests.unit.recipe import golden

MODEL = "DeepSeek-V4.1-Flash"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
MARK = "｜DSML｜"


def body(protocol: str, *, thinking: bool = False, call: bool = False, **more: Any) -> Any:
    """A streamed request. call: the tool `f` is offered."""
    request: dict[str, Any] = {"model": MODEL, "stream": True}
    if protocol == "responses":
        request |= {"input": "hi", "reasoning": {"effort": "high" if thinking else "none"}}
        tool: Any = {"type": "function", "name": "f", "parameters": SCHEMA}
    else:
        request["messages"] = [{"role": "user", "content": "hi"}]
        request["thinking"] = {"type": "enabled" if thinking else "disabled"}
        tool = {"name": "f", "input_schema": SCHEMA}
        if protocol == "chat":
            tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
        else:
            request["max_tokens"] = 99
    if call:
        request["tools"] = [tool]
    return request | more


def stream(
    protocol: str, request: Any, level: Level = Level.CLIENTS, *, ids: bool = False, **more: Any
) -> AnswerStream:
    """A fresh stream. ids: chunks of ids may come."""
    converted = convert(protocol, json.dumps(request).encode(), ConvertOptions(level=level))
    return AnswerStream(
        converted,
        response_id="r",
        model=MODEL,
        special=SpecialTokens(),
        tokenizer=golden.real_tokenizer() if ids else None,
        created=7,
        **more,
    )


def run(answer: AnswerStream, chunks: Iterable[Chunk], choice: int = 0) -> list[Event]:
    """All events of the chunks of a choice."""
    events: list[Event] = []
    for chunk in chunks:
        events += answer.push(chunk, choice)
    return events + answer.finish(choice)


def data(events: Iterable[Event]) -> list[Any]:
    """The parsed data of events."""
    return [json.loads(event.data) for event in events]


def call(name: str = "f", arguments: str | None = None) -> str:
    """A block with one call; arguments: its parameters as markup."""
    if arguments is None:
        arguments = f'<{MARK} parameter name="a" string="true">x</{MARK} parameter>\n'
    return (
        f'<{MARK} calls>\n<{MARK} invoke name="{name}">\n{arguments}</{MARK} invoke>\n'
        f"</{MARK} calls>"
    )


def fixed(text: bytes) -> bytes:
    """Without what differs from run to run."""
    text = re.sub(rb"call_(\d\d)_(ET_)?\w{24}", rb"call_\1_\2R", text)
    return re.sub(rb'"completed_at":\d+', b'"completed_at":0', text)
