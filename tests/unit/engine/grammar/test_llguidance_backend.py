"""What the llguidance backend refuses, in words of ours."""

from __future__ import annotations

import pytest

from headrace.core.grammar import MAX_JSON_SPACES, GrammarKind
from headrace.errors import InvalidGrammar
from tests.unit.engine.grammar.grammars import EOS, backend, tokenizer


@pytest.mark.parametrize(
    "text",
    [
        f'start: "a" <[{EOS}]> "x"',
        f'start: <[{EOS}-{EOS + 40}]> "x"',
        f"start: <[{EOS + 5},{max(EOS - 1, 0)}-{EOS}]>",
        f'start: "a" <[^{EOS + 7}]>',
    ],
)
def test_the_end_of_the_text_is_no_token_of_a_grammar(text: str) -> None:
    with pytest.raises(InvalidGrammar, match="which ends an answer"):
        backend().compile(GrammarKind.LARK, text)


@pytest.mark.parametrize(
    "text", [f'start: "a" <[{EOS + 5}]> "x"', f'start: "<[{EOS}]>" "x"', f"start: <[^{EOS}]>"]
)
def test_other_tokens_and_texts_are(text: str) -> None:
    backend().compile(GrammarKind.LARK, text)


@pytest.mark.parametrize("name", ["r", "R"])
@pytest.mark.parametrize("count", [1_100, 9_000])
def test_rules_in_a_row_are_refused_before_they_end_the_process(name: str, count: int) -> None:
    rules = [f'{name}{n}: "a" {name}{n + 1} | "b"' for n in range(count)]
    # From the last one up, so that no rule is known when it is named first.
    text = "\n".join([f'{name}{count}: "end"', *reversed(rules), f"start: {name}0"])
    with pytest.raises(InvalidGrammar, match="rules in a row"):
        backend().compile(GrammarKind.LARK, text)


def test_many_rules_side_by_side_and_recursion_are_allowed() -> None:
    rules = "\n".join(f'r{n}: "a{n}" start?' for n in range(2_000))
    text = f"start: {' | '.join(f'r{n}' for n in range(2_000))}\n{rules}"
    backend().compile(GrammarKind.LARK, text)


def test_a_panic_of_the_library_is_told_as_what_it_means() -> None:
    rules = "\n".join(f'r{n}: "{n}" "a" "b" "c" "d" "e"' for n in range(14_000))
    text = f"start: {' | '.join(f'r{n}' for n in range(14_000))}\n{rules}"
    with pytest.raises(InvalidGrammar) as caught:
        backend().compile(GrammarKind.LARK, text)
    assert "panic" not in caught.value.message


@pytest.mark.parametrize("kind", [GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA])
@pytest.mark.parametrize(
    "place", ["{%s}", '{"a"%s: 1}', '{"a":%s1}', '{"a": 1%s}', '{"a": 1,%s"b": 2}']
)
def test_white_space_between_the_parts_of_json_ends(kind: GrammarKind, place: str) -> None:
    grammar = backend().compile(kind, "" if kind is GrammarKind.JSON_OBJECT else "{}")
    for spaces, fits in ((MAX_JSON_SPACES, True), (MAX_JSON_SPACES + 1, False)):
        for space in " \n\t":
            tokens = tokenizer().encode(place % (space * spaces))
            taken = grammar.matcher()._matcher.try_consume_tokens(tokens)
            assert (taken == len(tokens)) is fits, (space, spaces)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: start", "the rule `start` always leads back to itself"),
        ('start: a\na: c | a "x"\nc: a', "the rule `a` always leads back to itself"),
        ('start: X\nX: Y "a"\nY: X', "line 3: the terminal `X` contains itself"),
    ],
)
def test_rules_that_never_end_are_named(text: str, reason: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        backend().compile(GrammarKind.LARK, text)
    assert reason in caught.value.message


def test_rules_may_begin_with_themselves() -> None:
    backend().compile(GrammarKind.LARK, 'start: start "a" | "b"')
