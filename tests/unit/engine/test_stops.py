"""Stop strings, stop tokens and EOS: where an answer ends, and what is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.output import FinishReason, TokenChunk
from headrace.core.sampling import SamplingParams, StopScope
from headrace.core.stops import HeldText, StopFound, StopMatcher
from headrace.engine.stops import Ended, StopStrings, StopTable
from headrace.errors import InvalidRequest
from headrace.model.tiny_tokenizer import control_ids, tiny_tokenizer
from headrace.recipe import Tokenizer

TOKENIZER = Tokenizer(json.dumps(tiny_tokenizer()).encode())
EOS, THINK_END = control_ids()["<｜end▁of▁sentence｜>"], control_ids()["</think>"]


def byte_ids(text: str) -> list[int]:
    """One id per byte, so that characters are split over tokens."""
    by_bytes = {data: token for token, data in TOKENIZER._bytes_by_id.items() if len(data) == 1}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def first_end(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the stop string that completes first, by the definition."""
    found = [
        (text.find(stop) + len(stop), index, text.find(stop), stop)
        for index, stop in enumerate(stops)
        if stop in text
    ]
    return (lambda best: (best[0], best[2], best[3]))(min(found)) if found else None


small = st.text(alphabet="abn\n", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(
    st.text(alphabet="abn\n", max_size=30),
    st.lists(small, min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_the_matcher_finds_what_completes_first(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    matcher, expected = StopMatcher(stops), first_end(text, stops)
    seen = ""
    for start, end in itertools.pairwise(edges):
        seen += text[start:end]
        found = matcher.copy().feed(text[start:end])
        assert found == matcher.feed(text[start:end])
        if found is not None:
            assert expected is not None
            assert found == StopFound(expected[2], len(seen) - expected[1])
            assert start < expected[0] <= end
            return
        beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
        assert matcher.held == max(len(part) for part in beginnings if seen.endswith(part))
    assert expected is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(alphabet="ab\n", max_size=4)), st.lists(small, max_size=3))
def test_held_text_loses_nothing(pieces: list[str], stops: list[str]) -> None:
    held, out = HeldText(stops), ""
    for piece in pieces:
        out += held.push(piece)
        assert "".join(pieces).startswith(out)
    assert out + held.finish() == "".join(pieces)


def run(ids: Sequence[int], stops: Sequence[str], **fields: object) -> tuple[int, str] | None:
    """(tokens of the answer, its text) when a stop string ends it."""
    scope = fields.pop("scope", StopScope())
    search = StopStrings(stops, TOKENIZER.detokenizer(), scope, **fields)  # type: ignore[arg-type]
    for count, token in enumerate(ids, 1):
        found = search.push(token)
        if found is not None:
            detokenizer = TOKENIZER.detokenizer()
            text = detokenizer.push([token for token in ids[:count] if token != THINK_END])
            return count, text[: len(text) - found.cut]
    return None


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("Hello world", ["o w"], "Hell"),
        ("ababac", ["abac"], "ab"),  # overlaps itself
        ("xabcd", ["bc", "abc"], "xa"),  # both end at one character: the first of the list ...
        ("xabcd", ["abc", "bc"], "x"),
        ("xabc", ["bc", "c"], "xa"),
        ("one STOP two END", ["END", "STOP"], "one "),  # ... else the one that ends first
        ("STOP", ["STOP"], ""),  # the whole answer
        ("S", ["S"], ""),  # the first token
        ("数据。结束。后", ["结束"], "数据。"),
        ("naïve é", ["é"], "naïve "),
        ("👍🏽 ok", ["🏽"], "👍"),
        ("nothing", ["nothingness"], None),
    ],
)
def test_where_answers_end(text: str, stops: list[str], expected: str | None) -> None:
    for ids in (byte_ids(text), TOKENIZER.encode(text)):
        result = run(ids, stops)
        if expected is None:
            assert result is None
            continue
        assert result is not None
        count, shown = result
        assert shown == expected
        # Not a token earlier, not one later.
        whole, before = TOKENIZER.decode(ids[:count]), TOKENIZER.decode(ids[: count - 1])
        assert any(stop in whole for stop in stops)
        assert not any(stop in before for stop in stops)


def test_two_stops_and_more_text_in_one_token() -> None:
    token = next(
        token
        for token, data in TOKENIZER._bytes_by_id.items()
        if data.isalpha() and len(data) > 3 and data[0] != data[-1]
    )
    text = TOKENIZER.decode([token])
    found = StopStrings([text[-1], text[1]], TOKENIZER.detokenizer()).push(token)
    assert found == StopFound(text[1], len(text) - 1)


def test_only_behind_the_end_of_thinking() -> None:
    scope = StopScope(THINK_END, after_border=True, skip_newlines=True)
    ids = [*byte_ids("a STOP b"), THINK_END, *byte_ids("\n\nc STOP d")]
    assert run(ids, ["STOP"], scope=scope) == (8 + 1 + 8, "a STOP b\n\nc ")
    assert run(byte_ids("a STOP"), ["STOP"], scope=scope) is None
    # Newlines at the start are no text; one alone is met before it can be skipped.
    assert run(ids, ["\n\n"], scope=scope) is None
    assert run(ids, ["\n"], scope=scope) == (10, "a STOP b")
    late = [*ids[:9], *byte_ids("c\n\nd")]
    assert run(late, ["\n\n"], scope=scope) == (9 + 3, "a STOP bc")
    # The markup of tool calls ends the search, another border begins it again.
    calls = StopScope(THINK_END, skip_newlines=True, end_token=EOS)
    assert run([EOS, *byte_ids("STOP")], ["STOP"], scope=calls) is None
    assert run([*byte_ids("ST"), EOS, *byte_ids("OP")], ["STOP"], scope=calls) is None
    ids = [EOS, *byte_ids("STOP"), THINK_END, *byte_ids("STOP")]
    assert run(ids, ["STOP"], scope=calls) == (10, "STOP")
    # A control token in between breaks a match.
    broken = [THINK_END, *byte_ids("ST"), THINK_END, *byte_ids("OP")]
    assert run(broken, ["STOP"], scope=scope) is None


def test_min_tokens_lets_early_stops_pass() -> None:
    ids = byte_ids("x. y. z.")
    assert run(ids, ["."]) == (2, "x")
    assert run(ids, ["."], min_tokens=2) == (5, "x. y")
    # A string may begin before and end after the border.
    assert run(ids, [". y"], min_tokens=3) == (4, "x")
    assert run(ids, [". y"], min_tokens=4) is None


def table(*params: SamplingParams, output: Sequence[int] = ()) -> StopTable:
    stops = StopTable(len(params) + 3, TOKENIZER)
    for row, one in enumerate(params, 1):
        stops.check(one)
        stops.admit(row, one, output)
    return stops


def push(stops: StopTable, rows: Sequence[int], tokens: Sequence[int]) -> dict[int, Ended]:
    return stops.push(np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64))


def test_the_table_tells_what_ended_each_row() -> None:
    (x,), (y,) = TOKENIZER.encode("x"), TOKENIZER.encode("y")
    stops = table(
        SamplingParams(),
        SamplingParams(ignore_eos=True),
        SamplingParams(stop_token_ids=(x,)),
        SamplingParams(stop=("x",), ignore_eos=True),
        SamplingParams(stop=("x",), stop_token_ids=(x,)),
    )
    assert push(stops, [1, 2, 3, 4, 5], [EOS] * 5) == {}  # EOS is the scheduler's
    assert push(stops, [5, 4, 3, 2, 1], [x] * 5) == {0: Ended(x), 1: Ended("x", 1), 2: Ended(x)}
    assert push(stops, [1, 2, 3, 4, 5], [y, y, -1, -1, y]) == {}
    stops.release(4)
    stops.release(4)
    assert push(stops, [4], [x]) == {}


def test_a_run_of_tokens_ends_inside_it() -> None:
    """SD-9: four tokens of one step, the stop string completes in the second."""
    stops = table(SamplingParams(stop=("bc",)), SamplingParams())
    run_1, run_2 = byte_ids("bcde"), byte_ids("bcde")
    kept: dict[int, list[int]] = {1: [], 2: []}
    live = [1, 2]
    for column in zip(run_1, run_2, strict=True):
        tokens = [column[row - 1] for row in live]
        ended = push(stops, live, tokens)
        for row, token in zip(live, tokens, strict=True):
            kept[row].append(token)
        live = [row for place, row in enumerate(live) if place not in ended]
    assert kept == {1: run_1[:2], 2: run_2}


def test_a_rebuilt_and_a_forked_row_end_like_the_first() -> None:
    params = SamplingParams(stop=("é!",))
    ids = byte_ids("aé!")
    for cut in range(len(ids)):
        stops = table(params)
        for token in ids[:cut]:
            assert push(stops, [1], [token]) == {}
        stops.copy(1, 3)
        stops.admit(2, params, ids[:cut])
        for token in ids[cut:-1]:
            assert push(stops, [1, 2, 3], [token] * 3) == {}
        assert push(stops, [1, 2, 3], [ids[-1]] * 3) == dict.fromkeys(range(3), Ended("é!", 2))


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="need a tokenizer") as caught:
        StopTable(2).check(SamplingParams(stop=("x",)))
    assert caught.value.param == "stop"


def test_the_text_tokens_of_a_chunk() -> None:
    def text_tokens(**fields: object) -> tuple[int, ...]:
        return TokenChunk("r", 0, (5, 6), **fields).text_tokens  # type: ignore[arg-type]

    assert text_tokens() == (5, 6)
    assert text_tokens(finish=FinishReason.LENGTH) == (5, 6)
    assert text_tokens(finish=FinishReason.STOP) == (5,)
    assert text_tokens(finish=FinishReason.STOP, stop=6) == (5,)
    assert text_tokens(finish=FinishReason.STOP, stop="x", stop_cut=1) == (5, 6)
