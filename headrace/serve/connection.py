"""HTTP/1.1 connections that cannot be held open for nothing.

Contract: uvicorn's h11 protocol, plus a deadline for the head of every request: a connection that
has not sent a complete head `header_timeout_s` after it was opened, or after the first byte of a
later request, is closed. While a request is answered the connection is read on, so that the end of
the client is noticed; more than `MAX_PIPELINED_BYTES` of further requests end it. What is no HTTP
gets our error body. Used by `serve/run.py`; bodies have their own deadline (`serve/body.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.errors import InvalidRequest
from headrace.serve.errors import error_response

MAX_PIPELINED_BYTES = 64 * 2**10


def connection_class(header_timeout_s: float) -> type[H11Protocol]:
    """The protocol class with its deadline; uvicorn makes the instances."""

    class TimedConnection(H11Protocol):
        """One connection."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._head_deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # Bytes came, and still no request: its head is incomplete.
            if self.conn.their_state is h11.IDLE:
                self._expect_head()
            else:
                self._head_came()
            self._read_on()

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                for event in _bad_request(msg):
                    self.transport.write(self.conn.send(event))
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            super().connection_lost(exc)

        def _read_on(self) -> None:
            """uvicorn stops reading once a further request has begun to arrive."""
            if self.conn.their_state is not h11.DONE or self.transport.is_closing():
                return
            waiting, _ = self.conn.trailing_data
            if len(waiting) > MAX_PIPELINED_BYTES:
                self.transport.close()
            else:
                self.flow.resume_reading()

        def _expect_head(self) -> None:
            if self._head_deadline is None:
                self._head_deadline = self.loop.call_later(header_timeout_s, self._too_late)

        def _head_came(self) -> None:
            if self._head_deadline is not None:
                self._head_deadline.cancel()
                self._head_deadline = None

        def _too_late(self) -> None:
            self._head_deadline = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.close()

    return TimedConnection


def _bad_request(message: str) -> tuple[h11.Response, h11.Data, h11.EndOfMessage]:
    """What is no HTTP gets the same error body as every other bad request."""
    response = error_response(InvalidRequest(message), close=True)
    return (
        h11.Response(status_code=response.status_code, headers=response.raw_headers),
        h11.Data(data=bytes(response.body)),
        h11.EndOfMessage(),
    )
