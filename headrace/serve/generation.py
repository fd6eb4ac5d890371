"""One request in the engine, watched together with its client.

Contract: `Generation` gives the chunks of the request one by one; when the client goes away it
raises Cancelled at once, and leaving its context ends the request in the engine if it still runs.
Nothing is fetched before it is asked for, so a slow client holds up only its own request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from starlette.types import Receive

from headrace.core.output import TokenChunk
from headrace.core.request import Request
from headrace.errors import Cancelled, EngineLost
from headrace.serve.encoding import until_disconnect
from headrace.serve.engine_client import EngineClient


class Generation:
    """Async context manager around a submitted request."""

    def __init__(self, engine: EngineClient, request: Request, receive: Receive) -> None:
        self._engine = engine
        self._request = request
        self._receive = receive
        self._chunks: AsyncIterator[TokenChunk] | None = None
        self._pending: asyncio.Task[TokenChunk | None] | None = None
        self._client_gone: asyncio.Task[None] | None = None
        self._unfinished = request.sampling.n
        self._ended = False

    async def __aenter__(self) -> Generation:
        self._client_gone = asyncio.create_task(until_disconnect(self._receive))
        self._chunks = self._engine.submit(self._request)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks = [task for task in (self._client_gone, self._pending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._ended:
            await self._engine.abort(self._request.request_id)
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()

    async def next(self, timeout_s: float | None = None) -> TokenChunk | None:
        """The next chunk, or None after `timeout_s` without one.

        Raises Cancelled when the client is gone, and what `EngineClient.submit` raises.
        """
        if self._chunks is None or self._client_gone is None:
            raise RuntimeError("Generation is used outside its context")
        if self._pending is None:
            self._pending = asyncio.create_task(_next_or_none(self._chunks))
        done, _ = await asyncio.wait(
            {self._pending, self._client_gone},
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._client_gone in done:
            raise Cancelled("The client went away.")
        if self._pending not in done:
            return None
        task, self._pending = self._pending, None
        try:
            chunk = task.result()
        except BaseException:
            self._ended = True  # refused or lost: there is nothing to abort
            raise
        if chunk is None:
            self._ended = True
            raise EngineLost("The engine ended the answer without saying why.")
        if chunk.finish is not None:
            self._unfinished -= 1
        self._ended = self._unfinished == 0
        return chunk


async def _next_or_none(chunks: AsyncIterator[TokenChunk]) -> TokenChunk | None:
    return await anext(chunks, None)
