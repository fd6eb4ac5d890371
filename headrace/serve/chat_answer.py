"""The chunks of one chat request turned into its response, streamed or complete.

Contract: chunks of several choices come mixed and go out as they come; the answer has ended when
all its choices have. An error of one choice is the error of the request: before the first byte of
the answer it has its HTTP status, in a running stream it is an event and the stream ends. Called by
`serve/routes/chat.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.engine.wire import rebuild_error
from headrace.errors import Cancelled, Draining, EngineLost, HeadraceError
from headrace.recipe.events.chat import DONE, ChatEvents, NewTokens, Usage, WholeChoice
from headrace.recipe.parser import OutputParser
from headrace.recipe.protocols.chat import ChatRequest
from headrace.serve.errors import error_body
from headrace.serve.generation import Generation
from headrace.serve.log import RequestRecord
from headrace.serve.sse import EventStream
from headrace.serve.state import ServerState


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat request ready for the engine, with what turns its tokens into events.

    parsers: one per choice.
    """

    chat: ChatRequest
    request: Request
    parsers: list[OutputParser]
    events: ChatEvents


class ChatAnswer:
    """Turns the chunks of one generation into a response."""

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        prepared: PreparedChat,
        generation: Generation,
    ) -> None:
        self._state = state
        self._record = record
        self._prepared = prepared
        self._generation = generation
        self._unfinished = len(prepared.parsers)

    async def complete(self) -> Response:
        """The whole answer as one JSON object."""
        choices = [WholeChoice() for _ in self._prepared.parsers]
        while self._unfinished:
            chunk = await self._next(None)
            if chunk is not None:
                choices[chunk.choice].parts.append(self._new_tokens(chunk))
                choices[chunk.choice].finish = chunk.finish
        body = self._prepared.events.complete(choices, self._usage())
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
            await out.events([error_body(error)])
            await out.end()

    async def _events(self, out: EventStream) -> None:
        events = self._prepared.events
        while self._unfinished:
            chunk = await self._next(self._state.config.keep_alive_s)
            data: list[bytes] = []
            if not out.started:
                await out.start()
                data += [events.start(choice) for choice in range(len(self._prepared.parsers))]
            if chunk is None:
                await out.events(data)
                await out.keep_alive()
                continue
            data += events.delta(self._new_tokens(chunk), chunk.choice)
            if chunk.finish is not None:
                data.append(events.finish(chunk.finish, chunk.choice))
            if not self._unfinished:
                data += events.usage(self._usage())
                data.append(DONE)
            await out.events(data)
        await out.end()

    def _new_tokens(self, chunk: TokenChunk) -> NewTokens:
        """What a chunk adds to its choice; the token that stopped it is no text."""
        parser, ids = self._prepared.parsers[chunk.choice], chunk.text_tokens
        if chunk.finish is None:
            delta = parser.push(ids)
        else:
            delta = parser.finish(ids, chunk.stop_cut if isinstance(chunk.stop, str) else None)
        return NewTokens(delta, ids, None if chunk.logprobs is None else chunk.logprobs[: len(ids)])

    async def _next(self, timeout_s: float | None) -> TokenChunk | None:
        """The next chunk; a chunk that ends its choice badly is raised as its error."""
        chunk = await self._generation.next(timeout_s)
        if chunk is None:
            return None
        if chunk.finish is FinishReason.ERROR:
            raise rebuild_error(
                chunk.error_code or HeadraceError.code, chunk.error or "The engine failed."
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

    def _usage(self) -> Usage:
        parsers = self._prepared.parsers
        thinking = self._prepared.chat.conversation.thinking
        return Usage(
            prompt_tokens=len(self._prepared.request.prompt_token_ids),
            completion_tokens=self._record.completion_tokens or 0,
            reasoning_tokens=sum(p.reasoning_tokens for p in parsers) if thinking else None,
        )

    def _bug(self, error: Exception) -> HeadraceError:
        self._state.logger.bug(self._record, error)
        return HeadraceError("The server failed on this request; its log says why.")
