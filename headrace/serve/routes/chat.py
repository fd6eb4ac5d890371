"""POST /v1/chat/completions.

Contract: body -> recipe -> engine -> events, streamed or complete. An error before the first byte
of the answer has its HTTP status; in a running stream it is an event `data: {"error": ...}` and the
stream ends. A client that goes away frees its request in the engine.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.engine.wire import rebuild_error
from headrace.errors import Cancelled, Draining, EngineLost, HeadraceError
from headrace.recipe.events.chat import DONE, ChatEvents, Usage
from headrace.recipe.parser import OutputParser
from headrace.recipe.protocols.chat import (
    ChatOptions,
    ChatRequest,
    parse_chat,
    resolve_max_tokens,
)
from headrace.serve.body import read_body
from headrace.serve.errors import error_body
from headrace.serve.generation import Generation
from headrace.serve.log import RequestRecord
from headrace.serve.middleware import RECORD
from headrace.serve.sse import EventStream
from headrace.serve.state import ServerState


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A chat request ready for the engine, with what turns its tokens into events."""

    chat: ChatRequest
    request: Request
    parser: OutputParser
    events: ChatEvents


class ChatRoute:
    """ASGI endpoint."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._options = ChatOptions(
            default_thinking_mode=state.config.default_thinking_mode,
            max_messages=state.config.max_messages,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state, record = self._state, scope[RECORD]
        record.route = "/v1/chat/completions"
        state.require_ready()
        with state.limits.hold(record.caller):
            body = await read_body(
                Headers(scope=scope),
                receive,
                max_bytes=state.config.max_body_bytes,
                timeout_s=state.config.body_timeout_s,
            )
            # Long prompts take seconds to encode: the event loop must not stand still for them.
            prepared = await state.encoders.run(self._prepare, body, receive)
            del body
            record.prompt_tokens = len(prepared.request.prompt_token_ids)
            async with Generation(state.engine, prepared.request, receive) as generation:
                answer = _Answer(state, record, prepared, generation)
                if prepared.chat.stream:
                    await answer.stream(EventStream(send, state.config.send_timeout_s))
                else:
                    response = await answer.complete()
                    await response(scope, receive, send)

    def _prepare(self, body: bytes) -> _Prepared:
        """Parse and encode; runs in a thread."""
        state = self._state
        chat = parse_chat(body, self._options)
        model = state.require_model(chat.model)
        prompt = state.codec.encode(chat.conversation, context_limit=model.max_model_len)
        max_tokens = resolve_max_tokens(
            chat.conversation, chat.sampling.max_tokens, len(prompt), model.max_model_len
        )
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        return _Prepared(
            chat=chat,
            request=Request(
                response_id, tuple(prompt), replace(chat.sampling, max_tokens=max_tokens)
            ),
            parser=state.codec.parser(chat.conversation),
            events=ChatEvents(
                response_id,
                model.id,
                int(time.time()),
                thinking=chat.conversation.thinking,
                include_usage=chat.include_usage,
            ),
        )


class _Answer:
    """Turns the chunks of one generation into a response."""

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        prepared: _Prepared,
        generation: Generation,
    ) -> None:
        self._state = state
        self._record = record
        self._prepared = prepared
        self._generation = generation

    async def complete(self) -> Response:
        """The whole answer as one JSON object."""
        parser, reasoning, content = self._prepared.parser, [], []
        finish: FinishReason | None = None
        while finish is None:
            chunk = await self._next(None)
            if chunk is None:
                continue
            finish = chunk.finish
            delta = parser.push(_shown(chunk))
            reasoning.append(delta.reasoning)
            content.append(delta.content)
        rest = parser.flush()
        body = self._prepared.events.complete(
            "".join([*reasoning, rest.reasoning]),
            "".join([*content, rest.content]),
            finish,
            self._usage(),
        )
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
        parser, events = self._prepared.parser, self._prepared.events
        finish: FinishReason | None = None
        while finish is None:
            chunk = await self._next(self._state.config.keep_alive_s)
            data: list[bytes] = []
            if not out.started:
                await out.start()
                data.append(events.start())
            if chunk is None:
                await out.events(data)
                await out.keep_alive()
                continue
            finish = chunk.finish
            data += events.delta(parser.push(_shown(chunk)))
            if finish is not None:
                data += events.delta(parser.flush())
                data += events.finish(finish, self._usage())
                data.append(DONE)
            await out.events(data)
        await out.end()

    async def _next(self, timeout_s: float | None) -> TokenChunk | None:
        """The next chunk; a chunk that ends the answer badly is raised as its error."""
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
        first_token_s = self._record.saw_tokens(len(chunk.tokens))
        if first_token_s is not None:
            self._state.metrics.first_token(first_token_s)
        return chunk

    def _usage(self) -> Usage:
        thinking = self._prepared.chat.conversation.thinking
        return Usage(
            prompt_tokens=len(self._prepared.request.prompt_token_ids),
            completion_tokens=self._record.completion_tokens or 0,
            reasoning_tokens=self._prepared.parser.reasoning_tokens if thinking else None,
        )

    def _bug(self, error: Exception) -> HeadraceError:
        self._state.logger.bug(self._record, error)
        return HeadraceError("The server failed on this request; its log says why.")


def _shown(chunk: TokenChunk) -> tuple[int, ...]:
    """Tokens that are text: the one that stopped the answer is not."""
    return chunk.tokens[:-1] if chunk.finish is FinishReason.STOP else chunk.tokens
