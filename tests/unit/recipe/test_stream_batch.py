"""`StreamBatch` gives the bytes that the parser gives, whatever way they take."""

from __future__ import annotations

import random

import pytest

from headrace.core.output import TokenLogprobs
from headrace.errors import StreamError
from headrace.recipe.chunks import Chunk, EngineFinish, Finish, Ready, Text, Tokens
from headrace.recipe.events.event import sse_frame
from headrace.recipe.options import Level
from headrace.recipe.stream import StreamBatch
from tests.unit.recipe import golden
from tests.unit.recipe.streams import MARK, body, call, data, fixed, run, stream

WORDS = [
    "hello",
    " world",
    ".\n",
    "\n\n",
    "\n",
    "a < b",
    "<",
    "</",
    "\n\n<",
    "/",
    "x <",
    "<=",
    "think",
    "{",
    '"q"',
    "\\",
    "\\n",
    "北京",
    "😀",
    "👩\u200d🚀",
    "\t",
    ' invoke name="',
    "ZZ",
    "x = 1;\n",
    "\n\n\nfoo",
    "e\n\n",
    "｜",
    "�",
]
SPELLINGS = ("</think>", "｜DSML｜", "<｜User｜>", "<｜end▁of▁sentence｜>")


def random_ids(rng: random.Random) -> list[int]:
    tokenizer = golden.real_tokenizer()
    ids: list[int] = []
    for _ in range(rng.randrange(1, 6)):
        ids += tokenizer.encode("".join(rng.choices(WORDS, k=rng.randrange(1, 50))))
        match rng.randrange(6):
            case 0 | 1:
                ids.append(tokenizer.added[rng.choice(SPELLINGS)])
            case 2:
                value = "".join(rng.choices(WORDS, k=rng.randrange(40)))
                text = f'<{MARK} parameter name="a" string="true">{value}</{MARK} parameter>\n'
                for number, part in enumerate(call("f", text).split("｜DSML｜")):
                    ids += [tokenizer.added["｜DSML｜"]] if number else []
                    ids += tokenizer.encode(part)
            case 3:
                ids.append(rng.randrange(129_400))
    return ids


def random_chunks(rng: random.Random) -> list[Chunk]:
    ids, size, place = random_ids(rng), rng.choice([1, 1, 2, 5, 9]), 0
    chunks: list[Chunk] = [Ready(100, 64, "fp")] if rng.random() < 0.9 else []
    while place < len(ids):
        step = size if rng.random() < 0.9 else rng.randrange(1, 8)
        part = ids[place : place + step]
        place += step
        odd = rng.random()
        if odd < 0.02:
            chunks.append(Tokens(part, [TokenLogprobs(-0.5)] * len(part)))
        elif odd < 0.04:
            chunks.append(Text("some text\n", 3))
        else:
            chunks.append(Tokens(part))
    if rng.random() < 0.9:
        chunks.append(Finish(rng.choice(list(EngineFinish))))
    return chunks


def random_request(rng: random.Random, protocol: str) -> object:
    more: dict[str, object] = {}
    stops = rng.choice([None, None, ["ZZ"], ["\n\n"], ["x = ", "Q"]])
    if protocol == "responses":
        if rng.random() < 0.2:
            more = {"input": "json", "text": {"format": {"type": "json_object"}}}
    elif stops is not None:
        more["stop" if protocol == "chat" else "stop_sequences"] = stops
    if protocol == "chat" and rng.random() < 0.2:
        more["response_format"] = {"type": "json_object"}
        more["messages"] = [{"role": "user", "content": "json"}]
    return body(protocol, thinking=rng.random() < 0.5, call=rng.random() < 0.5, **more)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_short_cut_and_parser_give_the_same(protocol: str, level: Level) -> None:
    batch, short_cuts = StreamBatch(), 0
    for seed in range(150):
        rng = random.Random(f"{protocol}-{level}-{seed}")
        request = random_request(rng, protocol)
        slow = stream(protocol, request, level, ids=True)
        fast = stream(protocol, request, level, ids=True)
        silent = stream(protocol, request, level, ids=True, silent=True)
        for chunk in random_chunks(rng):
            if slow.finished:
                break
            short_cuts += fast.lane.get is not None
            expected = b"".join(map(sse_frame, slow.push(chunk)))
            frames = batch.push([(fast, chunk), (silent, chunk)])
            assert fixed(frames[0]) == fixed(expected), (request, seed)
            assert frames[1] == b""
            if rng.random() < 0.05:
                assert fixed(fast.response()) == fixed(slow.response())
        assert fast.finished == slow.finished == silent.finished
        expected = b"".join(map(sse_frame, slow.finish()))
        assert fixed(b"".join(map(sse_frame, fast.finish()))) == fixed(expected)
        assert silent.finish() == []
        assert fixed(fast.response()) == fixed(silent.response()) == fixed(slow.response())
    assert short_cuts > 1000


def test_error_of_one_stream_is_its_last_event() -> None:
    good, bad = stream("chat", body("chat")), stream("chat", body("chat"))
    frames = StreamBatch().push([(bad, Tokens([5])), (good, Text("hi", 1))])
    assert b'"error"' in frames[0] and b"without a tokenizer" in frames[0]
    assert bad.finished and not good.finished
    assert b'"hi"' in frames[1]
    with pytest.raises(StreamError):
        StreamBatch().push([(bad, Text("more"))])


def test_lanes_are_the_choices() -> None:
    answer = stream("chat", body("chat", n=2), ids=True)
    batch, hello = StreamBatch(), golden.real_tokenizer().encode("hello")
    for lane in answer.lanes:
        batch.push([(lane, Ready(9, 0, None))])
    frames = batch.push([(answer.lanes[1], Tokens(hello)), (answer.lanes[0], Tokens(hello))])
    assert [b'"index":1' in frame for frame in frames] == [True, False]
    assert not answer.finished
    last = batch.push([(lane, Finish()) for lane in answer.lanes])
    assert answer.finished
    assert [b'"usage":{' in frame for frame in last] == [False, True]
    assert b'"completion_tokens":2' in last[1]


@pytest.mark.parametrize("level", list(Level))
def test_push_after_the_end(level: Level) -> None:
    answer = stream("messages", body("messages"), level)
    run(answer, [Text("a", 1), Finish()])
    assert answer.finished and answer.finish() == []
    with pytest.raises(StreamError, match="stream processor has finished"):
        answer.push(Text("b"))


def test_fail_ends_all_choices() -> None:
    answer = stream("chat", body("chat", n=2))
    answer.push(Text("a", 1), 1)
    assert "error" in data(answer.fail(StreamError("boom")))[0]
    assert answer.finished
    for choice in (0, 1):
        with pytest.raises(StreamError):
            answer.push(Text("b"), choice)
