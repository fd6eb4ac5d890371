"""The bounded buffer between the engine's chunks and the reader of one request.

Contract: chunks that the reader has not taken yet are merged, so the buffer is one list of token
ids. Rule for slow readers: from `buffer_tokens` unread tokens on, the buffer counts as full; a
reader that leaves it full for `slow_reader_timeout_s`, or lets it grow to twice that size, loses
its request. Other requests never wait for it. Used by `engine/process.py`, one per request.
"""

from __future__ import annotations

import asyncio

from headrace.core.output import FinishReason, TokenChunk
from headrace.errors import Cancelled, HeadraceError


class TokenStream:
    """Unread tokens of one request and how it ended. Not thread-safe: one event loop."""

    def __init__(self, request_id: str, buffer_tokens: int, slow_reader_timeout_s: float) -> None:
        self.request_id = request_id
        self._buffer_tokens = buffer_tokens
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._next_index = 0  # of the first unread token
        self._unread: list[int] = []
        self._last: TokenChunk | None = None
        self._error: HeadraceError | None = None
        self._delivered = False
        self._full_since_s: float | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing can be added any more."""
        return self._last is not None or self._error is not None

    def put(self, chunk: TokenChunk, now_s: float) -> bool:
        """Add a chunk; False: the reader is too slow, the request must be aborted."""
        if self.ended:
            return True
        self._unread.extend(chunk.tokens)
        if chunk.finish is not None:
            self._last = chunk
        self._changed.set()
        if self.ended or not self._too_slow(now_s):
            return True
        self.fail(
            Cancelled(
                f"The reader of request {self.request_id} is too slow: {len(self._unread)} tokens "
                f"are unread (limit {self._buffer_tokens} for {self._slow_reader_timeout_s:g} s)."
            )
        )
        return False

    def fail(self, error: HeadraceError) -> None:
        """End the stream by an error; unread tokens are still delivered."""
        if not self.ended:
            self._error = error
            self._changed.set()

    async def take(self) -> TokenChunk:
        """Everything unread as one chunk; waits while there is nothing.

        Raises the error that ended the stream if no token was ever delivered; later an error is
        the last chunk, with finish ERROR.
        """
        await self._changed.wait()
        if self._error is not None and not self._delivered and not self._unread:
            raise self._error
        self._delivered = True
        chunk = TokenChunk(self.request_id, self._next_index, tuple(self._unread), *self._end())
        self._next_index += len(self._unread)
        self._unread.clear()
        self._full_since_s = None
        if not self.ended:
            self._changed.clear()
        return chunk

    def _end(self) -> tuple[FinishReason | None, str | None, str | None]:
        if self._last is not None:
            return self._last.finish, self._last.error, self._last.error_code
        if self._error is not None:
            return FinishReason.ERROR, self._error.message, self._error.code
        return None, None, None

    def _too_slow(self, now_s: float) -> bool:
        if len(self._unread) < self._buffer_tokens:
            return False
        if self._full_since_s is None:
            self._full_since_s = now_s
        return (
            now_s - self._full_since_s >= self._slow_reader_timeout_s
            or len(self._unread) >= 2 * self._buffer_tokens
        )
