"""Character classes of regular expressions as code points, and how they are written.

Contract: a class is a tuple of inclusive ranges of code points, or texts that stand for sets which
only the backend has tables of (Unicode properties). Shorthands mean what they do in ECMAScript,
whatever the backend makes of its own. Used by `regex.py`.
"""

from __future__ import annotations

import re

# Ranges, and properties such as `\p{L}`.
ClassItems = tuple[tuple[int, int] | str, ...]

_LAST = 0x10FFFF
_DIGIT: ClassItems = ((48, 57),)
_WORD: ClassItems = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: ClassItems = (
    (9, 13),
    (32, 32),
    (160, 160),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
_LINE_ENDS: ClassItems = ((10, 10), (13, 13), (0x2028, 0x2029))
# General categories, short and long, and the other names that are common in patterns.
_CATEGORIES = (
    "L Letter LC Cased_Letter Lu Uppercase_Letter Ll Lowercase_Letter Lt Titlecase_Letter "
    "Lm Modifier_Letter Lo Other_Letter M Mark Mn Nonspacing_Mark Mc Spacing_Mark Me "
    "Enclosing_Mark N Number Nd Decimal_Number Nl Letter_Number No Other_Number P Punctuation "
    "Pc Connector_Punctuation Pd Dash_Punctuation Ps Open_Punctuation Pe Close_Punctuation "
    "Pi Initial_Punctuation Pf Final_Punctuation Po Other_Punctuation S Symbol Sm Math_Symbol "
    "Sc Currency_Symbol Sk Modifier_Symbol So Other_Symbol Z Separator Zs Space_Separator Zl "
    "Line_Separator Zp Paragraph_Separator C Other Cc Control Cf Format Co Private_Use Cn "
    "Unassigned"
)
_BINARY = "Alphabetic Lowercase Uppercase White_Space Math Hex_Digit Emoji ID_Start ID_Continue"
_SCRIPTS = (
    "Latin Greek Cyrillic Armenian Hebrew Arabic Devanagari Bengali Tamil Telugu Thai Lao Tibetan "
    "Georgian Hangul Hiragana Katakana Bopomofo Han Ethiopic Khmer Mongolian Sinhala Gujarati "
    "Gurmukhi Kannada Malayalam Myanmar Common Inherited"
)
_PROPERTIES = frozenset(f"{_CATEGORIES} {_BINARY}".split())
_SCRIPT = re.compile(r"(?:Script|sc|Script_Extensions|scx)=([A-Za-z]+)\Z")


def negated(items: ClassItems) -> ClassItems:
    """All characters but these."""
    names = "".join(entry for entry in items if isinstance(entry, str))
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in sorted(entry for entry in items if not isinstance(entry, str)):
        if low > start:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    if start <= _LAST:
        gaps.append((start, _LAST))
    if not names:
        return tuple(gaps)
    # The backend has to subtract what only it knows.
    return (f"[{_ranges(tuple(gaps))}&&[^{names}]]",)


DOT: ClassItems = negated(_LINE_ENDS)
_SHORTHANDS = {
    "d": _DIGIT,
    "D": negated(_DIGIT),
    "w": _WORD,
    "W": negated(_WORD),
    "s": _SPACE,
    "S": negated(_SPACE),
}


def shorthand(char: str) -> ClassItems | None:
    r"""The characters of `\d`, `\w`, `\s` and their opposites, or None."""
    return _SHORTHANDS.get(char)


def property_class(name: str, inverted: bool) -> ClassItems | None:
    r"""The class of `\p{name}`, or None when the name is unknown."""
    script = _SCRIPT.match(name)
    if script is not None:
        name = script[1] if script[1] in _SCRIPTS.split() else ""
    else:
        name = name.removeprefix("General_Category=").removeprefix("gc=")
        name = name if name in _PROPERTIES else ""
    if not name:
        return None
    return (f"\\{'P' if inverted else 'p'}{{{name}}}",)


def written(items: ClassItems) -> str:
    """The class as text, in ASCII and without characters that quote."""
    if len(items) == 1 and not isinstance(items[0], str) and items[0][0] == items[0][1]:
        return _char(items[0][0])
    return f"[{_ranges(items)}]"


ANY = f"[\\x{{0}}-\\x{{{_LAST:x}}}]"


def _ranges(items: ClassItems) -> str:
    texts: list[str] = []
    for entry in items:
        if isinstance(entry, str):
            texts.append(entry)
        elif entry[0] == entry[1]:
            texts.append(_char(entry[0]))
        else:
            texts.append(f"{_char(entry[0])}-{_char(entry[1])}")
    return "".join(texts)


def _char(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    # Quotes, slashes and angle brackets mean something to grammars that hold expressions.
    if char in _ESCAPED:
        return f"\\{char}"
    return f"\\x{{{code:x}}}"


_ESCAPED = frozenset("!#$%&()*+,-.:;=?@[]^_`{|}~")
