"""A small application around the codec alone: a scripted engine answers the golden decode cases.

The request names its case in the header `x-case`; the answer is that case's chunks, read at level
`clients` and sent as the protocol's own server would: events of `StreamBatch` for `stream: true`,
else the complete response. No engine, no limits: the codec is what SDKs see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.check.recipe_decode import chunk_from_json
from headrace.check.recipe_encode import options_of, parsing_from_json
from headrace.errors import HeadraceError
from headrace.recipe.converted import Protocol
from headrace.recipe.events.event import Event, sse_frame
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from headrace.recipe.protocols.errors_wire import error_body
from headrace.recipe.stream import AnswerStream, StreamBatch
from headrace.recipe.tokenizer import Tokenizer

PATHS = {
    "/v1/chat/completions": Protocol.CHAT,
    "/v1/responses": Protocol.RESPONSES,
    "/v1/messages": Protocol.MESSAGES,
}


def create_app(tokenizer: Tokenizer, cases: dict[str, dict[str, Any]]) -> Starlette:
    """The application; `cases` by id."""

    async def answer(request: Request) -> Response:
        protocol = PATHS[request.url.path]
        case = cases[request.headers["x-case"]]
        options = clients_options(case)
        try:
            converted = convert(protocol, await request.body(), options)
        except HeadraceError as error:
            status, body = error_body(error, protocol, options.level)
            return JSONResponse(body, status)
        stream = AnswerStream(
            converted,
            response_id=case["response_id"],
            model=converted.model,
            special=options.special,
            tokenizer=tokenizer if case["with_tokenizer"] else None,
            created=1_700_000_000,
            signature=case.get("signature"),
            parsing=parsing_from_json(case["parsing"]) if "parsing" in case else None,
            silent=not converted.stream,
        )
        if converted.stream:
            return StreamingResponse(frames(stream, case), media_type="text/event-stream")
        try:
            for value in case["chunks"]:
                if not stream.finished:
                    stream.push(chunk_from_json(value))
            stream.finish()
        except HeadraceError as error:
            status, body = error_body(error, protocol, options.level)
            return JSONResponse(body, status)
        return Response(stream.response(), media_type="application/json")

    return Starlette(routes=[Route(path, answer, methods=["POST"]) for path in PATHS])


def clients_options(case: dict[str, Any]) -> ConvertOptions:
    """The options of a case, at level `clients`."""
    official = options_of(case)
    return ConvertOptions(level=Level.CLIENTS, special=official.special)


async def frames(stream: AnswerStream, case: dict[str, Any]) -> AsyncIterator[bytes]:
    """The event stream of a case, chunk by chunk."""
    batch = StreamBatch()
    for value in case["chunks"]:
        if not stream.finished:
            yield batch.push([(stream, chunk_from_json(value))])[0]
    for event in stream.finish():
        yield sse_frame(event)
    if stream.sse_done is not None:
        yield sse_frame(Event(None, stream.sse_done))


class RecipeServer:
    """The application on a free loopback port; a context manager."""

    def __init__(self, tokenizer: Tokenizer, cases: dict[str, dict[str, Any]]) -> None:
        app = create_app(tokenizer, cases)
        config = uvicorn.Config(app, "127.0.0.1", 0, lifespan="off", log_config=None, ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self.url = ""

    def __enter__(self) -> RecipeServer:
        self._thread.start()
        end = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
