"""Answers as plain values: reasoning, content, calls."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import pytest

from headrace.model.tiny_tokenizer import IMAGE, NOISE, control_ids, tiny_tokenizer
from headrace.recipe import AnswerText, Codec, ConfigTokenIds, Tokenizer, bind
from headrace.recipe.converted import ParsingOptions, ThinkingStage

IDS = control_ids()
TOKENIZER = Tokenizer(json.dumps(tiny_tokenizer()).encode())
CODEC = Codec(
    TOKENIZER,
    bind(TOKENIZER, ConfigTokenIds(IDS["<｜end▁of▁sentence｜>"], IDS[IMAGE], IDS[NOISE])),
)
TOOLS = ParsingOptions(parse_tool_calls=True, thinking_stage=ThinkingStage.REASONING_START)
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="x" string="true">é</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
ANSWER = TOKENIZER.encode_full("Hm.\n</think>\n\nnaïve\n\n" + CALL + "\n</｜DSML｜ calls>")


def read(
    ids: Sequence[int], parsing: ParsingOptions, cuts: Sequence[int] = (), *, stopped: bool = True
) -> tuple[str, str, list[tuple[str, str]]]:
    answer = AnswerText(CODEC, parsing)
    edges = [0, *sorted(cuts), len(ids)]
    deltas = [answer.push(ids[i:j]) for i, j in itertools.pairwise(edges)]
    deltas.append(answer.finish(stopped=stopped))
    reasoning = "".join(delta.reasoning for delta in deltas)
    return reasoning, "".join(delta.content for delta in deltas), answer.calls


@pytest.mark.parametrize("seed", range(20))
def test_the_grouping_of_the_ids_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    cuts = [rng.randint(0, len(ANSWER)) for _ in range(rng.randint(0, 12))]
    assert read(ANSWER, TOOLS, cuts) == ("Hm.", "naïve", [("f", '{"x": "é"}')])


def test_reasoning_without_end_is_no_content() -> None:
    assert read(TOKENIZER.encode("Hm."), TOOLS) == ("Hm.", "", [])


def test_a_call_that_was_cut_is_none() -> None:
    whole = TOKENIZER.encode_full("</think>" + CALL)
    cut = TOKENIZER.encode_full("</think>" + CALL + '\n<｜DSML｜invoke name="g">\n')
    assert read(whole, TOOLS, stopped=False)[2] == [("f", '{"x": "é"}')]
    assert read(cut, TOOLS, stopped=False)[2] == [("f", '{"x": "é"}')]
    assert [name for name, _ in read(cut, TOOLS)[2]] == ["f", "g"]


def test_text_is_text_where_no_tool_was_offered() -> None:
    ids = TOKENIZER.encode_full(CALL)
    assert read(ids, ParsingOptions()) == ("", CALL, [])
