"""The output parser at level `official`: items, their granularity, the end, errors, fast path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.check.recipe_decode import chunk_from_json
from headrace.check.recipe_encode import options_of, parsing_from_json
from headrace.core.output import TokenLogprobs
from headrace.errors import StreamError
from headrace.recipe.chunks import Chunk, EngineFinish, Finish, Ready, Text, Tokens
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.events.piece_table import PieceTable, piece_table
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.parser.items import (
    AnswerEnd,
    AnswerFinish,
    CallArguments,
    CallBegin,
    CallNamed,
    Content,
    Item,
    PieceLogprobs,
    Start,
)
from headrace.recipe.parser.parser import OutputParser
from headrace.recipe.parts import IdText
from headrace.recipe.protocols.convert import convert
from tests.unit.recipe import golden
from tests.unit.recipe.answers import MARK, THINKING, TOOLS, block, call, joined, parameter, parse

PLAIN = ParsingOptions()
CASES = [
    case for kind in ("chat", "messages", "responses") for case in golden.cases(f"decode_{kind}")
]


def official(chunks: list[Chunk], parsing: ParsingOptions = TOOLS, **more: Any) -> list[Item]:
    return parse(chunks, parsing, Level.OFFICIAL, **more)


def test_start_comes_with_ready_or_before_the_first_piece() -> None:
    assert official([Ready(5, 3, "fp"), Ready(7, 7), Finish()])[0] == Start(5, 3, "fp")
    parser = OutputParser(TOOLS, SpecialTokens(), Level.OFFICIAL)
    assert parser.push(Text("<")) == [Start()]
    assert parser.push(Ready(5)) == []
    assert parser.push(Text("a")) == [Content("<"), Content("a")]


def test_every_item_comes_from_one_piece() -> None:
    chunks: list[Chunk] = [Text("a<"), Text("b"), Text("\n"), Text(""), Text("c"), Finish()]
    assert official(chunks)[1:-1] == [
        *(Content(text) for text in ("a<", "b", "\n", "", "c")),
    ]
    chunks = [Text("a\n"), Text(f"\n<{MARK}"), Text(' invoke name="f">'), Finish()]
    assert official(chunks)[1:-1] == [Content("a"), CallBegin(), CallNamed("f")]


def test_marks_of_arguments_are_items_of_their_own() -> None:
    text = block(call(parameter("a", "x\n"), parameter("n", "1", ' string="false"')), call())
    items = official([Text(text), Finish()])[1:-1]
    texts = [item.text for item in items if isinstance(item, CallArguments)]
    assert texts == ["{", '"a"', ": ", '"', "x\\n", '"', ", ", '"n"', ": ", "1", "}", "{}"]


def test_mark_waits_until_what_follows_is_decided() -> None:
    parser = OutputParser(TOOLS, SpecialTokens(), Level.OFFICIAL)
    parser.push(Text(f'<{MARK} invoke name="f"><{MARK} parameter name="a" string="true">x'))
    assert parser.push(Text(f"</{MARK}p")) == []
    assert parser.push(Text("q")) == [CallArguments('"')]


def test_leading_newlines_are_dropped_except_in_continuations() -> None:
    def texts(stage: ThinkingStage | None, text: str) -> tuple[str, str]:
        answer = joined(official([Text(text), Finish()], ParsingOptions(thinking_stage=stage)))
        return answer.reasoning, answer.content

    assert texts(None, "\n\na\n") == ("", "a\n")
    assert texts(ThinkingStage.REASONING_START, "\n\na\n\n</think>\nb") == ("a", "b")
    assert texts(ThinkingStage.REASONING_CONTINUATION, "\na\n</think>\nb") == ("\na", "b")
    assert texts(ThinkingStage.CONTENT_CONTINUATION, "\nb</think>\nc") == ("", "\nb\nc")


@pytest.mark.parametrize(
    ("stops", "text", "content", "stop"),
    [
        (("ababc",), "xabababcd", "xab", "ababc"),
        (("\n\n",), "\n\na\n\nb", "a", "\n\n"),
        (("\n",), "\na", "", "\n"),
        (("c", "bc"), "abcd", "ab", "c"),
        (("bc", "c"), "abcd", "a", "bc"),
        (("", "STOP"), "a STO", "a STO", None),
        (("</think>",), "a</think>b", "a", "</think>"),
    ],
)
def test_stops(stops: tuple[str, ...], text: str, content: str, stop: str | None) -> None:
    for chunks in ([Text(text)], [Text(character) for character in text]):
        answer = joined(official([*chunks, Finish()], ParsingOptions(stops=stops)))
        assert answer.content == content
        assert answer.end is not None and answer.end.stop == stop


def test_newlines_of_a_broken_marker_are_text() -> None:
    answer = joined(official([Text(f"a\n<\n<{MARK}"), Finish()]))
    assert answer.content == "a\n<\n"


@pytest.mark.parametrize(
    ("text", "finish", "end"),
    [
        ("a", Finish(), AnswerEnd.STOP),
        (block(call()), Finish(), AnswerEnd.TOOL_CALLS),
        (block(call()), Finish(EngineFinish.LENGTH), AnswerEnd.LENGTH),
        (block(call()), Finish(EngineFinish.CONTENT_FILTER), AnswerEnd.CONTENT_FILTER),
        (block(call()), None, AnswerEnd.END_OF_STREAM),
    ],
)
def test_end(text: str, finish: Finish | None, end: AnswerEnd) -> None:
    items = official([Text(text, 7)] if finish is None else [Text(text, 7), finish])
    assert items[-1] == AnswerFinish(end, completion_tokens=7)


def test_nothing_can_be_pushed_after_the_end() -> None:
    parser = OutputParser(TOOLS, SpecialTokens(), Level.OFFICIAL)
    parser.push(Finish())
    assert parser.finished
    assert parser.finish() == []
    with pytest.raises(StreamError, match=r"^stream processor has finished$"):
        parser.push(Text("a"))


def test_errors_close_the_stream() -> None:
    without = OutputParser(TOOLS, SpecialTokens(), Level.OFFICIAL)
    with pytest.raises(StreamError, match=r"^token chunk received without a tokenizer$"):
        without.push(Tokens([5]))
    assert (without.finish(), without.finished) == ([], False)
    with pytest.raises(StreamError, match=r"^stream processor is closed$"):
        without.push(Text("a"))
    counted = OutputParser(TOOLS, SpecialTokens(), Level.OFFICIAL, golden.real_tokenizer())
    text = r"^invalid log probabilities: 1 log probabilities for 2 token IDs$"
    with pytest.raises(StreamError, match=text):
        counted.push(Tokens([5, 6], [TokenLogprobs(-1.0)]))


def test_pieces_of_ids_and_their_log_probabilities() -> None:
    tokenizer = golden.real_tokenizer()
    first, second = tokenizer.encode("🤭")
    user = tokenizer.added["<｜User｜>"]
    entries = [TokenLogprobs(-float(i)) for i in range(5)]
    items = official(
        [
            Tokens([first], entries[:1]),
            Tokens([second], entries[1:2]),
            Tokens([first, user, 10**6], entries[2:]),
            Tokens([second]),
            Finish(),
        ],
        tokenizer=True,
    )
    assert items[1:-1] == [
        Content("🤭", PieceLogprobs((first, second), tuple(entries[:2]))),
        Content("\ufffd", PieceLogprobs((first,), (entries[2],))),
        Content("<｜User｜>", PieceLogprobs((user,), (entries[3],))),
    ]
    end = joined(items).end
    assert end is not None and end.completion_tokens == 4


def test_reasoning_tokens_are_those_of_the_text() -> None:
    text = "\n\none <｜User｜> two\n\n</think>x"
    ids = golden.real_tokenizer().encode_full(text)
    end = joined(official([Tokens(ids), Finish()], THINKING, tokenizer=True)).end
    assert end is not None and end.reasoning_tokens == len(
        golden.real_tokenizer().encode_full("one <｜User｜> two")
    )


def parsing_of(case: dict[str, Any], options: ConvertOptions) -> ParsingOptions:
    """The parsing options of a case."""
    if "parsing" in case:
        return parsing_from_json(case["parsing"])
    return convert(case["protocol"], json.dumps(case["request"]).encode(), options).parsing


def quiet_part(table: PieceTable, chunk: Tokens) -> IdText | None:
    """The text of a chunk that needs no parser."""
    ids = chunk.ids
    if chunk.logprobs is not None or not ids or not all(map(table.__getitem__, ids)):
        return None
    return None if ids[-1] in table.ends else table.part(ids)


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_quiet_pieces_need_no_parser(case: dict[str, Any], level: Level) -> None:
    options = options_of(case)
    parsing = parsing_of(case, options)
    tokenizer = golden.real_tokenizer() if case["with_tokenizer"] else None
    plain = OutputParser(parsing, options.special, level, tokenizer)
    quick = OutputParser(parsing, options.special, level, tokenizer)
    for value in case["chunks"]:
        if plain.finished:
            break
        chunk = chunk_from_json(value)
        try:
            items = plain.push(chunk)
        except StreamError:
            return
        kind = quick.quiet
        part = None
        if tokenizer is not None and kind is not None and isinstance(chunk, Tokens):
            part = quiet_part(piece_table(tokenizer, quick.risks, kind is CallArguments), chunk)
        if kind is not None and part is not None:
            quick.skip(len(chunk.ids), part)
            assert items == [kind(str(part))]
        else:
            assert items == quick.push(chunk)
    assert plain.finish() == quick.finish()
