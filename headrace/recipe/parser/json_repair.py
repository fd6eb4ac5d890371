"""Makes valid JSON of what a model wrote as a value, while it arrives.

Contract: valid JSON passes through unchanged; of anything else becomes valid JSON: Python literals,
single quotes, bare words, missing or surplus commas and brackets, raw control characters and text
that ends too early are repaired. Work is linear, look-behind is one token. Used by `lenient.py` for
values that are not strings.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from headrace.recipe.json_text import escaped

# Deeper JSON is refused by the request side (spec recipe 1.1); arguments are one level themselves.
MAX_DEPTH = 120
# Python refuses to read longer integers.
MAX_NUMBER = 4000

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_WORD = re.compile(r"""[^\s,:\[\]{}"']+""")
_SPACE = re.compile(r"[ \t\r\n]+")
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"true": "true", "false": "false", "null": "null"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_CLOSER = {"{": "}", "[": "]"}


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return f'"{escaped(text)}"'


def bare_value(text: str) -> str:
    """JSON of a whole value that is neither object nor array: itself when valid, else a string."""
    word = text.strip()
    if not word:
        return "null"
    if _is_scalar(word):
        return text
    return _PYTHON.get(word) or quoted(text)


def is_json(text: str) -> bool:
    """Whether the text is one JSON value, not nested too deeply."""
    word = text.strip()
    if not word.startswith(("{", "[")):
        return _is_scalar(word)
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def is_json_object(text: str) -> bool:
    """Whether the text is one JSON object."""
    return text.lstrip().startswith("{") and is_json(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_scalar(word: str) -> bool:
    if word in _LITERALS:
        return True
    if word.startswith('"'):
        try:
            return isinstance(json.loads(word), str)
        except ValueError:
            return False
    return len(word) <= MAX_NUMBER and _NUMBER.fullmatch(word) is not None


def _word_value(word: str) -> str:
    """JSON of a word inside an object or array."""
    return word if _is_scalar(word) else _PYTHON.get(word) or quoted(word)


class _Want(Enum):
    """What may come next."""

    VALUE = auto()  # after a colon
    ITEM = auto()  # a value or the end: after `[`, or after a comma in an array
    KEY = auto()  # a key or the end: after `{`, or after a comma in an object
    COLON = auto()
    COMMA = auto()  # a comma or the end
    NOTHING = auto()  # the value is complete


class JsonRepair:
    """One object or array. push: valid JSON of the text so far; close: what completes it."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._want = _Want.VALUE
        self._comma = ""  # held until something follows that it can separate
        self._word: list[str] = []
        self._quote = ""  # of the string that is open
        self._escape = ""  # of the escape that is open
        self._out: list[str] = []

    def push(self, text: str) -> str:
        """Take more text."""
        position = 0
        while position < len(text):
            if self._want is _Want.NOTHING:
                # What follows the value is dropped, but for white space.
                self._out.extend(_SPACE.findall(text, position))
                break
            if self._quote:
                position = self._in_string(text, position)
            else:
                position = self._between(text, position)
        return self._taken()

    def close(self) -> str:
        """End the value, whatever is open."""
        if self._quote:
            self._out.append(escaped(self._escape[1:]))
            self._escape = ""
            self._end_string()
        self._end_word(cut=True)
        while self._stack:
            self._close_one()
        return self._taken()

    def _taken(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    # --- strings ---------------------------------------------------------------------------

    def _in_string(self, text: str, position: int) -> int:
        if self._escape:
            return self._in_escape(text, position)
        plain = _PLAIN[self._quote].match(text, position)
        if plain:
            self._out.append(plain.group())
            return plain.end()
        character = text[position]
        if character == "\\":
            self._escape = "\\"
        elif character == self._quote:
            self._end_string()
        else:
            self._out.append(escaped(character))
        return position + 1

    def _in_escape(self, text: str, position: int) -> int:
        character = text[position]
        if self._escape == "\\":
            if character == "u":
                self._escape = "\\u"
                return position + 1
            if character in '"\\/bfnrt':
                self._out.append("\\" + character)
            else:
                self._out.append("'" if character == "'" else escaped("\\" + character))
        elif character in _HEX:
            self._escape += character
            if len(self._escape) < 6:
                return position + 1
            self._out.append(self._escape)
        else:
            self._out.append(escaped(self._escape))
            position -= 1  # it is no part of the escape
        self._escape = ""
        return position + 1

    def _end_string(self) -> None:
        self._out.append('"')
        self._quote = ""
        self._after_value()

    # --- everything else -------------------------------------------------------------------

    def _between(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space:
            self._end_word()
            if self._comma:
                self._comma += space.group()
            else:
                self._out.append(space.group())
            return space.end()
        word = _WORD.match(text, position)
        if word:
            self._word.append(word.group())
            return word.end()
        self._end_word()
        character = text[position]
        if character in "{[":
            self._open(character)
        elif character in "}]":
            self._close(character)
        elif character in "\"'":
            self._begin_value()
            self._quote = character
            self._out.append('"')
        elif character == ":":
            if self._want is _Want.COLON:
                self._out.append(":")
                self._want = _Want.VALUE
        elif character == ",":
            self._on_comma()
        return position + 1

    def _begin_value(self) -> None:
        """A value or key begins: put before it what is missing."""
        if self._want is _Want.COLON:
            self._out.append(":")
            self._want = _Want.VALUE
        elif self._want is _Want.COMMA:
            self._comma = ", "
            self._want = _Want.KEY if self._stack[-1] == "{" else _Want.ITEM
        self._out.append(self._comma)
        self._comma = ""

    def _after_value(self) -> None:
        if self._want is _Want.KEY:
            self._want = _Want.COLON
        else:
            self._want = _Want.COMMA if self._stack else _Want.NOTHING

    def _end_word(self, cut: bool = False) -> None:
        if not self._word:
            return
        word = "".join(self._word)
        self._word.clear()
        self._begin_value()
        if self._want is _Want.KEY:
            self._out.append(quoted(word))
        else:
            self._out.append(_cut_word(word) if cut else _word_value(word))
        self._after_value()

    def _open(self, bracket: str) -> None:
        self._begin_value()
        if self._want is _Want.KEY:
            # An object cannot be a key.
            self._out.append('"":')
        if len(self._stack) >= MAX_DEPTH:
            self._out.append("null")
            self._want = _Want.COMMA
            while self._stack:
                self._close_one()
            return
        self._stack.append(bracket)
        self._out.append(bracket)
        self._want = _Want.KEY if bracket == "{" else _Want.ITEM

    def _close(self, bracket: str) -> None:
        opener = "{" if bracket == "}" else "["
        if opener not in self._stack:
            return
        while self._stack[-1] != opener:
            self._close_one()
        self._close_one()

    def _close_one(self) -> None:
        """Close the innermost bracket."""
        if self._want is _Want.COLON:
            self._out.append(": null")
        elif self._want is _Want.VALUE:
            self._out.append("null")
        # White space after a surplus comma stays.
        self._out.append(self._comma[1:])
        self._comma = ""
        self._out.append(_CLOSER[self._stack.pop()])
        self._want = _Want.COMMA if self._stack else _Want.NOTHING

    def _on_comma(self) -> None:
        if not self._stack:
            return
        if self._want is _Want.COLON:
            self._out.append(": null")
            self._want = _Want.COMMA
        elif self._want is _Want.VALUE:
            self._out.append("null")
            self._want = _Want.COMMA
        if self._want is _Want.COMMA:
            self._comma = ","
            self._want = _Want.KEY if self._stack[-1] == "{" else _Want.ITEM


def _cut_word(word: str) -> str:
    """JSON of a word at the very end, where it may be cut."""
    if _is_scalar(word):
        return word
    for literal in _LITERALS:
        if literal.startswith(word):
            return literal
    number = _NUMBER.match(word)
    if number and word[number.end() :] in (".", "e", "E", "e-", "e+", "E-", "E+"):
        return number.group()
    return _word_value(word)
