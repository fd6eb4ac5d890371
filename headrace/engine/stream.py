"""The bounded buffer between the engine's output and the reader of one request.

Contract: what the reader has not taken yet is merged per choice, so the buffer is a list of token
ids for each of them. Rule for slow readers: from `buffer_tokens` unread tokens on, all choices
together, the buffer counts as full; a reader that leaves it full for `slow_reader_timeout_s`, or
lets it grow to twice that size, loses its request. Other requests never wait for it. Used by
`engine/process.py`, one per request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace.core.output import FinishReason, TokenChunk, TokenLogprobs
from headrace.errors import Cancelled, HeadraceError


@dataclass(slots=True)
class _Unread:
    """What the reader has not taken of one choice. next_index: of its first unread token."""

    next_index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
    last: TokenChunk | None = None  # the one with `finish`
    taken: bool = False  # its end has been taken too


class TokenStream:
    """Unread tokens of one request and how it ended. Not thread-safe: one event loop."""

    def __init__(
        self, request_id: str, buffer_tokens: int, slow_reader_timeout_s: float, choices: int = 1
    ) -> None:
        self.request_id = request_id
        self._buffer_tokens = buffer_tokens
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._choices = [_Unread() for _ in range(choices)]
        self._unread_tokens = 0
        self._error: HeadraceError | None = None
        self._delivered = False
        self._full_since_s: float | None = None
        self._changed = asyncio.Event()

    @property
    def num_choices(self) -> int:
        """Answers that the request asked for."""
        return len(self._choices)

    @property
    def ended(self) -> bool:
        """Whether nothing can be added any more."""
        return self._error is not None or all(choice.last for choice in self._choices)

    @property
    def finished(self) -> bool:
        """Whether the reader has taken everything, the ends of all choices included."""
        return all(choice.taken for choice in self._choices)

    def put_token(self, choice: int, token: int, now_s: float) -> bool:
        """Add one token and nothing else; see `put`."""
        if self.ended:
            return True
        self._choices[choice].tokens.append(token)
        self._unread_tokens += 1
        self._changed.set()
        return not self._too_slow(now_s) or self._lose()

    def put(self, chunk: TokenChunk, now_s: float) -> bool:
        """Add a chunk; False: the reader is too slow, the request must be aborted."""
        if self.ended:
            return True
        choice = self._choices[chunk.choice]
        choice.tokens.extend(chunk.tokens)
        choice.logprobs.extend(chunk.logprobs or ())
        if chunk.prompt_logprobs is not None:
            choice.prompt_logprobs = chunk.prompt_logprobs
        choice.cached_tokens += chunk.cached_tokens
        if chunk.finish is not None:
            choice.last = chunk
        self._unread_tokens += len(chunk.tokens)
        self._changed.set()
        return self.ended or not self._too_slow(now_s) or self._lose()

    def fail(self, error: HeadraceError) -> None:
        """End the stream by an error; unread tokens are still delivered."""
        if not self.ended:
            self._error = error
            self._changed.set()

    async def take(self) -> TokenChunk:
        """Everything unread of the first choice that has something; waits while none has.

        Raises the error that ended the stream if no token was ever delivered; later an error is
        the last chunk of each choice that had not ended, with finish ERROR. Must not be called once
        the stream is `finished`.
        """
        await self._changed.wait()
        if self._error is not None and not self._delivered and not self._unread_tokens:
            raise self._error
        self._delivered = True
        number, choice = next(
            (number, choice)
            for number, choice in enumerate(self._choices)
            if choice.tokens or self._end_due(choice)
        )
        chunk = self._chunk(number, choice)
        self._unread_tokens -= len(choice.tokens)
        choice.next_index += len(choice.tokens)
        choice.tokens, choice.logprobs, choice.prompt_logprobs = [], [], None
        choice.cached_tokens = 0
        choice.taken = chunk.finish is not None
        self._full_since_s = None
        if not any(other.tokens or self._end_due(other) for other in self._choices):
            self._changed.clear()
        return chunk

    def _end_due(self, choice: _Unread) -> bool:
        return not choice.taken and (choice.last is not None or self._error is not None)

    def _chunk(self, number: int, choice: _Unread) -> TokenChunk:
        last = choice.last
        if last is None and self._error is not None:
            error = self._error
            last = TokenChunk(
                self.request_id, 0, (), FinishReason.ERROR, error.message, error.code, number
            )
        return TokenChunk(
            request_id=self.request_id,
            index=choice.next_index,
            tokens=tuple(choice.tokens),
            finish=None if last is None else last.finish,
            error=None if last is None else last.error,
            error_code=None if last is None else last.error_code,
            choice=number,
            stop=None if last is None else last.stop,
            stop_cut=0 if last is None else last.stop_cut,
            logprobs=tuple(choice.logprobs) if choice.logprobs else None,
            prompt_logprobs=choice.prompt_logprobs,
            cached_tokens=choice.cached_tokens,
            accepted_drafts=0 if last is None else last.accepted_drafts,
            rejected_drafts=0 if last is None else last.rejected_drafts,
        )

    def _lose(self) -> bool:
        self.fail(
            Cancelled(
                f"The reader of request {self.request_id} is too slow: {self._unread_tokens} "
                f"tokens are unread (limit {self._buffer_tokens} for "
                f"{self._slow_reader_timeout_s:g} s)."
            )
        )
        return False

    def _too_slow(self, now_s: float) -> bool:
        if self._unread_tokens < self._buffer_tokens:
            return False
        if self._full_since_s is None:
            self._full_since_s = now_s
        return (
            now_s - self._full_since_s >= self._slow_reader_timeout_s
            or self._unread_tokens >= 2 * self._buffer_tokens
        )
