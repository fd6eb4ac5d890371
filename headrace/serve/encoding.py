"""Threads that turn request bodies into token ids, and who may use them.

Contract: long bodies have threads of their own, so that short ones never wait for them; a job whose
client has gone before it began is dropped. Work per job is bounded by the codec, which refuses what
cannot fit the context before it tokenizes. Used by `serve/routes/answers.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import Receive

from headrace.errors import Cancelled

# Parsing and encoding this much takes some ten milliseconds.
LONG_BODY_BYTES = 128 * 2**10
Result = TypeVar("Result")


class Encoders:
    """Two pools of `threads` threads each: for short and for long bodies."""

    def __init__(self, threads: int) -> None:
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._long = ThreadPoolExecutor(threads, thread_name_prefix="encode-long")

    async def run(self, encode: Callable[[bytes], Result], body: bytes, receive: Receive) -> Result:
        """`encode(body)` in a thread; raises what it raises, and Cancelled when the client goes."""
        pool = self._long if len(body) > LONG_BODY_BYTES else self._short
        job = asyncio.get_running_loop().run_in_executor(pool, encode, body)
        gone = asyncio.create_task(until_disconnect(receive))
        both: set[asyncio.Future[Any]] = {job, gone}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise Cancelled("The client went away.")
            return job.result()
        finally:
            job.cancel()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    def close(self) -> None:
        """Give the threads back."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client is gone; ASGI has no other way to hear of it."""
    while (await receive())["type"] != "http.disconnect":
        pass
