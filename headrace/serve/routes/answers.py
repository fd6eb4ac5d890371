"""POST /v1/chat/completions, /v1/responses, /v1/messages and /v1/messages/count_tokens.

Contract: body -> recipe -> engine -> events, streamed or complete; the routes differ in their
protocol alone. An error before the first byte of the answer has its HTTP status; in a running
stream it is an event and the stream ends. A client that goes away frees its request in the engine.
"""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.request import Request
from headrace.errors import InvalidBody, InvalidRequest
from headrace.recipe.converted import ConvertedRequest, Protocol
from headrace.recipe.protocols.convert import convert
from headrace.recipe.protocols.responses import convert_responses
from headrace.recipe.protocols.responses_store import ResponseStore
from headrace.serve.answer import Answer, PreparedAnswer
from headrace.serve.body import read_body
from headrace.serve.generation import Generation
from headrace.serve.middleware import RECORD
from headrace.serve.sse import EventStream
from headrace.serve.state import ModelCard, ServerState
from headrace.serve.stored import CallerStore
from headrace.serve.supported import check_supported

PATHS = {
    Protocol.CHAT: "/v1/chat/completions",
    Protocol.RESPONSES: "/v1/responses",
    Protocol.MESSAGES: "/v1/messages",
}
COUNT_PATH = "/v1/messages/count_tokens"
_ID_PREFIXES = {Protocol.CHAT: "chatcmpl-", Protocol.RESPONSES: "resp_", Protocol.MESSAGES: "msg_"}


class _Named(msgspec.Struct):
    """The name of the model alone."""

    model: str


class AnswerRoute:
    """ASGI endpoint of one protocol."""

    def __init__(self, state: ServerState, protocol: Protocol) -> None:
        self._state = state
        self._protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state, record = self._state, scope[RECORD]
        record.route = PATHS[self._protocol]
        state.require_ready()
        with state.limits.hold(record.caller):
            body = await _read(state, scope, receive)
            store = None if state.responses is None else CallerStore(state.responses, record.caller)

            def prepare(body: bytes) -> PreparedAnswer:
                return self._prepare(body, store)

            # Long prompts take seconds to encode: the event loop must not stand still for them.
            prepared = await state.encoders.run(prepare, body, receive)
            del body
            record.prompt_tokens = len(prepared.request.prompt_token_ids)
            async with Generation(state.engine, prepared.request, receive) as generation:
                answer = Answer(state, record, prepared, generation)
                if prepared.converted.stream:
                    await answer.stream(EventStream(send, state.config.send_timeout_s))
                else:
                    response = await answer.complete()
                    await response(scope, receive, send)

    def _prepare(self, body: bytes, store: ResponseStore | None) -> PreparedAnswer:
        """Parse and encode; runs in a thread."""
        codec = self._state.codec
        converted, model = _convert(self._state, self._protocol, body, store)
        prompt = codec.encode(converted, context_limit=model.max_model_len)
        sampling = codec.sampling(converted, len(prompt), model.max_model_len)
        response_id = f"{_ID_PREFIXES[self._protocol]}{uuid.uuid4().hex}"
        stream = codec.answer(
            converted, response_id=response_id, model=model.id, created=int(time.time())
        )
        return PreparedAnswer(
            converted, Request(response_id, tuple(prompt), sampling), stream, store
        )


class CountRoute:
    """ASGI endpoint that says how many tokens the prompt of a Messages request has."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state, record = self._state, scope[RECORD]
        record.route = COUNT_PATH
        state.require_ready()
        with state.limits.hold(record.caller):
            body = await _read(state, scope, receive)
            tokens = await state.encoders.run(self._count, body, receive)
            response = Response(
                msgspec.json.encode({"input_tokens": tokens}), media_type="application/json"
            )
            await response(scope, receive, send)

    def _count(self, body: bytes) -> int:
        return self._state.codec.count(_convert(self._state, Protocol.MESSAGES, body, None)[0])


async def _read(state: ServerState, scope: Scope, receive: Receive) -> bytes:
    config = state.config
    return await read_body(
        Headers(scope=scope),
        receive,
        max_bytes=config.max_body_bytes,
        timeout_s=config.body_timeout_s,
    )


def _convert(
    state: ServerState, protocol: Protocol, body: bytes, store: ResponseStore | None
) -> tuple[ConvertedRequest, ModelCard]:
    """The request, which names our model and asks for nothing that is not there."""
    model, config = state.require_ready(), state.config
    options = state.codec.options(
        model.id,
        default_thinking_mode=config.default_thinking_mode,
        max_messages=config.max_messages,
        context_limit=model.max_model_len,
    )
    try:
        if protocol is Protocol.RESPONSES:
            converted = convert_responses(body, options, store)
        else:
            converted = convert(protocol, body, options)
    except InvalidRequest as error:
        if error.param == "model" and not isinstance(error, InvalidBody):
            # The name of another model: 404 here, where the codec knows only its table.
            state.require_model(msgspec.json.decode(body, type=_Named).model)
        raise
    check_supported(converted)
    return converted, model
