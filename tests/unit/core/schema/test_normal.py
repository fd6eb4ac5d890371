"""Schemas behind %json in Lark texts: as all others, and with white space that ends."""

from __future__ import annotations

import pytest

from headrace.core.grammar import MAX_JSON_SPACES, GrammarKind, GrammarSpec
from headrace.core.schema.normal import normal_lark, normal_spec
from headrace.errors import InvalidGrammar
from tests.unit.recipe.grammars import accepts, matcher_of


@pytest.mark.parametrize("schema", ['{"type": "object"}', "{}"])
def test_white_space_behind_json_ends(schema: str) -> None:
    spec = GrammarSpec(GrammarKind.LARK, normal_lark(f"start: x\nx: %json {schema}", "grammar"))
    for count in (0, 1, MAX_JSON_SPACES):
        assert accepts(matcher_of(spec), '{"a":' + " " * count + "1}")
    assert not accepts(matcher_of(spec), '{"a":' + " " * (MAX_JSON_SPACES + 1) + "1}")


def test_lines_stay_where_they_are() -> None:
    text = 'start: x\nx: %json {\n "type":\n "integer"}\ny: "b"'
    found = normal_lark(text, "grammar").split("\n")
    assert len(found) == len(text.split("\n"))
    assert found[-1] == 'y: "b"'


def test_what_is_no_schema_stays_as_it_is() -> None:
    text = 'start: "%json {" x // %json {\nx: "a"'
    assert normal_lark(text, "grammar") == text


def test_a_schema_that_cannot_be_read_names_its_line() -> None:
    with pytest.raises(InvalidGrammar, match=r"^guided_grammar: %json in line 2"):
        normal_lark('start: x\nx: %json {"type": "nothing"}', "guided_grammar")


def test_what_only_looks_like_schemas_is_limited() -> None:
    few, many = (f"start: x\n// {'%json { ' * count}" for count in (100, 101))
    assert normal_lark(few, "grammar") == few
    with pytest.raises(InvalidGrammar, match="more than 100 places") as caught:
        normal_lark(many, "guided_grammar")
    assert caught.value.param == "guided_grammar"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"minimum": NaN}', "grammar.minimum"),
        ('{"items": {"enum": [1, [-Infinity]]}}', "grammar.items.enum[1][0]"),
        ('{"maximum": 1e999}', "grammar.maximum"),
        ("NaN", "grammar"),
    ],
)
def test_what_is_no_number_is_told_with_its_path(text: str, place: str) -> None:
    with pytest.raises(InvalidGrammar, match="is no number of JSON") as caught:
        normal_spec(GrammarSpec(GrammarKind.JSON_SCHEMA, text))
    assert caught.value.param == place
    assert caught.value.message.startswith(f"{place}: ")
