"""Events and complete responses do not depend on how the output is split, in the three protocols.

`test_parser_splits.py` says so of the parser; here the writers and the folded events count, too.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest

from headrace.check.recipe_decode import chunk_from_json, stream_of
from headrace.check.recipe_encode import options_of
from headrace.errors import StreamError
from headrace.recipe.chunks import Chunk, Text, Tokens
from headrace.recipe.events.event import Event
from headrace.recipe.options import ConvertOptions, Level
from tests.property.recipe.test_parser_splits import resplit
from tests.unit.recipe import golden
from tests.unit.recipe.test_parser import parsing_of

CASES = [
    case
    for protocol in ("chat", "responses", "messages")
    for case in golden.cases(f"decode_{protocol}")
]
FEW_SPLITS, MANY_SPLITS = 2, 25


def without_counts(value: Any) -> Any:
    """Without what a split of text or a new run does not keep: counts, clock, random ids."""
    if isinstance(value, dict):
        dropped = ("usage", "completed_at", "logprobs")
        return {key: without_counts(item) for key, item in value.items() if key not in dropped}
    if isinstance(value, list):
        return [without_counts(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"call_(\d\d)_(ET_)?\w{24}", r"call_\1_\2R", value)
    return value


def text_place(data: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Object and key of the text of a delta event; None for other events."""
    choices = data.get("choices")
    holder = choices[0]["delta"] if choices else data.get("delta")
    if isinstance(holder, str):
        return data, "delta"
    if not isinstance(holder, dict) or (choices and choices[0]["finish_reason"]):
        return None
    for call in holder.get("tool_calls", ()):
        return None if "id" in call else (call["function"], "arguments")
    for key in ("content", "reasoning_content", "text", "thinking", "partial_json"):
        if isinstance(holder.get(key), str) and "role" not in holder:
            return holder, key
    return None


def folded(events: Iterable[Event]) -> list[Any]:
    """The events in order; deltas in a row that differ in their text alone are joined."""
    result: list[Any] = []
    for event in events:
        data = without_counts(json.loads(event.data))
        data.pop("sequence_number", None)
        place = text_place(data)
        text = ""
        if place is not None:
            holder, key = place
            text, holder[key] = holder[key], "..."
        if place is not None and result and result[-1][0] == data:
            result[-1][1] += text
        elif place is None or text:
            result.append([data, text])
    return result


def answer_of(case: dict[str, Any], level: Level, chunks: list[Chunk]) -> tuple[Any, Any] | None:
    options = ConvertOptions(level=level, special=options_of(case).special)
    stream = stream_of(case, golden.real_tokenizer(), options)
    events: list[Event] = []
    try:
        for chunk in chunks:
            if stream.finished:
                break
            events += stream.push(chunk)
        events += stream.finish()
    except StreamError:
        return None
    return folded(events), without_counts(json.loads(stream.response()))


def check(case: dict[str, Any], level: Level, splits: int) -> None:
    chunks = [chunk_from_json(value) for value in case["chunks"]]
    if len({type(chunk) for chunk in chunks if isinstance(chunk, Text | Tokens)}) > 1:
        pytest.skip("text and ids are mixed")
    options = options_of(case)
    by_chunk = parsing_of(case, options).parse_json or "incomplete-at-end" in case["id"]
    if level is Level.OFFICIAL and by_chunk:
        pytest.skip("this depends on the chunks")
    expected = answer_of(case, level, chunks)
    if expected is None:
        pytest.skip("a chunk is refused")
    source = random.Random(case["id"])
    for _ in range(splits):
        events, response = answer_of(case, level, resplit(chunks, source)) or (None, None)
        assert response == expected[1]
        assert events == expected[0]


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_few_splits(case: dict[str, Any], level: Level) -> None:
    check(case, level, FEW_SPLITS)


@pytest.mark.sweep
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_many_splits(case: dict[str, Any], level: Level) -> None:
    check(case, level, MANY_SPLITS)
