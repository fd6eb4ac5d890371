"""The engine as the server sees it.

Contract: the server knows an engine only by this protocol. `engine/process.py` implements it with a
process of its own; tests implement it with scripted answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from headrace.core.output import TokenChunk
from headrace.core.request import Request
from headrace.engine.stats import EngineStats


class EngineFacts(Protocol):
    """What a loaded engine says about itself."""

    @property
    def model_name(self) -> str:
        """Name under which it is served."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt plus answer."""
        ...


class EngineClient(Protocol):
    """Submits requests to one engine and hears its answers."""

    @property
    def ready(self) -> bool:
        """False while the engine loads, restarts or is gone."""
        ...

    @property
    def restarts(self) -> int:
        """How often the engine was started again after it was lost."""
        ...

    def submit(self, request: Request) -> AsyncIterator[TokenChunk]:
        """Chunks of one request.

        Before the first one: InvalidRequest, ContextTooLong, Overloaded, Draining or EngineLost.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request and free what it holds; unknown ids are ignored."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait for the running ones, at most `timeout_s`."""
        ...

    async def close(self) -> None:
        """End the engine."""
        ...

    def stats(self) -> EngineStats | None:
        """The newest counters, or None before there are any."""
        ...
