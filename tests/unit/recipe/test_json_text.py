"""JSON text forms and the reading rules of tool call arguments."""

from __future__ import annotations

import json

import pytest

from headrace.recipe.json_text import (
    compact_json,
    parse_arguments,
    python_json,
    read_json,
    spaced_json,
)

VALUE = {
    "s": '\x00\x1f\x7f\b\f\n\r\t"\\/\u2028é😀',
    "n": [0, -1, 2**64 - 1, -(2**63), 1.0, -0.0, 0.0001, 1e15, 1e16, 1.5e300, 5e-324],
    "e": [[], {}, None, True, False],
}


def test_python_form_is_that_of_json_dumps() -> None:
    for value in (VALUE, VALUE["s"], 3, True, None, 1e-05, [1e-07], {}):
        assert python_json(value) == json.dumps(value, ensure_ascii=False)


def test_forms_agree_where_floats_are_not_small() -> None:
    assert spaced_json(VALUE) == python_json(VALUE)
    assert json.loads(compact_json(VALUE)) == VALUE
    assert compact_json({"a": [1, 2], "b": {"c: d, e": None}}) == '{"a":[1,2],"b":{"c: d, e":null}}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-05, "0.00001"),
        (-1.2345e-05, "-0.000012345"),
        (9.9999e-05, "0.000099999"),
        (0.0001, "0.0001"),
        (1e-06, "1e-6"),
        (-2.5e-07, "-2.5e-7"),
        (9e-09, "9e-9"),
        (1e-10, "1e-10"),
        (1e16, "1e+16"),
    ],
)
def test_small_floats_of_the_other_forms(value: float, text: str) -> None:
    assert spaced_json(value) == compact_json(value) == text
    assert spaced_json({"k": [value, value]}) == f'{{"k": [{text}, {text}]}}'
    assert compact_json({"k": [value, value]}) == f'{{"k":[{text},{text}]}}'


def test_what_looks_like_a_small_float_inside_a_string_stays() -> None:
    value = {"1e-05": '2e-07 "3e-08" \\', "x": 4e-09}
    assert spaced_json(value) == '{"1e-05": "2e-07 \\"3e-08\\" \\\\", "x": 4e-9}'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", "{}"),
        (' \n{"a" : 1}\t', "{'a': 1}"),
        ('{"a":-0}', "{'a': -0.0}"),
        ('{"a":"-0","b":0}', "{'a': '-0', 'b': 0}"),
        ('{"a":18446744073709551615}', "{'a': 18446744073709551615}"),
        ('{"a":18446744073709551616}', "{'a': 1.8446744073709552e+19}"),
        ('{"a":-9223372036854775808}', "{'a': -9223372036854775808}"),
        ('{"a":[-9223372036854775809]}', "{'a': [-9.223372036854776e+18]}"),
        ('{"a":1E5}', "{'a': 100000.0}"),
        ('{"a":1e-400}', "{'a': 0.0}"),
        ('{"a":1,"b":2,"a":3}', "{'a': 3, 'b': 2}"),
        ('{"a":"\\ud83d\\ude00\\/"}', "{'a': '😀/'}"),
        ('{"":null}', "{'': None}"),
    ],
)
def test_arguments_are_read(text: str, value: str) -> None:
    assert repr(parse_arguments(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        '"{}"',
        "{}x",
        "{} {}",
        "\ufeff{}",
        "\x0b{}",
        '{"a":1,}',
        '{"a":01}',
        '{"a":1.}',
        '{"a":.5}',
        '{"a":+1}',
        '{"a":NaN}',
        '{"a":-Infinity}',
        '{"a":1e400}',
        '{"a":"\t"}',
        '{"a":"\\ud800"}',
        '{"a":"\\udc00\\ud800"}',
        '{"\\ud800":1}',
        '{"a":' + "1" * 400 + "}",
        '{"a":' + "1" * 5000 + "}",
        '{"a":' + "1" * 400 + ',"a":1}',
        "{'a':1}",
    ],
)
def test_arguments_are_refused(text: str) -> None:
    assert parse_arguments(text) is None


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"[":', "}")])
def test_the_128th_level_is_refused(opening: str, closing: str) -> None:
    def nested(levels: int, behind: str = "") -> str:
        return '{"a":' + opening * (levels - 1) + "[]" + closing * (levels - 1) + behind + "}"

    assert parse_arguments(nested(126)) is not None
    assert parse_arguments(nested(127)) is None
    # Also where a later key of the same name takes the place of the value.
    assert parse_arguments(nested(126, ',"a":1')) == {"a": 1}
    assert parse_arguments(nested(127, ',"a":1')) is None
    assert parse_arguments(nested(100_000)) is None


def test_many_brackets_are_not_depth() -> None:
    assert parse_arguments('{"a":[' + "[]," * 500 + '"' + "[{" * 500 + '"]}') is not None


@pytest.mark.parametrize("bracket", ["[", "{", "]", "}"])
def test_brackets_in_one_string_are_no_depth(bracket: str) -> None:
    assert read_json(f'"{bracket * 200}"') == bracket * 200


def test_reading_any_value() -> None:
    assert read_json("[1, -0, 1e2]") == [1, -0.0, 100.0]
    with pytest.raises(ValueError, match="truncated"):
        read_json("[1,")
