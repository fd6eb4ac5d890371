"""Level `clients` of the output parser: one test per difference from the official codec."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headrace.core.output import TokenLogprobs
from headrace.recipe.chunks import EngineFinish, Finish, Stopped, Text, Tokens
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.converted import ParsingOptions
from headrace.recipe.parser.items import AnswerEnd, CallArguments, Content
from tests.unit.recipe.answers import (
    EOS,
    MARK,
    THINKING,
    TOOLS,
    block,
    call,
    joined,
    parameter,
    parse,
    read,
    read_ids,
)
from tests.unit.recipe.golden import real_tokenizer

FALSE = ' string="false"'
JSON = ParsingOptions(parse_tool_calls=True, parse_json=True)


def test_well_formed_calls_are_streamed() -> None:
    text = "hi" + block(call(parameter("a", 'x "y"\n'), parameter("n", "[1, 2]", FALSE)), call())
    answer = read(text)
    assert (answer.content, [name for name, _ in answer.calls]) == ("hi", ["f", "f"])
    assert answer.calls[0][1] == '{"a": "x \\"y\\"\\n", "n": [1, 2]}'
    assert answer.arguments[1] == {}
    assert answer.end is not None and answer.end.end is AnswerEnd.TOOL_CALLS
    deltas = [i.text for i in parse(map(Text, text)) if isinstance(i, CallArguments)]
    assert len(deltas) > 10


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("oops here", "oops here"),
        ("5", 5),
        (" -2.5e3\n", -2500.0),
        ("true", True),
        ("None", None),
        ('"text"', "text"),
        ('"text" and more', '"text" and more'),
        ("01", "01"),
        ("NaN", "NaN"),
        ("", None),
        ("[1, 2", [1, 2]),
        ("{'a': True, b: [None,],}", {"a": True, "b": [None]}),
        ('{"a": "cut', {"a": "cut"}),
        ('{"a":', {"a": None}),
        ("[[1}", [[1]]),
    ],
)
def test_bare_value_is_always_json(value: str, expected: object) -> None:
    assert read(block(call(parameter("v", value, FALSE)))).arguments == [{"v": expected}]


def test_first_of_parameters_with_one_name_counts() -> None:
    text = block(call(parameter("a", "x"), parameter("a", "[1", FALSE), parameter("b", "y")))
    assert read(text).arguments == [{"a": "x", "b": "y"}]


@pytest.mark.parametrize("name", ["shipping address", 'say "hi"', "a > b", "a\\b", "a<b"])
def test_names_of_parameters_may_have_any_characters(name: str) -> None:
    assert read(block(call(parameter(name, "x")))).arguments == [{name: "x"}]


@pytest.mark.parametrize("name", ["get weather", 'a"b', "files::read"])
def test_names_of_tools_may_have_any_characters(name: str) -> None:
    assert read(block(call(name=name))).calls == [[name, "{}"]]


def test_missing_string_attribute() -> None:
    text = block(
        call(parameter("a", "stone", ""), parameter("b", "5", ""), parameter("c", "[", ""))
    )
    assert read(text).arguments == [{"a": "stone", "b": 5, "c": "["}]


def test_missing_end_of_parameter() -> None:
    text = block(call(f'<{MARK} parameter name="a" string="true">ls 2>&1\n', parameter("b", "x")))
    assert read(text).arguments == [{"a": "ls 2>&1", "b": "x"}]
    text = block(call(f'<{MARK} parameter name="a" string="true">v'), call(name="g"))
    assert read(text).calls == [["f", '{"a": "v"}'], ["g", "{}"]]


def test_missing_end_of_invoke_and_block() -> None:
    start = f'\n\n<{MARK} calls>\n<{MARK} invoke name="f">\n' + parameter("a", "x")
    for text in (start, start + f"</{MARK} calls>", start + call(name="g")):
        answer = read("c" + text)
        assert (answer.content, answer.arguments[0]) == ("c", {"a": "x"})


@pytest.mark.parametrize("name", ["parameter", " parametr", "param", " foo", "", "/parameter"])
def test_closing_tag_of_parameter_may_have_any_name(name: str) -> None:
    value = f'<{MARK} parameter name="a" string="true">v</{MARK}{name}>\n'
    assert read(block(call(value, parameter("b", "w")))).arguments == [{"a": "v", "b": "w"}]


def test_stray_closing_tag_of_parameter_closes_nothing() -> None:
    text = block(call(parameter("a", f"v</{MARK} parameter> junk"), parameter("b", "w")))
    assert read(text).arguments == [{"a": "v", "b": "w"}]


def test_tag_without_its_end() -> None:
    value = f'<{MARK} parameter name="a" string="true" stone</{MARK} parameter>\n'
    assert read(block(call(value))).arguments == [{"a": "stone"}]


def test_parameter_without_marker() -> None:
    text = block(
        call(
            f'<parameter name="a">granite</{MARK} parameter>\n',
            '<parameter name="b" string="true">chalk</parameter>\n',
        )
    )
    assert read(text).arguments == [{"a": "granite", "b": "chalk"}]
    xml = "<parameter>x</parameter>"
    assert read(block(call(parameter("a", xml)))).arguments == [{"a": xml}]


def test_marker_without_bracket() -> None:
    value = f'<{MARK} parameter name="a" string="true">v{MARK} parameter>\n'
    assert read(block(call(value, parameter("b", "w")))).arguments == [{"a": "v", "b": "w"}]


@pytest.mark.parametrize(
    "wrapper", ["calls", " calls", "tool_calls", "function_calls", "toolcalls", "tool_use", "foo"]
)
def test_any_wrapper_is_known_and_text_after_it_is_content(wrapper: str) -> None:
    answer = read(f"a\n\n<{MARK}{wrapper}>\n{call()}</{MARK}{wrapper}>\n\ntail")
    assert (answer.content, answer.calls) == ("a\n\ntail", [["f", "{}"]])


def test_white_space_after_calls_is_no_content() -> None:
    assert read(block(call()) + " \n\n").content == ""
    assert read(block(call()) + "\n\ntail").content == "tail"


def test_bare_and_self_closing_invokes() -> None:
    assert read("x\n\n" + call(parameter("a", "y"))).arguments == [{"a": "y"}]
    answer = read(f'x\n\n<{MARK} invoke name="f"/>\n<{MARK} invoke name="g" />\ntail')
    assert (answer.content, answer.calls) == ("x\ntail", [["f", "{}"], ["g", "{}"]])


def test_second_block() -> None:
    answer = read("a" + block(call()) + "\nb" + block(call(name="g")) + "c")
    assert (answer.content, answer.calls) == ("a\nbc", [["f", "{}"], ["g", "{}"]])


def test_ascii_bars_in_text() -> None:
    text = ("x" + block(call(parameter("a", "y")))).replace("｜", "|")
    assert (read(text).content, read(text).arguments) == ("x", [{"a": "y"}])
    value = "<|DSML|parameter>"
    assert read(block(call(parameter("a", value)))).arguments == [{"a": value}]


def test_arguments_as_one_object() -> None:
    assert read(block(call('{"a": [1]}\n'))).arguments == [{"a": [1]}]
    assert read(block(call("prose\n"))).arguments == [{}]
    assert read(block(call("city: Rome\n"))).arguments == [{"arguments": "city: Rome"}]


def test_text_in_a_block_is_content() -> None:
    text = f"\n\n<{MARK} calls>\nsome prose\n{call()}</{MARK} calls>"
    assert (read(text).content, read(text).calls) == ("some prose", [["f", "{}"]])


def test_parameter_outside_of_a_call_is_content() -> None:
    answer = read(block(parameter("a", "value"), call()))
    assert (answer.content, answer.calls) == ("value", [["f", "{}"]])


def test_marker_in_prose_opens_nothing() -> None:
    text = f"The <{MARK} is a marker, </{MARK}, too.\n\nMore."
    assert read(text).content == "The  is a marker, , too.\n\nMore."
    for text in ("now", "a word"):
        answer = read(f"I write <{MARK} {text}</think>done", THINKING)
        assert (answer.reasoning, answer.content) == (f"I write  {text}", "done")
        answer = read(f"I write <{MARK} {text}", THINKING)
        assert answer.reasoning == answer.content == f"I write  {text}"


def test_call_while_thinking() -> None:
    answer = read("t" + block(call()) + "\n</think>\n\nlater", THINKING)
    assert (answer.reasoning, answer.content, answer.calls) == ("t", "later", [["f", "{}"]])


def test_reasoning_that_never_ends_is_the_answer() -> None:
    answer = read("only thoughts", THINKING)
    assert (answer.reasoning, answer.content) == ("only thoughts", "only thoughts")
    assert answer.end is not None and answer.end.empty_after_reasoning
    assert read("thoughts", THINKING, finish=EngineFinish.LENGTH).content == ""
    assert read("t" + block(call()), THINKING).content == ""
    assert read(f"t\n\n<{MARK} inv", THINKING).content == "t"


def test_nothing_after_reasoning_is_told() -> None:
    ends = [read(text, THINKING).end for text in ("t</think>", "t</think>a", "t" + block(call()))]
    assert [end is not None and end.empty_after_reasoning for end in ends] == [True, False, False]


def test_suppressed_markup() -> None:
    parsing = ParsingOptions(suppress_markup=True)
    answer = read("a" + block(call(parameter("a", "x"))) + "\nb", parsing)
    assert (answer.content, answer.calls) == ("a\nb", [])
    assert answer.end is not None and answer.end.end is AnswerEnd.STOP


@pytest.mark.parametrize("reason", [EngineFinish.LENGTH, EngineFinish.CONTENT_FILTER])
def test_cut_call_is_never_complete(reason: EngineFinish) -> None:
    text = "c" + block(call(parameter("a", "xy"), parameter("n", "[1]", FALSE)))
    whole = text.index(f"</{MARK} invoke>") + len(f"</{MARK} invoke>")
    named = text.index('name="f">') + len('name="f">')
    for cut in range(len(text) + 1):
        answer = read(text[:cut], finish=reason)
        assert answer.end is not None and answer.end.end.value == reason.value
        assert answer.end.open_call == (named <= cut < whole)
        assert answer.content in ("c"[:cut], "c\n", "c\n\n", "c\n\n<")
        if answer.end.open_call:
            with pytest.raises(ValueError):
                json.loads(answer.calls[0][1])
        assert MARK[:2] not in "".join(text for _, text in answer.calls)


def test_call_that_the_model_left_open_is_completed() -> None:
    text = "c" + block(call(parameter("a", "xy"), parameter("n", "[1]", FALSE)))
    for cut in range(len(text)):
        answer = read(text[:cut])
        assert all(isinstance(value, dict) for value in answer.arguments)
        assert answer.end is not None and not answer.end.open_call


def test_end_of_sequence_at_the_end_is_no_text() -> None:
    assert read("hi" + EOS).content == "hi"
    assert read("hi" + EOS + "x").content == "hi" + EOS + "x"
    assert read("2 <").content == "2 <"
    assert read(block(call(parameter("a", "x")))[:-30] + EOS).arguments == [{"a": "x"}]
    tokenizer = real_tokenizer()
    assert read_ids([*tokenizer.encode("hi"), tokenizer.added[EOS]]).content == "hi"


def test_stops_count_in_content_only() -> None:
    parsing = replace(THINKING, stops=("STOP",))
    answer = read("a STOP</think>b" + block(call(parameter("a", "STOP"))) + "c STOP d", parsing)
    assert (answer.reasoning, answer.content) == ("a STOP", "bc ")
    assert answer.arguments == [{"a": "STOP"}]
    assert answer.end is not None and answer.end.stop == "STOP"
    assert answer.end.end is AnswerEnd.STOP_SEQUENCE


def test_json_mode_gives_the_value_alone() -> None:
    assert read('Sure:\n```json\n{"a": 1}\n```\nbye', JSON).content == '{"a": 1}'
    assert read("no brackets", JSON).content == ""
    answer = read('{"a": 1}' + block(call()), JSON)
    assert (answer.content, answer.calls) == ('{"a": 1}', [["f", "{}"]])


def test_incomplete_character_at_the_end() -> None:
    ids = real_tokenizer().encode("ok 🤭")[:-1]
    answer = read_ids(ids)
    assert answer.content == "ok \ufffd"
    assert answer.end is not None and answer.end.completion_tokens == len(ids)


def test_markup_of_ordinary_tokens_is_content() -> None:
    text = "a" + block(call())
    assert read_ids(real_tokenizer().encode(text)).content == text
    assert read_ids(real_tokenizer().encode_full(text)).calls == [["f", "{}"]]


def test_markup_is_known_by_spelling_when_the_tokenizer_has_no_token() -> None:
    special = SpecialTokens(dsml="!D!")
    text = ("a" + block(call())).replace(MARK, "!D!")
    chunks = [Tokens(real_tokenizer().encode(text)), Finish()]
    answer = joined(parse(chunks, tokenizer=True, special=special))
    assert (answer.content, answer.calls) == ("a", [["f", "{}"]])


@pytest.mark.parametrize(
    ("before", "after"),
    [("let me think\n\n", "</think>hi"), ("one two", block(call())), ("\n\nx.", "</think>")],
)
def test_reasoning_tokens_are_counted(before: str, after: str) -> None:
    encode = real_tokenizer().encode_full
    # Of a tag, `<` is a token of its own here; newlines before it may be.
    newlines = len(encode("\n\n")) if after.startswith("\n\n<") else 0
    answer = read_ids([*encode(before), *encode(after)], THINKING)
    assert answer.end is not None
    assert answer.end.reasoning_tokens == len(encode(before)) + newlines


def test_reasoning_tokens_do_not_depend_on_the_pieces() -> None:
    encode = real_tokenizer().encode_full
    ids = encode(f"so <{MARK} is prose\n\nmore of it</{MARK} calls> and more</think>x")
    counts = set()
    for size in (1, 2, 3, 5, 1000):
        chunks = [Tokens(ids[i : i + size]) for i in range(0, len(ids), size)]
        answer = joined(parse([*chunks, Finish()], THINKING, tokenizer=True))
        assert answer.content == "x" and answer.end is not None
        assert answer.end.reasoning_tokens == len(encode(answer.reasoning))
        counts.add(answer.end.reasoning_tokens)
    assert len(counts) == 1


def test_text_without_tokenizer_has_no_reasoning_tokens() -> None:
    answer = read("t</think>x", THINKING)
    assert answer.end is not None and answer.end.reasoning_tokens is None
    chunks = [Text("one two three</think>x", 9), Finish()]
    counted = joined(parse(chunks, THINKING, tokenizer=True)).end
    assert counted is not None and counted.reasoning_tokens == 3


def test_empty_text_makes_no_item() -> None:
    items = parse([Text("a"), Text("", 2), Finish()], TOOLS)
    assert [item.text for item in items if isinstance(item, Content)] == ["a"]
    end = joined(items).end
    assert end is not None and end.completion_tokens == 2


def test_every_token_has_one_log_probability() -> None:
    # The newlines are held back, so that the text before them is an item of its own.
    chunks = [real_tokenizer().encode(text) for text in ("hi\n\n", "you", "\n", "\n<b")]
    pushed = [Tokens(ids, [TokenLogprobs(-1.0)] * len(ids)) for ids in chunks]
    contents = [
        item
        for item in parse([*pushed, Finish()], TOOLS, tokenizer=True)
        if isinstance(item, Content)
    ]
    assert "".join(item.text for item in contents) == "hi\n\nyou\n\n<b"
    entries = [entry for item in contents if item.logprobs for entry in item.logprobs.ids]
    assert entries == [token for ids in chunks for token in ids]


def test_the_engine_finds_stop_strings() -> None:
    parsing = replace(TOOLS, stops=("STOP",), engine_stops=True)
    text = real_tokenizer().encode("a STOP b ")
    last = real_tokenizer().encode("STOP")
    answer = joined(parse([Tokens(text), Stopped(last, "STOP", 4)], parsing, tokenizer=True))
    assert answer.content == "a STOP b "
    assert answer.end is not None
    assert (answer.end.end, answer.end.stop) == (AnswerEnd.STOP_SEQUENCE, "STOP")
    assert answer.end.completion_tokens == len(text) + len(last)
