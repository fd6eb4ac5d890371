"""Repair of JSON values while they arrive."""

from __future__ import annotations

import json
import random

import pytest

from headrace.recipe.parser.json_repair import MAX_DEPTH, JsonRepair, bare_value, is_json


def repaired(text: str, sizes: random.Random | None = None) -> str:
    """The result for a text, in one piece or in random ones."""
    repair = JsonRepair()
    out, start = "", 0
    while start < len(text):
        end = start + (sizes.randint(1, 4) if sizes else len(text))
        out += repair.push(text[start:end])
        start = end
    return out + repair.close()


def random_value(source: random.Random, depth: int = 0) -> object:
    kind = source.randint(0, 2 if depth < 4 else 0)
    if kind == 1:
        return [random_value(source, depth + 1) for _ in range(source.randint(0, 3))]
    if kind == 2:
        return {key: random_value(source, depth + 1) for key in source.sample('ab\\"é', 2)}
    return source.choice([0, -1.5, 1e30, True, None, "", 'a "b" \\ \n é', "{[,:]}"])


def test_valid_json_is_unchanged() -> None:
    source = random.Random(1)
    for _ in range(500):
        indent = source.choice([None, 1])
        text = json.dumps([random_value(source)], indent=indent, ensure_ascii=indent is None)
        assert repaired(text, source) == text


def test_anything_becomes_valid_json_however_it_is_split() -> None:
    source = random.Random(2)
    for _ in range(2000):
        characters = list(json.dumps([random_value(source)]))
        for _ in range(source.randint(1, 5)):
            place = source.randint(1, len(characters))
            if source.random() < 0.5:
                del characters[place : place + 2]
            else:
                characters.insert(place, source.choice("{}[]\",:'\\ux1t \n\x01-.e"))
        text = "".join(characters)
        result = repaired(text)
        json.loads(result)
        assert result == repaired(text, source)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2", [1, 2]),
        ("{'a': 'it\"s', b: True, c}", {"a": 'it"s', "b": True, "c": None}),
        ("[1,,2,]", [1, 2]),
        ('{"a" 1 "b":}', {"a": 1, "b": None}),
        ("[{]}", [{}]),
        ('["a\n\\q\\u12"]', ["a\n\\q\\u12"]),
        ("[tr", [True]),
        ("[1.", [1]),
        ("[1}2]", [1, 2]),
        ('{"a": 1} junk', {"a": 1}),
        ("[" + "9" * 5000 + "]", ["9" * 5000]),
    ],
)
def test_repairs(text: str, expected: object) -> None:
    assert json.loads(repaired(text)) == expected


def test_depth_is_bounded() -> None:
    for opener in ("[", '{"a":'):
        result = repaired(opener * 10**5)
        json.loads(result)
        assert result.count(opener[0]) == MAX_DEPTH


def test_bare_values() -> None:
    assert [bare_value(text) for text in ("1", " true ", "", "None", "tru", '"a"', '"a')] == [
        *("1", " true ", "null", "null", '"tru"', '"a"', '"\\"a"')
    ]
    assert [is_json(text) for text in ("1", "[1]", "[", "[NaN]", "x", "")] == [
        *(True, True, False, False, False, False)
    ]
