"""The output parser does not depend on how the output is split, and survives any output."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.check.recipe_decode import chunk_from_json
from headrace.check.recipe_encode import options_of
from headrace.errors import StreamError
from headrace.recipe.chunks import Chunk, EngineFinish, Finish, Text, Tokens
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.options import Level
from headrace.recipe.parser.parser import OutputParser
from tests.unit.recipe import golden
from tests.unit.recipe.answers import EOS, MARK, Answer, block, call, joined, parameter, parse
from tests.unit.recipe.test_parser import CASES, parsing_of

SPLITS = 200
FEW_SPLITS = 5


def resplit(chunks: list[Chunk], source: random.Random) -> list[Chunk]:
    """The same output in other chunks: neighbours of one kind joined, then split anew."""
    result: list[Chunk] = []
    text, ids = "", []
    for chunk in [*chunks, None]:
        if isinstance(chunk, Text):
            text += chunk.text
            continue
        if isinstance(chunk, Tokens):
            ids += chunk.ids
            continue
        size = source.choice([1, 2, 5, 40, 10**6])
        while text:
            length = source.randint(1, size)
            result.append(Text(text[:length]))
            text = text[length:]
        while ids:
            length = source.randint(1, size)
            result.append(Tokens(ids[:length]))
            ids = ids[length:]
        if chunk is not None:
            result.append(chunk)
    return result


def answer_of(case: dict[str, Any], level: Level, chunks: list[Chunk]) -> Answer | None:
    """The joined answer, without the token counts of text, which a split does not keep."""
    options = options_of(case)
    tokenizer = golden.real_tokenizer() if case["with_tokenizer"] else None
    parser = OutputParser(parsing_of(case, options), options.special, level, tokenizer)
    items = []
    try:
        for chunk in chunks:
            if parser.finished:
                break
            items += parser.push(chunk)
    except StreamError:
        return None
    answer = joined(items + parser.finish())
    if answer.end is not None and any(isinstance(chunk, Text) for chunk in chunks):
        answer.end = replace(answer.end, completion_tokens=0)
    if answer.end is not None and answer.end.stop is not None:
        # How much of the last chunk is counted depends on the chunk.
        answer.end = replace(answer.end, completion_tokens=0)
    return answer


def check_splits(case: dict[str, Any], level: Level, count: int) -> None:
    options = options_of(case)
    if level is Level.OFFICIAL and parsing_of(case, options).parse_json:
        pytest.skip("one space per chunk")
    chunks = [chunk_from_json(value) for value in case["chunks"]]
    kinds = [type(chunk) for chunk in chunks if isinstance(chunk, Text | Tokens)]
    if len(set(kinds)) > 1:
        pytest.skip("text and ids are mixed")
    if level is Level.OFFICIAL and "incomplete-at-end" in case["id"]:
        pytest.skip("the official codec loses the ids of the last chunk")
    expected = answer_of(case, level, chunks)
    if expected is None:
        pytest.skip("a chunk is refused")
    source = random.Random(case["id"])
    for _ in range(count):
        assert answer_of(case, level, resplit(chunks, source)) == expected


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_few_splits(case: dict[str, Any], level: Level) -> None:
    check_splits(case, level, FEW_SPLITS)


@pytest.mark.sweep
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_many_splits(case: dict[str, Any], level: Level) -> None:
    check_splits(case, level, SPLITS)


WHOLE = block(
    call(parameter("a", 'x "y"\n'), parameter("n", '{"k": [1, "v"]}', ' string="false"')),
    call(parameter("b", "5", ' string="false"'), name="g"),
)
FRAGMENTS = st.sampled_from(
    [
        *("a", " ", "\n", "\n\n", "<", "</", ">", "/>", '"', "'", "\\", "{", "[", "]", "}", ","),
        *("</think>", "<think>", f"<{MARK}", f"</{MARK}", MARK, EOS, "é", "🤭", "STOP", "```\n"),
        *("invoke", ' name="f"', ' string="true"', ' string="false"', "parameter", " calls>"),
        *('<parameter name="z">', "</parameter>", '<invoke name="q">', "</invoke>", WHOLE),
    ]
)


@st.composite
def outputs(draw: st.DrawFn) -> str:
    """Output of a model that errs."""
    if draw(st.booleans()):
        return "".join(draw(st.lists(FRAGMENTS, max_size=12)))
    text = WHOLE
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 9))
        text = text[:place] + draw(FRAGMENTS | st.just("")) + text[place + cut :]
    return text


PARSINGS = st.builds(
    ParsingOptions,
    parse_tool_calls=st.booleans(),
    starts_in_tool_calls=st.booleans(),
    parse_json=st.booleans(),
    thinking_stage=st.sampled_from([None, *ThinkingStage]),
    stops=st.sampled_from([(), ("STOP",), ("\n\n",), ("\n", "<", f"<{MARK}"), ("]",)]),
    suppress_markup=st.booleans(),
)


@given(outputs(), PARSINGS, st.sampled_from(EngineFinish), st.randoms(use_true_random=False))
def test_any_output(
    text: str, parsing: ParsingOptions, finish: EngineFinish, source: random.Random
) -> None:
    chunks: list[Chunk] = [Text(text), Finish(finish)]
    answer = joined(parse(chunks, parsing))
    assert joined(parse(resplit(chunks, source), parsing)) == answer
    assert answer.end is not None
    closed = answer.calls[:-1] if answer.end.open_call else answer.calls
    assert all(isinstance(value, dict) for value in Answer(calls=closed).arguments)
    if "｜" not in text.replace(MARK, ""):
        # Parts of a marker may become one when what stands between them is dropped.
        assert not any(MARK in arguments for _, arguments in answer.calls)
    if finish is EngineFinish.STOP:
        assert not answer.end.open_call or answer.end.stop is not None


@given(outputs(), PARSINGS)
def test_any_output_at_official(text: str, parsing: ParsingOptions) -> None:
    parsing = replace(parsing, parse_json=False, suppress_markup=False)
    whole = joined(parse([Text(text), Finish()], parsing, Level.OFFICIAL))
    single = joined(parse([*map(Text, text), Finish()], parsing, Level.OFFICIAL))
    assert whole == single


@given(st.lists(st.integers(-1, 130_000), max_size=20), PARSINGS, st.sampled_from(Level))
def test_any_ids(ids: list[int], parsing: ParsingOptions, level: Level) -> None:
    chunks: list[Chunk] = [Tokens(ids), Finish()]
    end = joined(parse(chunks, parsing, level, tokenizer=True)).end
    assert end is not None and end.completion_tokens <= len(ids)
    if level is Level.CLIENTS and end.stop is None:
        assert end.completion_tokens == len(ids)


HOSTILE = {
    "bracket": "<",
    "bar": "｜",
    "newline": "\n",
    "close": "</",
    "opener": f"<{MARK}",
    "array": "[",
    "object": '{"a":',
    "quote": '"',
    "end": "</think>",
    "space": " ",
}


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("start", ["", "string", "raw", "tag"])
@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_of_anything_is_read(unit: str, start: str, level: Level) -> None:
    # Quadratic work would take hours.
    opened = f'<{MARK} invoke name="f"><{MARK} parameter name="a'
    more = {"": "", "tag": opened, "string": f'{opened}" string="true">'}
    more["raw"] = f'{opened}" string="false">['
    text = more[start] + unit * (10**6 // len(unit))
    parser = OutputParser(ParsingOptions(parse_tool_calls=True), SpecialTokens(), level)
    for place in range(0, len(text), 5000):
        parser.push(Text(text[place : place + 5000]))
    assert isinstance(parser.push(Finish()), list)
    assert parser.finished
