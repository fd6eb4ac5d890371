"""No output of any protocol contains markup of a call that was parsed.

Every decode case with calls, in random cuts: neither content nor reasoning shows a marker; at level
`clients` names and arguments show none either, and arguments of finished calls are JSON objects.
Cases whose markers are spelled with ordinary tokens have no calls and are left out by that.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headrace.check.recipe_decode import play, stream_of
from headrace.check.recipe_encode import options_of
from headrace.recipe.options import ConvertOptions, Level
from tests.unit.recipe import golden

MARKS = ("<｜DSML｜", "</｜DSML｜", "｜DSML｜")
PROTOCOLS = ("chat", "responses", "messages")


def cut(rng: random.Random, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same output in other pieces: texts at characters, ids at ids."""
    parts: list[dict[str, Any]] = []
    for chunk in chunks:
        key = next((key for key in ("text", "tokens") if chunk.get(key)), None)
        if key is None or "logprobs" in chunk:
            parts.append(chunk)
            continue
        items, start = chunk[key], 0
        while start < len(items):
            stop = start + rng.randrange(1, 9)
            parts.append({key: items[start:stop]})
            start = stop
    return parts


def shown(protocol: str, response: dict[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
    """Texts that are no calls, and (name, arguments) of the calls."""
    if protocol == "chat":
        message = response["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        texts = [message.get("content") or "", message.get("reasoning_content") or ""]
        return texts, [(call["name"], call["arguments"]) for call in calls]
    if protocol == "responses":
        items = response["output"]
        texts = [part["text"] for item in items for part in item.get("content") or ()]
        return texts, [
            (item["name"], item["arguments"] if "arguments" in item else item["input"])
            for item in items
            if item["type"] in ("function_call", "custom_tool_call")
        ]
    blocks = response["content"]
    texts = [block.get("text") or block.get("thinking") or "" for block in blocks]
    return texts, [(b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]


def finished_arguments(protocol: str, response: dict[str, Any]) -> list[str]:
    """Arguments of the function calls that were not cut."""
    if protocol != "responses":
        return [arguments for _, arguments in shown(protocol, response)[1]]
    return [
        item["arguments"]
        for item in response["output"]
        if item["type"] == "function_call" and item["status"] == "completed"
    ]


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_parsed_calls_leave_no_markup(protocol: str, level: Level) -> None:
    tokenizer = golden.real_tokenizer()
    leaks: list[tuple[str, str]] = []
    seen = 0
    for case in golden.cases(f"decode_{protocol}"):
        rng = random.Random(case["id"])
        options = ConvertOptions(level=level, special=options_of(case).special)
        for turn in range(4):
            stream = stream_of(case, tokenizer, options, complete=True)
            outcome = play(stream, cut(rng, case["chunks"]) if turn else case["chunks"])
            if outcome.error is not None:
                continue
            response = json.loads(stream.response())
            texts, calls = shown(protocol, response)
            if not calls:
                continue
            seen += 1
            if level is Level.CLIENTS:
                texts += [text for call in calls for text in call]
                for arguments in finished_arguments(protocol, response):
                    assert isinstance(json.loads(arguments), dict), case["id"]
            leaks += [(case["id"], text) for text in texts if any(mark in text for mark in MARKS)]
    assert seen > 60
    assert leaks == []
