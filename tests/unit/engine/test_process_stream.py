"""The bounded buffer of one request."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.output import FinishReason, TokenChunk, TokenLogprobs
from headrace.engine.stream import TokenStream
from headrace.errors import EngineLost


def chunk(index: int, count: int, finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk("a", index, tuple(range(index, index + count)), finish)


def take(stream: TokenStream) -> TokenChunk:
    async def bounded() -> TokenChunk:
        async with asyncio.timeout(1.0):
            return await stream.take()

    return asyncio.run(bounded())


def test_unread_chunks_are_merged() -> None:
    stream = TokenStream("a", 100, 1.0)
    assert stream.put(chunk(0, 2), 0.0)
    assert stream.put(chunk(2, 3), 0.0)
    assert take(stream) == chunk(0, 5)
    assert stream.put(chunk(5, 1, FinishReason.STOP), 0.0)
    assert take(stream) == chunk(5, 1, FinishReason.STOP)


def test_cached_tokens_come_with_the_first_chunk() -> None:
    stream = TokenStream("r", 100, 1.0, choices=2)
    stream.put(TokenChunk("r", 0, (1,), choice=1, cached_tokens=128), 0.0)
    stream.put_token(1, 2, 0.0)
    stream.put(TokenChunk("r", 0, (3,)), 0.0)
    chunks = [take(stream), take(stream)]
    assert [(chunk.choice, chunk.cached_tokens) for chunk in chunks] == [(0, 0), (1, 128)]
    stream.put_token(1, 4, 0.0)
    assert take(stream).cached_tokens == 0


def test_take_waits_for_something_new() -> None:
    stream = TokenStream("a", 100, 1.0)
    stream.put(chunk(0, 2), 0.0)
    take(stream)
    with pytest.raises(TimeoutError):
        take(stream)


def test_a_full_buffer_is_tolerated_for_the_timeout() -> None:
    stream = TokenStream("a", 10, 5.0)
    assert stream.put(chunk(0, 10), 0.0)
    assert stream.put(chunk(10, 1), 4.9)
    assert take(stream) == chunk(0, 11)
    assert stream.put(chunk(11, 10), 6.0)  # the clock starts anew once the reader has caught up
    assert stream.put(chunk(21, 1), 10.9)
    assert not stream.put(chunk(22, 1), 11.0)
    last = take(stream)
    assert (last.index, len(last.tokens), last.finish) == (11, 12, FinishReason.ERROR)
    assert last.error_code == "client_closed_request"


def test_twice_the_buffer_is_too_much_at_once() -> None:
    stream = TokenStream("a", 10, 5.0)
    assert stream.put(chunk(0, 19), 0.0)
    assert not stream.put(chunk(19, 1), 0.0)
    assert stream.put(chunk(20, 1), 0.0)  # ended: ignored, no second abort
    assert len(take(stream).tokens) == 20


def test_an_end_that_overfills_the_buffer_is_still_delivered() -> None:
    stream = TokenStream("a", 10, 5.0)
    assert stream.put(chunk(0, 30, FinishReason.LENGTH), 0.0)
    assert take(stream) == chunk(0, 30, FinishReason.LENGTH)


def test_an_error_is_raised_before_the_first_token_and_a_chunk_after_it() -> None:
    stream = TokenStream("a", 10, 5.0)
    stream.fail(EngineLost("gone"))
    with pytest.raises(EngineLost):
        take(stream)
    stream = TokenStream("a", 10, 5.0)
    stream.put(chunk(0, 2), 0.0)
    stream.fail(EngineLost("gone"))
    assert take(stream) == TokenChunk("a", 0, (0, 1), FinishReason.ERROR, "gone", "engine_lost")


def test_choices_are_merged_and_end_each_for_itself() -> None:
    stream = TokenStream("a", 100, 1.0, choices=2)
    assert (
        stream.put_token(1, 5, 0.0) and stream.put_token(0, 7, 0.0) and stream.put_token(1, 6, 0.0)
    )
    assert take(stream) == TokenChunk("a", 0, (7,))
    assert stream.put(TokenChunk("a", 1, (), FinishReason.LENGTH), 0.0)
    assert take(stream) == TokenChunk("a", 1, (), FinishReason.LENGTH)
    assert take(stream) == TokenChunk("a", 0, (5, 6), choice=1)
    assert not stream.finished and not stream.ended
    last = TokenChunk("a", 2, (8,), FinishReason.STOP, choice=1, stop="x", stop_cut=1)
    assert stream.put(last, 0.0) and stream.ended
    assert take(stream) == last
    assert stream.finished


def test_an_error_ends_all_choices_that_have_not_ended() -> None:
    stream = TokenStream("a", 100, 1.0, choices=3)
    stream.put(TokenChunk("a", 0, (1,), FinishReason.LENGTH), 0.0)
    assert take(stream).finish is FinishReason.LENGTH
    stream.fail(EngineLost("gone"))
    ends = [take(stream), take(stream)]
    assert [(end.choice, end.finish, end.error_code) for end in ends] == [
        (1, FinishReason.ERROR, "engine_lost"),
        (2, FinishReason.ERROR, "engine_lost"),
    ]
    assert stream.finished


def test_log_probabilities_are_kept_with_their_tokens() -> None:
    stream = TokenStream("a", 100, 1.0)
    first, second = TokenLogprobs(-1.0), TokenLogprobs(-2.0, (3,), (-0.5,))
    stream.put(TokenChunk("a", 0, (1,), logprobs=(first,), prompt_logprobs=(None, first)), 0.0)
    stream.put(TokenChunk("a", 1, (2,), logprobs=(second,)), 0.0)
    merged = take(stream)
    assert merged.logprobs == (first, second) and merged.prompt_logprobs == (None, first)
    stream.put(TokenChunk("a", 2, (3,), FinishReason.LENGTH, logprobs=(first,)), 0.0)
    assert take(stream).prompt_logprobs is None
