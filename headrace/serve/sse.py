"""Server-sent events over ASGI, with back-pressure.

Contract: nothing is buffered here: every write waits until the transport took it, so a slow client
slows its own request and no memory grows. A client that takes nothing for `send_timeout_s` counts
as gone (Cancelled). Used by `serve/answer.py`.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from headrace.errors import Cancelled

# A comment: clients skip it, proxies see life.
KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Reverse proxies must not collect events before they pass them on.
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """One response; `started` says whether the status has been sent."""

    def __init__(self, send: Send, send_timeout_s: float) -> None:
        self._send = send
        self._send_timeout_s = send_timeout_s
        self.started = False

    async def start(self) -> None:
        """Send status 200 and the headers."""
        self.started = True
        await self._write({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    async def write(self, frames: bytes) -> None:
        """Send events as they go over the wire, all in one write."""
        if frames:
            await self._write({"type": "http.response.body", "body": frames, "more_body": True})

    async def end(self) -> None:
        """End the response."""
        await self._write({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send(message)
        except TimeoutError:
            raise Cancelled(f"The client took nothing for {self._send_timeout_s:g} s.") from None
