"""POST /v1/chat/completions.

Contract: body -> recipe -> engine -> events, streamed or complete. An error before the first byte
of the answer has its HTTP status; in a running stream it is an event `data: {"error": ...}` and the
stream ends. A client that goes away frees its request in the engine.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from headrace.core.request import Request
from headrace.recipe.events.chat import ChatEvents
from headrace.recipe.protocols.chat import ChatOptions, parse_chat, resolve_max_tokens
from headrace.serve.body import read_body
from headrace.serve.chat_answer import ChatAnswer, PreparedChat
from headrace.serve.generation import Generation
from headrace.serve.middleware import RECORD
from headrace.serve.sse import EventStream
from headrace.serve.state import ServerState


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
                answer = ChatAnswer(state, record, prepared, generation)
                if prepared.chat.stream:
                    await answer.stream(EventStream(send, state.config.send_timeout_s))
                else:
                    response = await answer.complete()
                    await response(scope, receive, send)

    def _prepare(self, body: bytes) -> PreparedChat:
        """Parse and encode; runs in a thread."""
        state = self._state
        chat = parse_chat(body, self._options)
        model = state.require_model(chat.model)
        prompt = state.codec.encode(chat.conversation, context_limit=model.max_model_len)
        max_tokens = resolve_max_tokens(
            chat.conversation, chat.sampling.max_tokens, len(prompt), model.max_model_len
        )
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        sampling = replace(
            chat.sampling,
            max_tokens=max_tokens,
            min_tokens=min(chat.sampling.min_tokens, max_tokens),
            stop_scope=state.codec.stop_scope(chat.conversation),
        )
        return PreparedChat(
            chat=chat,
            request=Request(response_id, tuple(prompt), sampling),
            parsers=[
                state.codec.parser(chat.conversation, sampling.stop) for _ in range(sampling.n)
            ],
            events=ChatEvents(
                response_id,
                model.id,
                int(time.time()),
                thinking=chat.conversation.thinking,
                token_bytes=state.codec.tokenizer.token_bytes,
                include_usage=chat.include_usage,
            ),
        )
