"""What the llguidance backend refuses, in words of ours."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.core.grammar import MAX_JSON_SPACES, GrammarKind
from headrace.engine.grammar.backend import MatcherFailed
from headrace.engine.grammar.llguidance_backend import LlguidanceBackend
from headrace.errors import InvalidGrammar
from tests.unit.engine.grammar.grammars import EOS, backend, table, tokenizer


@pytest.mark.parametrize(
    "text",
    [
        f'start: "a" <[{EOS}]> "x"',
        f'start: <[{EOS}-{EOS + 40}]> "x"',
        f"start: <[{EOS + 5},{max(EOS - 1, 0)}-{EOS}]>",
        f'start: "a" <[^{EOS + 7}]>',
        'start: "a" <[*]> "x"',
        'start: "a" <｜end▁of▁sentence｜> "x"',
        # A quote in an expression or a comment begins no text.
        f'start: /"/ <[{EOS}]> /"/',
        f'start: "a" b // "\nb: <[{EOS}]> # "',
        f'start: "a" %lark {{\nstart: <[{EOS}]>\n}}',
    ],
)
def test_the_end_of_the_text_is_no_token_of_a_grammar(text: str) -> None:
    with pytest.raises(InvalidGrammar, match="which ends an answer"):
        backend().compile(GrammarKind.LARK, text)


@pytest.mark.parametrize(
    "text",
    [
        f'start: "a" <[{EOS + 5}]> "x"',
        f'start: "<[{EOS}]>" "x"',
        f"start: <[^{EOS}]>",
        f'start: "a" # <[{EOS}]>',
        f"start: /<[{EOS}]>/",
        'start: "a" <think>',
        f'start: %json {{"const": "<[{EOS}]>"}}',
    ],
)
def test_other_tokens_and_texts_are(text: str) -> None:
    backend().compile(GrammarKind.LARK, text)


@pytest.mark.parametrize(
    ("name", "more"),
    [("r", ""), ("R", ""), ("r-", ""), ("_r", '/"/'), ("r", '# "'), ("r", "%lark")],
)
@pytest.mark.parametrize("count", [1_100, 9_000])
def test_rules_in_a_row_are_refused_before_they_end_the_process(
    name: str, more: str, count: int
) -> None:
    rules = [f'{name}{n}: "a" {name}{n + 1} | "b"' for n in range(count)]
    # From the last one up, so that no rule is known when it is named first.
    lines = [f'{name}{count}: "end"', *reversed(rules)]
    if more == "%lark":
        lines = ["start: %lark {", *lines, f"start: {name}0", "}"]
    else:
        # What looks like the beginning of a text, and like its end behind all rules.
        lines = [f'start: {name}0 "x" {more}', *lines, f'z: "x" {more}']
    with pytest.raises(InvalidGrammar, match="rules in a row"):
        backend().compile(GrammarKind.LARK, "\n".join(lines))


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
        ('start: "a" start', "the rule `start` always leads back to itself"),
        ('start: "a" b\nb: "x" b | b "y"', "the rule `b` always leads back to itself"),
        ('start: ("a" | "b") (start | "c" start)', "the rule `start` always"),
        ('start: "a" (b | c){2}\nb: "x" c+\nc: "y" b~1..3', "the rule `b` always"),
        ('start: "x" a-b\n?a-b: /"/ a-b // "', "the rule `a-b` always"),
        ('start: "x" | "y" trap\ntrap: "z" trap', "the rule `trap` always"),
        ('start: "x" %lark {\nstart: "y" start\n} "z"', "the rule `start` always"),
    ],
)
def test_rules_that_never_end_are_named(text: str, reason: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        backend().compile(GrammarKind.LARK, text)
    assert reason in caught.value.message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("# A readme\n\nIt is *none*, really: 'no'.", "line 3, column 23"),
        ('start: "a"\nb: ( "c"', "line 2"),
        ('start: "a" b\nb: "b" other', "line 2"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "line 1"),
        ('start: "\x01"', "line 1"),
        ("\n\nstart: /(/", "line 3"),
    ],
)
def test_errors_of_lark_grammars_say_where(text: str, place: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        backend().compile(GrammarKind.LARK, text)
    assert place in caught.value.message and "lexer error" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        'start: start "a" | "b"',
        'start: "a" start?',
        'start: "a" start*',
        'start: "a" [start]',
        'start: "a" start{0,2}',
        'start: "a" start{,2}',
        'start: "a" start ~ 0..2',
        'start: "a" (start | "x")',
        'start: "a" (start "y")?',
        'start: "a" start\n\n  | "b"',
        'start: "a" (b\n | start)\nb: "x" | start b',
        'start: a\na: "x" b | "(" a ")"\nb: a | /b/',
        'start: "a" %json {"type": "object", "properties": {"start": {}}} "b"',
        'start: "x" %lark {\nstart: "y" b | b\nb: "z"\n} c\nc: "q" start | ""',
        'start: "x" [end]\nend[capture]: %json {"const": ":|"}\n  | "z" end',
        'start: N ":" start | N # : start\nN: /[0-9]+/',
        'start: b\nb[capture="x]:"]: "a" b | /x/',
    ],
)
def test_rules_may_lead_back_to_themselves(text: str) -> None:
    backend().compile(GrammarKind.LARK, text)


def test_random_rules_are_refused_exactly_if_one_never_ends() -> None:
    """Beside a plain search: how short a text can be, rule by rule."""
    draw = random.Random(5)
    refused = 0
    for _ in range(300):
        names = ["start", *(f"r{n}" for n in range(draw.randint(1, 5)))]
        bodies = {
            name: [
                [draw.choice([*names, "", ""]) for _ in range(draw.randint(1, 3))]
                for _ in range(draw.randint(1, 2))
            ]
            for name in names
        }
        text = "\n".join(
            f"{name}: " + " | ".join(" ".join(e or '"x"' for e in entry) for entry in entries)
            for name, entries in bodies.items()
        )
        ending: set[str] = {""}
        for _ in names:
            ending |= {n for n, entries in bodies.items() if any(set(e) <= ending for e in entries)}
        reached = ["start"]
        for name in reached:
            inner = {entry for entries in bodies[name] for entry in entries if entry}
            reached += sorted(inner - set(reached))
        endless = not set(reached) <= ending
        refused += endless
        if endless:
            with pytest.raises(InvalidGrammar, match="always leads back to itself"):
                backend().compile(GrammarKind.LARK, text)
        else:
            backend().compile(GrammarKind.LARK, text)
    assert 50 < refused < 250


@pytest.mark.parametrize(
    "texts",
    [
        ("/(?:abcde)/", "/(?:(?s:.){0,3})/"),
        ("/(?:[a-z]+)/", "/(?:[0-9]{8}-[0-9]{4})/", "/(?:(?s:.){0,5})/"),
    ],
)
def test_texts_that_nothing_meets_are_found_before_an_answer(texts: tuple[str, ...]) -> None:
    """The library notices in the middle of one. A tool's texts have its name in front."""
    terminal = f'T: ({" & ".join(texts)}) "</"'
    for comment, name in (("", "T"), ('// "book.code"\n', "book.code")):
        lark = f'start: "x" T\n{comment}{terminal}\nU: "u"'
        with pytest.raises(InvalidGrammar, match=f"^{name}: no text meets"):
            backend().compile(GrammarKind.LARK, lark)
    possible = f'start: "x" T\nT: ({texts[0]} & /(?:[a-z]{{1,9}})/) "</"'
    assert backend().compile(GrammarKind.LARK, possible)


def test_what_is_found_late_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlguidanceBackend, "_check_texts", lambda *_: None)
    lark = 'start: "x" T\nT: /abcde/ & /(?s:.){0,3}/'
    matcher = backend().compile(GrammarKind.LARK, lark).matcher()
    matcher.accept([next(n for n, text in enumerate(table().texts) if text == b"x")])
    words = np.zeros(-(-len(table().texts) // 32), dtype=np.int32)
    with pytest.raises(MatcherFailed, match="no text meets the expressions that come next"):
        matcher.fill_mask(words)


def test_contradictions_are_told_in_words() -> None:
    schema = '{"type":"string","pattern":"^a{5}$","maxLength":3}'
    with pytest.raises(InvalidGrammar) as caught:
        backend().compile(GrammarKind.JSON_SCHEMA, schema)
    assert "no text meets a pattern together with" in caught.value.message
    assert "Regex" not in caught.value.message
