"""The chunks of one request turned into its response, streamed or complete, in any protocol.

Contract: chunks of several choices come mixed and go out as they come; the answer has ended when
all its choices have. An error of one choice is the error of the request: before the first byte of
the answer it has its HTTP status, in a running stream it is an event and the stream ends. Called by
`serve/routes/answers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.errors import (
    Cancelled,
    Draining,
    EngineLost,
    HeadraceError,
    InvalidGrammar,
    InvalidRequest,
    rebuild_error,
)
from headrace.recipe.chunks import Chunk, DraftCounts, EngineFinish, Finish, Ready, Stopped, Tokens
from headrace.recipe.converted import ConvertedRequest, Protocol
from headrace.recipe.events.event import Event, sse_frame
from headrace.recipe.protocols.responses_store import ResponseStore, remember
from headrace.recipe.stream import AnswerStream, StreamBatch
from headrace.serve.generation import Generation
from headrace.serve.log import RequestRecord
from headrace.serve.sse import KEEP_ALIVE, EventStream
from headrace.serve.state import ServerState

_PING = sse_frame(Event("ping", b'{"type":"ping"}'))
_REASONS = {FinishReason.STOP: EngineFinish.STOP, FinishReason.LENGTH: EngineFinish.LENGTH}


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """A request ready for the engine, with what reads its answer.

    store: where the answer is kept if the request wants that.
    """

    converted: ConvertedRequest
    request: Request
    stream: AnswerStream
    store: ResponseStore | None = None


class _Output(msgspec.Struct):
    """The items of a complete response."""

    output: list[dict[str, object]]


class Answer:
    """Turns the chunks of one generation into a response."""

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        prepared: PreparedAnswer,
        generation: Generation,
    ) -> None:
        self._state = state
        self._record = record
        self._prepared = prepared
        self._stream = prepared.stream
        self._generation = generation
        self._begun: set[int] = set()  # choices that have said something
        self._unfinished = len(prepared.stream.lanes)

    async def complete(self) -> Response:
        """The whole answer as one JSON object."""
        while self._unfinished:
            chunk = await self._next(None)
            if chunk is not None:
                for part in self._parts(chunk):
                    self._stream.push(part, chunk.choice)
        body = self._stream.response()
        self._remember(body)
        return Response(body, media_type="application/json")

    async def stream(self, out: EventStream) -> None:
        """Events as they come."""
        try:
            await self._events(out)
        except Cancelled:
            raise
        except Exception as raised:
            # Until the first event is out, an error still gets its own HTTP status.
            if not out.started:
                raise
            error = raised if isinstance(raised, HeadraceError) else self._bug(raised)
            self._record.code = error.code
            await out.write(b"".join(map(sse_frame, self._failure(error))))
            await out.end()

    async def _events(self, out: EventStream) -> None:
        batch, lanes, done = StreamBatch(), self._stream.lanes, self._stream.sse_done
        while self._unfinished:
            chunk = await self._next(self._state.config.keep_alive_s)
            if not out.started:
                await out.start()
            if chunk is None:
                await out.write(self._sign_of_life())
                continue
            lane = lanes[chunk.choice]
            frames = batch.push((lane, part) for part in self._parts(chunk))
            if lane.failed:
                # The batch has made the error the last event.
                self._record.code = HeadraceError.code
                await out.write(b"".join(frames))
                break
            if not self._unfinished:
                if self._stores:
                    # Before the client can go on with it.
                    self._remember(self._stream.response())
                if done is not None:
                    frames.append(sse_frame(Event(None, done)))
            await out.write(b"".join(frames))
        await out.end()

    def _parts(self, chunk: TokenChunk) -> Iterator[Chunk]:
        """What a chunk says, as the codec takes it; the token that stopped it is no text."""
        if chunk.choice not in self._begun:
            self._begun.add(chunk.choice)
            yield Ready(self._record.prompt_tokens or 0, chunk.cached_tokens)
        ids = chunk.text_tokens
        logprobs = None if chunk.logprobs is None else chunk.logprobs[: len(ids)]
        drafts = DraftCounts(chunk.accepted_drafts, chunk.rejected_drafts)
        if isinstance(chunk.stop, str):
            yield Stopped(ids, chunk.stop, chunk.stop_cut, logprobs, drafts)
            return
        if ids:
            yield Tokens(ids, logprobs)
        if chunk.finish is not None:
            yield Finish(_REASONS[chunk.finish], len(chunk.tokens) - len(ids), drafts)

    async def _next(self, timeout_s: float | None) -> TokenChunk | None:
        """The next chunk; a chunk that ends its choice badly is raised as its error."""
        try:
            chunk = await self._generation.next(timeout_s)
        except InvalidGrammar as error:
            raise self._named(error) from None
        if chunk is None:
            return None
        if chunk.finish is FinishReason.ERROR:
            raise self._named(
                rebuild_error(
                    chunk.error_code or HeadraceError.code, chunk.error or "The engine failed."
                )
            )
        if chunk.finish is FinishReason.ABORT:
            if self._state.draining:
                raise Draining("The server shut down before the answer was complete.")
            raise EngineLost("The engine gave up the answer.")
        if chunk.finish is not None:
            self._unfinished -= 1
        first_token_s = self._record.saw_tokens(len(chunk.tokens))
        if first_token_s is not None:
            self._state.metrics.first_token(first_token_s)
        return chunk

    def _named(self, error: HeadraceError) -> HeadraceError:
        """An error of the engine, with the field of the request that it is about."""
        rules = self._prepared.converted.rules
        if isinstance(error, InvalidGrammar) and rules is not None:
            error.param = "tools" if rules.format is None else rules.format.path
        elif isinstance(error, InvalidRequest) and error.param is None:
            # Of all fields that the engine refuses while it draws, the only one of HTTP.
            error.param = "allowed_token_ids"
        return error

    def _sign_of_life(self) -> bytes:
        pings = self._prepared.converted.protocol is Protocol.MESSAGES
        # A message begins with its `message_start`, so until then it is a comment there too.
        return _PING if pings and self._begun else KEEP_ALIVE

    def _failure(self, error: HeadraceError) -> list[Event]:
        """The events of an error in a stream."""
        events: list[Event] = []
        if not self._begun and self._prepared.converted.protocol is not Protocol.CHAT:
            events += self._stream.push(Ready(self._record.prompt_tokens or 0))
        return events + self._stream.fail(error)

    @property
    def _stores(self) -> bool:
        prepared = self._prepared
        return prepared.store is not None and prepared.converted.protocol is Protocol.RESPONSES

    def _remember(self, body: bytes) -> None:
        prepared = self._prepared
        if prepared.store is None or not self._stores:
            return
        settings = prepared.converted.settings
        if settings.input_items is not None:
            output = msgspec.json.decode(body, type=_Output).output
            remember(prepared.store, prepared.request.request_id, settings, output)

    def _bug(self, error: Exception) -> HeadraceError:
        self._state.logger.bug(self._record, error)
        return HeadraceError("The server failed on this request; its log says why.")
