"""The raw input of custom tools, read from streamed arguments."""

from __future__ import annotations

import json

import pytest

from headrace.recipe.events.custom_input import CustomInput


def read(*pieces: str) -> str:
    reader = CustomInput()
    return "".join(map(reader.feed, pieces)) + reader.finish()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "abc"}', "abc"),
        ('{"input":"abc"tail', "abc"),
        ('\n{\t"input"\f:\r"a\\n\\u0041\\ud83d\\ude00z"}', "a\nA😀z"),
        ('{"input":"\\b\\f\\/\\"\\\\"}', '\b\f/"\\'),
        # Invalid escapes stay as they are; the character that shows it belongs to them.
        ('{"input":"\\ud83d"', '\\ud83d"'),
        ('{"input":"\\ud83dx"', "\\ud83dx"),
        ('{"input":"\\ud83d\\n"', "\\ud83d\\n"),
        ('{"input":"\\ud83d\\u0041"', "\\ud83d\\u0041"),
        ('{"input":"\\ude00x"', "\\ude00x"),
        ('{"input":"\\q\\u12G4x"', "\\q\\u12G4x"),
        # Unfinished: nothing is lost.
        ('{"inp', '{"inp'),
        ('{"input":"a\\', "a\\"),
        ('{"input":"\\u12', "\\u12"),
        ('{"input":"\\ud83d\\u1', "\\ud83d\\u1"),
        # Any other form passes.
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input":1}', '{"input":1}'),
        ('{"input"\v:"a"}', '{"input"\v:"a"}'),
        ("{}", "{}"),
        ("", ""),
    ],
)
def test_input_does_not_depend_on_splits(arguments: str, expected: str) -> None:
    assert read(arguments) == expected
    assert read(*arguments) == expected
    for place in range(len(arguments)):
        assert read(arguments[:place], arguments[place:]) == expected


def test_text_comes_as_soon_as_it_is_certain() -> None:
    reader = CustomInput()
    pieces = ["{", '"input"', ': "', "ab", "\\u00", "e9c", '"', "}"]
    assert list(map(reader.feed, pieces)) == ["", "", "", "ab", "", "éc", "", ""]


def test_long_input_is_read_in_linear_time() -> None:
    text = '\\"\n' * 100_000
    assert read(*json.dumps({"input": text})) == text
    assert read("{", *(" " * 200_000)) == "{" + " " * 200_000
