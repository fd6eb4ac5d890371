"""What surrounds every request: its record, its key, its errors, its log line.

Contract: outermost layer of the application. Every HeadraceError and every bug of the inner layers
becomes a response here (or a closed connection once a response has begun); nothing reaches the HTTP
server as an exception except cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.serve.errors import (
    error_response,
    from_http_exception,
    internal_error,
    protocol_of,
)
from headrace.serve.log import RequestRecord
from headrace.serve.state import ServerState

RECORD = "headrace.record"
_OPEN_PREFIX = "/health/"
_CLIENT_CLOSED = 499
# Read beyond the limit of bodies before a refused request is answered, and for how long at most.
_DISCARD_MARGIN_BYTES = 8 * 2**20
_DISCARD_TIMEOUT_S = 10.0


class RequestScope:
    """ASGI middleware; puts a RequestRecord into the scope under `RECORD`."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request (other scopes, such as lifespan, pass through)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope["method"], scope["path"])
        scope[RECORD] = record
        outgoing = _Outgoing(record, receive, send)
        self._state.metrics.began()
        try:
            await self._run(scope, outgoing, record)
        except asyncio.CancelledError:
            record.status = _CLIENT_CLOSED
            raise
        finally:
            self._state.metrics.ended(record)
            self._state.logger.request(record)

    async def _run(self, scope: Scope, outgoing: _Outgoing, record: RequestRecord) -> None:
        extra_headers: Mapping[str, str] | None = None
        try:
            if not record.path.startswith(_OPEN_PREFIX):
                record.caller = self._state.keys.check(Headers(scope=scope))
            await self._app(scope, outgoing.receive, outgoing.send)
            return
        except HeadraceError as raised:
            error = raised
        except HTTPException as raised:
            error = from_http_exception(raised, record.method, record.path)
            extra_headers = raised.headers
        except Exception as raised:
            self._state.logger.bug(record, raised)
            error = internal_error(record.id)
        record.code = error.code
        if error.http_status == _CLIENT_CLOSED:
            record.status = _CLIENT_CLOSED
            await outgoing.hang_up()
        elif not outgoing.started:
            if "expect" not in Headers(scope=scope):
                config = self._state.config
                await outgoing.discard_body(
                    config.max_body_bytes + _DISCARD_MARGIN_BYTES,
                    min(config.body_timeout_s, _DISCARD_TIMEOUT_S),
                )
            response = error_response(
                error,
                protocol_of(record.path),
                close=not outgoing.body_read,
                extra_headers=extra_headers,
            )
            await response(scope, outgoing.receive, outgoing.send)
        else:
            record.status = error.http_status
            await outgoing.hang_up()


class _Outgoing:
    """`receive` and `send` of one request that note what went through them."""

    def __init__(self, record: RequestRecord, receive: Receive, send: Send) -> None:
        self._record = record
        self._receive = receive
        self._send = send
        self.started = False
        self.ended = False
        self.body_read = record.method in ("GET", "HEAD")

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.body_read = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._record.status = message["status"]
            request_id = self._record.id.encode()
            # The second name is the one that Anthropic's SDK reads.
            headers = [
                *message.get("headers", ()),
                (b"x-request-id", request_id),
                (b"request-id", request_id),
            ]
            message = {**message, "headers": headers}
        elif not message.get("more_body", False):
            self.ended = True
        await self._send(message)

    async def discard_body(self, left_bytes: int, timeout_s: float) -> None:
        """Read and forget the rest of a body, within bounds of size and time.

        Closing a connection while its client still sends makes the kernel throw the error response
        away; most clients send little more than the limit, and then get to read it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while left_bytes > 0 and not self.body_read:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        return
                    left_bytes -= len(message.get("body", b""))
        except TimeoutError:
            return

    async def hang_up(self) -> None:
        """End a response that cannot be completed, so that the server does not call it a bug."""
        status = self._record.status
        if not self.started:
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await self.send({"type": "http.response.start", "status": status, "headers": headers})
        if not self.ended:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        self._record.status = status
