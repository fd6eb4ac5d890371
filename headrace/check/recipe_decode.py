"""Decode cases of the token codec: chunks of an answer -> events and the complete response.

`check_decode` compares every event, how many each pushed chunk gave, whether the stream had ended,
the terminator, the error that ended it, and the complete response of the same request without
`stream`. The clock and random ids are replaced as in the cases. Called by `check/recipe.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.check.recipe_cases import Difference, first_difference, normalised
from headrace.check.recipe_encode import options_of, parsing_from_json
from headrace.core.output import TokenLogprobs
from headrace.errors import HeadraceError
from headrace.recipe.chunks import Chunk, EngineFinish, Finish, Ready, Text, Tokens
from headrace.recipe.events.event import Event
from headrace.recipe.options import ConvertOptions
from headrace.recipe.protocols.convert import convert
from headrace.recipe.stream import AnswerStream
from headrace.recipe.tokenizer import Tokenizer

IGNORED = "ignored_after_finish"
Stage = tuple[str, Difference | None]


@dataclass(slots=True)
class Outcome:
    """What a stream gave: its events, how many each chunk made, and how it ended."""

    events: list[Event] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)
    finished: bool = False
    error: str | None = None


def stream_of(
    case: Mapping[str, Any],
    tokenizer: Tokenizer,
    options: ConvertOptions | None = None,
    *,
    complete: bool = False,
) -> AnswerStream:
    """A fresh stream of a case. complete: for the request without `stream`."""
    options = options_of(case) if options is None else options
    request = {**case["request"], "stream": False} if complete else case["request"]
    request = {key: item for key, item in request.items() if item is not False or key != "stream"}
    if complete:
        request.pop("stream_options", None)
    converted = convert(case["protocol"], json.dumps(request).encode(), options)
    parsing = parsing_from_json(case["parsing"]) if "parsing" in case else None
    return AnswerStream(
        converted,
        response_id=case["response_id"],
        model=case["model"],
        special=options.special,
        tokenizer=tokenizer if case["with_tokenizer"] else None,
        created=0,
        signature=case.get("signature"),
        parsing=parsing,
        silent=complete,
    )


def chunk_from_json(value: Mapping[str, Any]) -> Chunk:
    """A chunk in the form of the case files. Raises KeyError, TypeError or ValueError."""
    if "ready" in value:
        ready = value["ready"] or {}
        usage = ready.get("prompt_usage") or {}
        return Ready(
            usage.get("prompt_tokens", 0),
            usage.get("prompt_cache_hit_tokens", 0),
            ready.get("system_fingerprint"),
        )
    if "text" in value:
        text, count = value["text"], value.get("token_count", 0)
        if not isinstance(text, str) or type(count) is not int:
            raise TypeError("text must be a string, token_count a number")
        return Text(text, count)
    if "tokens" in value:
        if not all(type(token) is int for token in value["tokens"]):
            raise TypeError("tokens must be numbers")
        rows = value.get("logprobs")
        return Tokens(value["tokens"], None if rows is None else [_logprobs(row) for row in rows])
    return Finish(EngineFinish(value["finish"]))


def _logprobs(row: Sequence[Any]) -> TokenLogprobs:
    logprob, best = row
    return TokenLogprobs(logprob, tuple(i for i, _ in best), tuple(value for _, value in best))


def play(stream: AnswerStream, chunks: Sequence[Mapping[str, Any]]) -> Outcome:
    """Push all chunks, then the end of input."""
    outcome = Outcome()
    for value in chunks:
        if stream.finished:
            outcome.counts.append(IGNORED)
            continue
        try:
            events = stream.push(chunk_from_json(value))
        except HeadraceError as error:
            outcome.error = error.message
            outcome.counts += [{"error": error.message}, 0]
            return outcome
        outcome.events += events
        outcome.counts.append(len(events))
    outcome.finished = stream.finished
    events = stream.finish()
    outcome.events += events
    outcome.counts.append(len(events))
    return outcome


def check_decode(case: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Stage]:
    """(stage, None or its first difference) of all that the case expects."""
    name: str = case["id"]
    stream = stream_of(case, tokenizer)
    outcome = play(stream, case["chunks"])
    events = [
        {"event": event.name, "data": normalised(json.loads(event.data))}
        for event in outcome.events
    ]
    done = stream.sse_done
    yield _stage(name, "events", case["expect_events"], events)
    yield _stage(name, "counts", case["expect_counts"], outcome.counts)
    yield _stage(name, "finished", case["finished_before_finish_call"], outcome.finished)
    yield _stage(name, "done", case["sse_done_data"], None if done is None else done.decode())
    yield _stage(name, "error", case.get("expect_stream_error"), outcome.error)
    if "expect_response" in case:
        whole = stream_of(case, tokenizer, complete=True)
        play(whole, case["chunks"])
        response = normalised(json.loads(whole.response()))
        yield _stage(name, "response", case["expect_response"], response)


def _stage(case: str, stage: str, expected: Any, got: Any) -> Stage:
    found = first_difference(expected, got)
    return stage, None if found is None else Difference(case, stage, *found)
