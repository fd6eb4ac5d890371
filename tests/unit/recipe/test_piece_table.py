"""Texts of ids that need no parser, and the ends of pieces that have to wait."""

from __future__ import annotations

import pytest

from headrace.recipe.events.event import json_text
from headrace.recipe.events.piece_table import PieceTable
from headrace.recipe.json_text import escaped
from headrace.recipe.parser.matcher import Pattern, Risks, matcher_of
from tests.unit.recipe import golden

RISKS = Risks(frozenset("Q"), frozenset({("<", True), ("</", False)}))


@pytest.mark.parametrize("value", [False, True])
def test_every_id_has_its_own_text(value: bool) -> None:
    tokenizer = golden.real_tokenizer()
    table = PieceTable(tokenizer, Risks(frozenset(), frozenset()), value)
    for token_id, text in enumerate(tokenizer.whole_texts):
        known = bool(text) and "\ufffd" not in text and not tokenizer.is_added(token_id)
        expected = json_text(escaped(text) if value else text)[1:-1] if known and text else None
        assert table[token_id] == expected, token_id
    assert not table.ends
    assert table[-1] is None and table[tokenizer.vocab_size] is None


def test_ids_that_the_parser_has_to_see() -> None:
    tokenizer = golden.real_tokenizer()
    table = PieceTable(tokenizer, RISKS, value=False)
    for text, known in (("Q", False), (" hello", True), (" <=", True), ("\n", True)):
        (token_id,) = tokenizer.encode(text)
        assert (table[token_id] is not None) == known, text
    assert table[tokenizer.added["</think>"]] is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("a", 0),
        ("a/", 0),
        ("a\n\n", 2),
        ("a<", 1),
        ("a\n\n<", 3),
        ("a\n</", 2),
        ("<\n", -1),
        ("<\n\n<", -1),
        ("</\n", -1),
        ("", 0),
    ],
)
def test_risky_ends(text: str, size: int) -> None:
    assert PieceTable(golden.real_tokenizer(), RISKS, value=False).risky_end(text) == size


def test_ids_that_no_piece_may_simply_end_with() -> None:
    tokenizer = golden.real_tokenizer()
    table = PieceTable(tokenizer, RISKS, value=True)
    for text, end in (
        (".\n\n", (b".", b"\\\\n\\\\n", "\n\n")),
        (" <", (b" ", b"<", "<")),
        ("</", (b"", b"</", "</")),
        ("/", None),
        ("<\n", None),
    ):
        (token_id,) = tokenizer.encode(text)
        assert table[token_id] is not None
        assert table.ends[token_id] == end, text
    (plain,) = tokenizer.encode(" hello")
    assert table[plain] == b" hello" and plain not in table.ends


def test_risks_of_patterns() -> None:
    patterns = (
        Pattern("<D", (1, 2), newlines=True),
        Pattern("</D", (2, 3)),
        Pattern("E", (0, 1), newlines=True),
        Pattern("stop"),
        Pattern("Z", (0, 1), never=True),
    )
    tokens, spelled = matcher_of(patterns).risks
    assert tokens == Risks(frozenset("s"), frozenset({("<", True), ("</", False)}))
    assert spelled.anywhere == frozenset("<EsZ")
    assert spelled.at_end == {("", True)}
