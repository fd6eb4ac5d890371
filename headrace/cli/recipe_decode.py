"""`headrace recipe decode`: the output of a model -> a response or its events.

Contract: without a request the output is read as the answer to a chat request in which the model
may reason and call any tool. An error of the stream becomes its last event, as a server sends it.
Used by `cli/recipe.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.cli import recipe_input
from headrace.errors import HeadraceError, InvalidRequest
from headrace.recipe.chunks import Finish, Ready, Tokens
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.events.event import Event, sse_frame
from headrace.recipe.protocols.convert import convert
from headrace.recipe.stream import AnswerStream

_MODEL = "DeepSeek-V4.1-Flash"
_REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "?"}]},
    "responses": {"input": "?"},
    "messages": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1},
}


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What the flags of `headrace recipe decode` say."""

    file: Path | None
    request: Path | None
    tokenizer: Path | None
    input_format: str | None
    protocol: Literal["chat", "responses", "messages"] | None
    thinking: bool
    level: str
    model_version: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Either the complete response or the events, and the data that ends the stream."""

    response: bytes | None
    events: tuple[Event, ...] = ()
    done: bytes | None = None

    def lines(self, as_json: bool) -> Iterator[str]:
        """What is printed."""
        if self.response is not None:
            value = json.loads(self.response)
            yield json.dumps(value, ensure_ascii=False, indent=None if as_json else 2) + "\n"
            return
        for event in self.events:
            if as_json:
                line = {"event": event.name, "data": json.loads(event.data)}
                yield json.dumps(line, ensure_ascii=False) + "\n"
            else:
                yield sse_frame(event).decode()
        if self.done is not None and not as_json:
            yield sse_frame(Event(None, self.done)).decode()


def answer_of(options: DecodeOptions, *, complete: bool) -> Answer:
    """Decode the output. complete: the response is wanted, not the events."""
    chunks = list(
        recipe_input.read_answer(recipe_input.read_input(options.file), options.input_format)
    )
    if options.tokenizer is None and any(isinstance(chunk, Tokens) for chunk in chunks):
        raise InvalidRequest(
            "The output is ids, which need a tokenizer: --tokenizer DIR (a checkpoint) or FILE. "
            "(If it is text: --input-format text.)"
        )
    stream = _stream(options, complete)
    events: list[Event] = []
    try:
        if not any(isinstance(chunk, Ready) for chunk in chunks):
            events += stream.push(Ready())
        for chunk in chunks:
            if stream.finished:  # a stop sequence came; an engine would have stopped too
                break
            events += stream.push(chunk)
        if not stream.finished and not any(isinstance(chunk, Finish) for chunk in chunks):
            events += stream.push(Finish())
        events += stream.finish()
    except HeadraceError as error:
        events += stream.fail(error)
    if complete:
        return Answer(stream.response())
    return Answer(None, tuple(events), stream.sse_done)


def _stream(options: DecodeOptions, complete: bool) -> AnswerStream:
    tokenizer = options.tokenizer
    encoder = None if tokenizer is None else recipe_input.read_tokenizer(tokenizer)
    parsing = None
    if options.request is None:
        protocol = options.protocol or "chat"
        body = json.dumps({"model": _MODEL, **_REQUESTS[protocol]}).encode()
        stage = ThinkingStage.REASONING_START if options.thinking else None
        parsing = ParsingOptions(parse_tool_calls=True, thinking_stage=stage)
    else:
        body = recipe_input.read_input(options.request)
        given = recipe_input.given_request(body, options.protocol).protocol
        if given == "conversation":
            raise InvalidRequest(
                "A conversation says nothing about its answer: give the request of a protocol."
            )
        protocol = given
    settings = recipe_input.convert_options(body, options.level, options.model_version, encoder)
    converted = dataclasses.replace(convert(protocol, body, settings), stream=not complete)
    return AnswerStream(
        converted,
        response_id="response",
        model=converted.model,
        special=settings.special,
        tokenizer=encoder,
        parsing=parsing,
        silent=complete,
    )
