"""GBNF grammars: translated exactly, or refused with the line."""

from __future__ import annotations

import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.recipe.grammar.ebnf import GrammarError, is_gbnf, translate
from tests.unit.recipe.grammars import accepts, matcher_of

ARITHMETIC = """
root ::= expr  # a sum
expr ::= term (("+" | "-") term)*
term ::= num | "(" expr ")"
num  ::= [0-9]+ ("." [0-9]{1,2})?
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}))* "\"" ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "regular", "good", "bad"),
    [
        # The shorter text may have to be taken.
        ('root ::= ("a" | "ab") "bc"', True, ["abc", "abbc"], ["ab"]),
        ('a ::= b+\nb ::= [x-z] | "\\u00e9"', True, ["xz", "\u00e9"], ["", "a"]),
        ('root ::= "x" root "y" | ""', False, ["", "xxyy"], ["xyy", "xy "]),
        # Recursion at the left is as good as at the right.
        ('root ::= root "a" | "b"', False, ["b", "baa"], ["a", ""]),
        ('root ::= a\na ::= b "x" | "y"\nb ::= a "z"', False, ["y", "yzx"], ["yz"]),
        ('root ::= ("a" root)?', False, ["", "aa"], ["b"]),
        (ARITHMETIC, False, ["1+2", "1+(2-3.25)"], ["1+", "(1", "1.234"]),
        (JSON, False, ['{"a": [{"b": "x\\n"}, true]}'], ['{"a" 1}', "[]"]),
    ],
)
def test_a_translation_is_exact(
    grammar: str, regular: bool, good: list[str], bad: list[str]
) -> None:
    assert is_gbnf(grammar)
    found, text = translate(grammar)
    assert found is regular
    matcher = matcher_of(GrammarSpec(GrammarKind.REGEX if regular else GrammarKind.LARK, text))
    assert [accepts(matcher, entry) for entry in good] == [True] * len(good)
    assert [accepts(matcher, entry) for entry in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a"\nroot ::= "b"', "line 2"),
        ('root ::= "a" )', "line 1"),
        ('root ::= ("a"', "`\\)` is missing"),
        ('# a\nroot ::= "x"\n  | other', "line 3: there is no rule `other`"),
        ('root ::= "x"\n  [z-a]', r"line 2: the character set \[z-a\] .*out of order"),
        ('root ::= "x"\n| "a\\U00110000"', "line 2: .*U00110000 is no character"),
        ('root ::= "x"\n\n [\\U00110000]', "line 3: the character set"),
        ('root ::= "a"{3,1}', "no repetition"),
        ("root ::= \x00", "line 1"),
        ("root ::= root", "never ends: the rule `root`"),
        ('root ::= "x" a\na ::= b "y" | "z" b\nb ::= a', "never ends: the rule `a`"),
        ('root ::= ("a" root){1,3}', "never ends: the rule `root`"),
        ('root ::= "a" | "b" trap\ntrap ::= "c" trap', "never ends: the rule `trap`"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "levels of parentheses"),
        ("root ::= " + " ".join(['"' + "a" * 1000 + '"'] * 100), "too large"),
        ("\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(900)) + '\nr900 ::= "b"', "nested"),
    ],
)
def test_what_cannot_be_read_is_named(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        translate(grammar)
