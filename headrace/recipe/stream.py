"""Engine output -> events: one `AnswerStream` per request, `StreamBatch` for a whole engine step.

Contract: `push` takes what the engine says about one choice and gives the events that follow from
it; `response` gives the complete response of everything so far, which is how complete answers are
made. `StreamBatch.push` gives the same events for many streams as bytes that are ready to be sent;
it writes most of them from prepared parts, without the parser. Used by the server and the command
line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.recipe.chunks import Chunk, Tokens
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.converted import ConvertedRequest, ParsingOptions
from headrace.recipe.converted import Protocol as WireProtocol
from headrace.recipe.events.chat import ChatAnswer
from headrace.recipe.events.event import AnswerContext, Event, Writer
from headrace.recipe.events.messages import MessagesAnswer
from headrace.recipe.events.responses import ResponsesAnswer
from headrace.recipe.lane import Lane
from headrace.recipe.parser.parser import OutputParser
from headrace.recipe.tokenizer import Tokenizer


class _Answer(Protocol):
    """The writers of an answer, one per choice, and what they make together."""

    @property
    def done(self) -> bytes | None: ...

    @property
    def writers(self) -> Sequence[Writer]: ...

    def response(self) -> bytes: ...


_ANSWERS: dict[WireProtocol, Callable[[AnswerContext, int], _Answer]] = {
    WireProtocol.CHAT: ChatAnswer,
    WireProtocol.RESPONSES: ResponsesAnswer,
    WireProtocol.MESSAGES: MessagesAnswer,
}


class AnswerStream:
    """The answer to one request.

    silent: no events are wanted, only `response`. parsing: another way to read the output than the
    one the request asks for. lanes: one per choice; `lane` is the first. `sse_done`: data that ends
    the stream after the last event, if the protocol has any.
    """

    def __init__(
        self,
        converted: ConvertedRequest,
        *,
        response_id: str,
        model: str,
        special: SpecialTokens,
        tokenizer: Tokenizer | None,
        created: int | None = None,
        signature: str | None = None,
        parsing: ParsingOptions | None = None,
        silent: bool = False,
    ) -> None:
        context = AnswerContext(
            converted=converted,
            response_id=response_id,
            model=model,
            created=int(time.time()) if created is None else created,
            token_bytes=_no_bytes if tokenizer is None else tokenizer.token_bytes,
            signature=signature,
            silent=silent,
        )
        parsing = converted.parsing if parsing is None else parsing
        self._answer = _ANSWERS[converted.protocol](context, converted.inference.n)
        self.lanes = [
            Lane(
                OutputParser(parsing, special, converted.level, tokenizer),
                writer,
                tokenizer,
                # The parser of level `clients` holds back nothing but what may begin a marker.
                splits=not context.official,
                silent=silent,
            )
            for writer in self._answer.writers
        ]
        self.lane = self.lanes[0]
        self.sse_done = self._answer.done

    def push(self, chunk: Chunk, choice: int = 0) -> list[Event]:
        """Events that follow from a chunk. Raises StreamError for a bad chunk, or after the end."""
        return self.lanes[choice].push(chunk)

    def finish(self, choice: int = 0) -> list[Event]:
        """Events of the end of input; none when the choice has ended already."""
        return self.lanes[choice].finish()

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(lane.finished for lane in self.lanes)

    def fail(self, error: HeadraceError) -> list[Event]:
        """The events of an error; nothing can be pushed after it."""
        events = self.lane.fail(error)
        for lane in self.lanes:
            lane.failed = True
        return events

    def response(self) -> bytes:
        """The complete response, JSON, of everything so far."""
        for lane in self.lanes:
            lane.settle()
        return self._answer.response()


class StreamBatch:
    """All requests of one engine step in one call."""

    def push(self, steps: Iterable[tuple[AnswerStream | Lane, Chunk]]) -> list[bytes]:
        """For each step the events it leads to, as server-sent events in one piece.

        A step names a stream with one choice, or a lane of a stream. An error of a stream becomes
        its last event.
        """
        frames: list[bytes] = []
        add, join = frames.append, b"".join
        for stream, chunk in steps:
            lane = stream.lane
            get = lane.get
            # Everything of the short cut that is frequent is written out: a call costs a third.
            if get is not None and type(chunk) is Tokens and chunk.logprobs is None and chunk.ids:
                ids = chunk.ids
                try:
                    if lane.numbered:
                        end = b"%d}\n\n" % lane.writer.number
                        frame = join((lane.head, *map(get, ids), lane.tail, end))  # type: ignore[arg-type]
                    elif len(ids) == 1:
                        frame = lane.head + get(ids[0]) + lane.tail  # type: ignore[operator]
                    else:
                        frame = join((lane.head, *map(get, ids), lane.tail))  # type: ignore[arg-type]
                except TypeError:
                    pass  # one of the ids is None: the parser has to see it
                else:
                    if lane.held or ids[-1] in lane.ends:
                        held = lane.hold(ids)
                        if held is not None:
                            add(held)
                            continue
                    else:
                        lane.run += ids
                        if lane.numbered:
                            lane.writer.number += 1
                        add(b"" if lane.silent else frame)
                        continue
            add(lane.push_frames(chunk))
        return frames


def _no_bytes(_: int) -> bytes:
    return b""
