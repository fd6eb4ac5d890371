"""The codec equals the official one on every golden case that this version supports."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from headrace.core.output import FinishReason, TokenChunk, TokenLogprobs
from headrace.engine.stops import StopStrings
from headrace.recipe import ChatCodec, ConfigTokenIds, OutputParser, bind, render
from headrace.recipe.conversation import Conversation
from headrace.recipe.events.chat import ChatEvents, NewTokens, Usage, WholeChoice
from headrace.recipe.protocols.chat import ChatOptions, parse_chat
from tests.unit.recipe import golden

ENCODE = golden.cases("encode_chat_text")
DECODE = golden.cases("decode_chat_text")
DECODE_STOP = golden.cases("decode_chat_stop")


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    tokenizer = golden.real_tokenizer()
    return ChatCodec(tokenizer, bind(tokenizer, ConfigTokenIds(1, 129264, 128799)))


def conversation_of(case: dict[str, Any]) -> Conversation:
    raw = case.get("request_raw")
    body = raw.encode() if raw is not None else json.dumps(case["request"]).encode()
    default = case.get("options", {}).get("default_thinking_mode", True)
    return parse_chat(body, ChatOptions(default_thinking_mode=default)).conversation


def test_there_are_cases() -> None:
    assert (len(ENCODE), len(DECODE)) == (70, 16)


@pytest.mark.parametrize("case", ENCODE, ids=lambda case: case["id"])
def test_prompt_ranges_and_ids(case: dict[str, Any], codec: ChatCodec) -> None:
    conversation = conversation_of(case)
    prompt = render(conversation, codec.special)
    assert golden.same_text(prompt.text, case["expect_prompt"])
    ranges, expected = prompt.special_ranges(), case["expect_special_ranges"]
    if isinstance(expected, int):
        assert len(ranges) == expected
    else:
        assert ranges == [tuple(item) for item in expected]
    assert golden.same_ids(codec.encode(conversation), case["expect_token_ids"])


def parse_output(parser: OutputParser, groups: list[list[int]]) -> tuple[str, str]:
    deltas = [parser.push(group) for group in groups] + [parser.flush()]
    return "".join(delta.reasoning for delta in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize("case", DECODE, ids=lambda case: case["id"])
def test_output_ids_give_the_official_message(case: dict[str, Any], codec: ChatCodec) -> None:
    conversation = conversation_of(case)
    groups = [chunk["tokens"] for chunk in case["chunks"] if "tokens" in chunk]
    message = case["expect_response"]["choices"][0]["message"]
    content = message["content"]
    if case["id"] == "dec-chat-tok-incomplete-at-end":
        # The official codec loses an incomplete character at the end; here it is visible.
        content += "\ufffd"
    expected = (message.get("reasoning_content") or "", content)
    assert parse_output(codec.parser(conversation), groups) == expected
    ids = [token for group in groups for token in group]
    rng = random.Random(case["id"])
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(ids) + 1), k=3))
        edges = [0, *cuts, len(ids)]
        split = [ids[a:b] for a, b in itertools.pairwise(edges)]
        assert parse_output(codec.parser(conversation), split) == expected


def engine_chunks(case: dict[str, Any], codec: ChatCodec) -> tuple[list[TokenChunk], int]:
    """The case's chunks as an engine would give them: it ends where a stop string completes.

    Also how many ids of that last chunk come behind it: the official codec counts them.
    """
    chat = parse_chat(json.dumps(case["request"]).encode(), ChatOptions())
    scope = codec.stop_scope(chat.conversation)
    search = StopStrings(chat.sampling.stop, codec.tokenizer.detokenizer(), scope)
    chunks: list[TokenChunk] = []
    for part in case["chunks"]:
        ids = part.get("tokens", [])
        records = [
            TokenLogprobs(logprob, *(tuple(column) for column in zip(*top, strict=True)))
            for logprob, top in part.get("logprobs", [])
        ]
        for count, token in enumerate(ids, 1):
            found = search.push(token)
            if found is not None:
                logprobs = tuple(records[:count]) if records else None
                last = {"stop": found.stop, "stop_cut": found.cut, "logprobs": logprobs}
                ended = TokenChunk("r", 0, tuple(ids[:count]), FinishReason.STOP, **last)
                return [*chunks, ended], len(ids) - count
        chunks.append(TokenChunk("r", 0, tuple(ids), logprobs=tuple(records) if records else None))
    return [*chunks, TokenChunk("r", 0, (1,), FinishReason.STOP)], 0


@pytest.mark.parametrize("case", DECODE_STOP, ids=lambda case: case["id"])
def test_stop_sequences_and_logprobs_are_the_official_ones(
    case: dict[str, Any], codec: ChatCodec
) -> None:
    chat = parse_chat(json.dumps(case["request"]).encode(), ChatOptions())
    parser = codec.parser(chat.conversation, chat.sampling.stop)
    thinking = chat.conversation.thinking
    events = ChatEvents("r", "m", 0, thinking=thinking, token_bytes=codec.tokenizer.token_bytes)
    whole = WholeChoice()
    chunks, used = engine_chunks(case, codec)
    for chunk in chunks:
        ids = chunk.text_tokens
        used += len(ids)
        if chunk.finish is None:
            delta = parser.push(ids)
        else:
            delta = parser.finish(ids, chunk.stop_cut if isinstance(chunk.stop, str) else None)
        whole.parts.append(NewTokens(delta, ids, chunk.logprobs))
        whole.finish = chunk.finish
    (choice,) = json.loads(events.complete([whole], Usage(0, 0)))["choices"]
    (expected,) = case["expect_response"]["choices"]
    message = choice["message"]
    assert message["content"] == expected["message"]["content"]
    assert message.get("reasoning_content") == expected["message"].get("reasoning_content")
    assert choice["finish_reason"] == expected["finish_reason"]
    for name, entries in (expected["logprobs"] or {}).items():
        assert choice["logprobs"][name] == entries
    assert used == case["expect_response"]["usage"]["completion_tokens"]


def test_plain_text_ids() -> None:
    tokenizer = golden.real_tokenizer()
    wrong = [
        case["id"]
        for case in golden.cases("tokenizer")
        if not golden.same_ids(tokenizer.encode(case["text"]), case["plain_ids"])
    ]
    assert wrong == []


def test_a_control_spelling_in_text_never_becomes_its_token(codec: ChatCodec) -> None:
    added = codec.tokenizer.added
    attack = "".join(added)
    for role in ("system", "user"):
        messages = [{"role": role, "content": attack}, {"role": "user", "content": attack}]
        body = json.dumps({"model": "m", "messages": messages}).encode()
        ids = codec.encode(parse_chat(body, ChatOptions()).conversation)
        controls = [token for token in ids if codec.tokenizer.is_added(token)]
        spelled = [
            segment.text
            for segment in render(
                parse_chat(body, ChatOptions()).conversation, codec.special
            ).segments
            if segment.special
        ]
        assert controls == [added[text] for text in spelled]
        assert len(controls) <= 6


def test_known_costs_of_spellings(codec: ChatCodec) -> None:
    def length(text: str) -> int:
        request = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "thinking": {"type": "disabled"},
        }
        return len(
            codec.encode(parse_chat(json.dumps(request).encode(), ChatOptions()).conversation)
        )

    assert length("") == 4
    assert length("<｜User｜>") == 4 + 5
    assert length("<think>") == 4 + 3
