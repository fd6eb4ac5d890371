"""Regular expressions in plain form: what they match, and what is refused by name."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.schema.formats import KNOWN, UNCHECKED, format_pattern
from headrace.core.schema.regex import RegexError, literal_regex, normal_regex
from headrace.core.schema.schema import check_schema_form
from tests.unit.recipe.grammars import accepts, matcher_of, random_answer

CASES = {
    # pattern: (found in, not found in)
    "a": (["a", "xax"], ["", "b"]),
    "^a$": (["a"], ["ab", "ba", "a\n"]),
    "a|b": (["xa", "b"], ["c"]),
    "^a|b$": (["ax", "xb"], ["xa", "bx"]),
    "^(a|^b)c": (["ac", "bcx"], ["xac", "abc"]),
    "(^a)(b$)": (["ab"], ["xab", "abx"]),
    "^(?:|a)$": (["", "a"], ["b"]),
    "": (["", "x\ny"], []),
    "^$": ([""], ["a"]),
    r"^\d+$": (["12"], ["1a", "\u0663"]),
    r"^\w$": (["_"], ["\u00e9", "-"]),
    r"^\s$": ([" ", "\ufeff", "\u2028", "\u00a0"], ["a", "\u200b"]),
    r"^\S$": (["a"], [" ", "\ufeff"]),
    r"^[^\d]$": (["a"], ["1"]),
    "^.$": (["a", "\U0001f432"], ["\n", "\r", "\u2028", "ab"]),
    "^[a-c-]+$": (["a-c"], ["d"]),
    r"^[\w-]+$": (["a-b"], ["a b"]),
    r"^[\]\\^-]$": (["]", "\\", "^", "-"], ["a"]),
    "^[^]$": (["a", "\n"], ["", "ab"]),
    "^a{2}$": (["aa"], ["a", "aaa"]),
    "^a{2,}$": (["aa", "aaaa"], ["a"]),
    "^a{1,2}?$": (["a", "aa"], ["aaa"]),
    "^a{x}$": (["a{x}"], ["a"]),
    "^(?<n>a)(?P<m>b)$": (["ab"], ["a"]),
    r"^\u0041\x42\u{43}\cA$": (["ABC\x01"], ["ABC"]),
    r"^\ud83d\udc32$": (["\U0001f432"], ["a"]),
    r"^\p{L}\p{Lu}[\p{Nd}]$": (["\u00e9A\u0663"], ["1A1"]),
    r"^[^\p{L}]$": (["1"], ["a"]),
    r'^"</\\[\-\/]$': (['"</\\-', '"</\\/'], ['"<']),
}


@pytest.mark.parametrize("pattern", CASES)
def test_an_expression_matches_what_ecmascript_matches(pattern: str) -> None:
    found, missing = CASES[pattern]
    expression = normal_regex(pattern)
    assert expression.isascii() and '"' not in expression and "/" not in expression
    anchored = f'{{"type":"string","pattern":{_quoted(f"^(?:{expression})$")}}}'
    specs = [
        GrammarSpec(GrammarKind.REGEX, expression),
        GrammarSpec(GrammarKind.LARK, f"start: TEXT\nTEXT: /{expression}/"),
    ]
    schema = matcher_of(GrammarSpec(GrammarKind.JSON_SCHEMA, anchored))
    for text, expected in [(t, True) for t in found] + [(t, False) for t in missing]:
        for spec in specs:
            assert accepts(matcher_of(spec), text) is expected, (pattern, expression, text, spec)
        assert accepts(schema, _quoted(text)) is expected, (pattern, expression, text)


def _quoted(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "look-ahead"),
        ("(?!a)b", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "backreference"),
        (r"(?<n>a)\k<n>", "backreference"),
        (r"\bword", "word boundary"),
        ("(?i)a", "inline flags"),
        ("(?>a)b", "unknown kind"),
        ("a++", "possessive"),
        ("a**", "nothing to repeat"),
        ("*a", "nothing to repeat"),
        ("(a", "without its"),
        ("a)", "without its"),
        ("[a", "ends too early"),
        ("[]", "matches nothing"),
        ("[z-a]", "out of order"),
        ("a{3,1}", "out of order"),
        ("a{20000}", "repeats more than"),
        ("(a{1,1000}){1,1000}", "too large"),
        ("((a{100}){100}){100}", "too large"),
        ("(" * 100 + "a" + ")" * 100, "nests more than"),
        ("a" * 10_000, "characters"),
        ("a^b", "anchor in its middle"),
        ("(a$)b", "anchor in its middle"),
        ("(^a)*", "repeats an anchor"),
        (r"\p{Klingon}", "unknown character property"),
        (r"\u12", "code point"),
        (r"\ud800", "no character"),
        (r"\e", "unknown escape"),
        ("a\\", "ends too early"),
    ],
)
def test_what_no_automaton_can_do_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(RegexError, match=reason):
        normal_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "position"),
    [
        *(("(a", 1), ("a)", 2), ("ab)", 3), ("a(b", 2), ("*a", 1), ("a**", 3), ("a{3,1}", 2)),
        *((r"a\q", 2), ("[b-a]", 2), ("ab(?=x)", 3), ("[a", 3), (r"xy\1", 3), ("^*", 2)),
        *(
            (r"a\u00zz", 2),
            (r"\p{Foo}", 1),
            ("x(?i)", 2),
            ("a++", 3),
            (r"a\b", 2),
            ("b[^\\s\\S]", 2),
        ),
    ],
)
def test_positions_count_from_1_and_name_where_it_begins(pattern: str, position: int) -> None:
    with pytest.raises(RegexError, match=f"at position {position}$"):
        normal_regex(pattern)


def test_a_literal_is_itself() -> None:
    text = '<"\\/.*\n\u00e9\U0001f432'
    matcher = matcher_of(GrammarSpec(GrammarKind.REGEX, literal_regex(text)))
    assert accepts(matcher, text) and not accepts(matcher, text[:-1])


def test_formats_compile_alone_and_in_a_schema() -> None:
    assert not KNOWN & set(UNCHECKED)
    for name in KNOWN:
        assert format_pattern(name).isascii()
        matcher_of(GrammarSpec(GrammarKind.REGEX, format_pattern(name)))


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_other_validators_take_what_a_format_allows(name: str) -> None:
    schema = {"type": "string", "format": name}
    form = check_schema_form(schema, "S")
    matcher = matcher_of(GrammarSpec(GrammarKind.JSON_SCHEMA, form.text()))
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    draw = random.Random(7)
    signs = frozenset(b'"@.-:/[')
    for _ in range(400):
        tokens = random_answer(matcher, draw, 256, prefer=signs, limit=200)
        assert tokens is None or validator.is_valid(json.loads(bytes(tokens))), bytes(tokens)
