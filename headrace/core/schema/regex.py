"""Regular expressions of requests -> a plain dialect that every grammar backend reads alike.

Contract: `normal_regex` reads ECMAScript syntax (that of JSON Schema; what Python and Rust write in
common passes too) and gives an anchored expression made of groups, alternatives, repetitions and
character classes of code points only, in ASCII. What no finite automaton can match, and what would
be too large, is refused by name. Called by `schema.py`, `tools.py` and `spec.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from headrace.core.schema.regex_classes import (
    ANY,
    DOT,
    ClassItems,
    negated,
    property_class,
    shorthand,
    written,
)

MAX_REGEX_CHARACTERS = 8192
MAX_REGEX_SIZE = 20_000  # characters and classes when every repetition is written out
MAX_REPEAT = 10_000
MAX_NESTING = 64
_CONTROL = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12, "0": 0}
_HEX = frozenset("0123456789abcdefABCDEF")


class RegexError(ValueError):
    """Why an expression is refused, as a sentence without its subject."""


@dataclass(frozen=True, slots=True)
class _Char:
    """One character, of a class."""

    items: ClassItems


@dataclass(frozen=True, slots=True)
class _Anchor:
    """`^` (start) or `$`."""

    start: bool


@dataclass(frozen=True, slots=True)
class _Sequence:
    nodes: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    nodes: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    node: _Node
    least: int
    most: int | None


_Node = _Char | _Anchor | _Sequence | _Choice | _Repeat


def normal_regex(text: str, *, whole: bool = False) -> str:
    """The expression in plain form, which the whole string has to match.

    whole: `text` describes the whole string already; otherwise any part of it, as in JSON Schema.
    Raises RegexError; positions in its texts count characters from 1.
    """
    if len(text) > MAX_REGEX_CHARACTERS:
        raise RegexError(f"has {len(text)} characters, at most {MAX_REGEX_CHARACTERS} are allowed")
    node = _Reader(text).read()
    if _size(node) > MAX_REGEX_SIZE:
        raise RegexError(
            f"is too large: its repetitions stand for more than {MAX_REGEX_SIZE} characters"
        )
    return _write(node, not whole, not whole) or "(?:)"


def literal_regex(text: str) -> str:
    """The expression that matches exactly this text."""
    return _NOT_PLAIN.sub(_escaped_char, text)


_NOT_PLAIN = re.compile(r"[^A-Za-z0-9]")


def _escaped_char(match: re.Match[str]) -> str:
    code = ord(match[0])
    return written(((code, code),))


# --- reading -----------------------------------------------------------------------------------


class _Reader:
    """Recursive descent over one expression. Positions in errors count from 1."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._item = 0  # where what is being read begins; errors name it
        self._level = 0

    def read(self) -> _Node:
        node = self._choice()
        if self._at < len(self._text):
            self._item = self._at
            self._fail("has a `)` without its `(`")
        return node

    def _fail(self, problem: str) -> NoReturn:
        raise RegexError(f"{problem} at position {self._item + 1}")

    def _peek(self, start: str) -> bool:
        return self._text.startswith(start, self._at)

    def _take(self, start: str) -> bool:
        if self._peek(start):
            self._at += len(start)
            return True
        return False

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._item = self._at
            self._fail("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> _Node:
        nodes = [self._sequence()]
        while self._take("|"):
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else _Choice(tuple(nodes))

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            nodes.append(self._repeated(self._atom()))
        return nodes[0] if len(nodes) == 1 else _Sequence(tuple(nodes))

    def _repeated(self, node: _Node) -> _Node:
        self._item = self._at
        bounds = self._quantifier()
        if bounds is None:
            return node
        if _has_anchor(node):
            self._fail("repeats an anchor")
        # Laziness changes which match is found, not what is matched.
        self._take("?")
        self._item = self._at
        if self._peek("+"):
            self._fail("has a possessive quantifier, which is not supported,")
        if self._quantifier() is not None:
            self._fail("has nothing to repeat")
        return _Repeat(node, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        if not self._peek("{"):
            return None
        end = self._text.find("}", self._at)
        inner = self._text[self._at + 1 : end] if end > 0 else ""
        low, comma, high = inner.partition(",")
        if not _is_count(low) or not (high == "" or _is_count(high)):
            return None  # ECMAScript takes such a brace as itself
        self._at = end + 1
        least, most = int(low), int(high) if high else None if comma else int(low)
        if max(least, most or 0) > MAX_REPEAT:
            self._fail(f"repeats more than {MAX_REPEAT} times")
        if most is not None and most < least:
            self._fail("has a repetition whose numbers are out of order")
        return least, most

    def _atom(self) -> _Node:
        self._item = self._at
        char = self._next()
        match char:
            case "^" | "$":
                return _Anchor(char == "^")
            case "(":
                return self._group()
            case "[":
                return _Char(self._class())
            case ".":
                return _Char(DOT)
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                self._fail("has nothing to repeat")
        return _Char(((ord(char), ord(char)),))

    def _group(self) -> _Node:
        start = self._item
        self._level += 1
        if self._level > MAX_NESTING:
            self._fail(f"nests more than {MAX_NESTING} groups")
        if self._take("?"):
            self._group_kind()
        node = self._choice()
        if not self._take(")"):
            self._item = start
            self._fail("has a `(` without its `)`")
        self._level -= 1
        return node

    def _group_kind(self) -> None:
        for mark, name in (("=", "look-ahead"), ("!", "look-ahead"), ("<=", "look-behind")):
            if self._peek(mark):
                self._fail(f"uses {name} (`(?{mark}`), which is not supported,")
        if self._peek("<!"):
            self._fail("uses look-behind (`(?<!`), which is not supported,")
        if self._take(":"):
            return
        if self._take("P<") or self._take("<"):
            end = self._text.find(">", self._at)
            if end < 0 or not self._text[self._at : end].isidentifier():
                self._fail("has a group with a malformed name")
            self._at = end + 1
            return
        self._fail("has a group of an unknown kind (inline flags are not supported)")

    # --- escapes and classes -------------------------------------------------------------------

    def _escape(self) -> _Node:
        char = self._next()
        if char in "bB":
            self._fail(f"uses a word boundary (`\\{char}`), which is not supported,")
        if char in "123456789" or (char == "k" and self._peek("<")):
            self._fail("uses a backreference, which is not supported,")
        if char in "AzZ":
            # Of Python and Rust; ECMAScript has no letters here.
            return _Anchor(char == "A")
        return _Char(self._escaped(char))

    def _escaped(self, char: str) -> ClassItems:
        """The characters of an escape, inside or outside of a class."""
        known = shorthand(char)
        if known is not None:
            return known
        if char in "pP":
            return self._property(char == "P")
        code = self._code(char)
        return ((code, code),)

    def _property(self, inverted: bool) -> ClassItems:
        if self._take("{"):
            end = self._text.find("}", self._at)
            name = self._text[self._at : end] if end > 0 else ""
            self._at = end + 1
        else:
            name = self._next()
        known = property_class(name, inverted)
        if known is None:
            self._fail(f"names the unknown character property `{name[:40]}`")
        return known

    def _code(self, char: str) -> int:
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "c" and self._text[self._at : self._at + 1].isascii():
            letter = self._next()
            if not letter.isalpha():
                self._fail("has a malformed control escape")
            return ord(letter) % 32
        if char == "x":
            if self._take("{"):
                return self._braced()
            return self._hex(2)
        if char == "u":
            if self._take("{"):
                return self._braced()
            return self._surrogates(self._hex(4))
        if char.isascii() and char.isalnum():
            self._fail(f"has the unknown escape `\\{char}`")
        return ord(char)

    def _braced(self) -> int:
        end = self._text.find("}", self._at)
        digits = self._text[self._at : end] if end > 0 else ""
        if not digits or len(digits) > 6 or not _HEX.issuperset(digits):
            self._fail("has a malformed code point")
        self._at = end + 1
        return self._checked(int(digits, 16))

    def _hex(self, count: int) -> int:
        digits = self._text[self._at : self._at + count]
        if len(digits) != count or not _HEX.issuperset(digits):
            self._fail("has a malformed code point")
        self._at += count
        return int(digits, 16)

    def _surrogates(self, code: int) -> int:
        if 0xD800 <= code < 0xDC00 and self._take("\\u"):
            low = self._hex(4)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return self._checked(code)

    def _checked(self, code: int) -> int:
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._fail("has a code point that is no character")
        return code

    def _class(self) -> ClassItems:
        start = self._item
        inverted = self._take("^")
        items: list[tuple[int, int] | str] = []
        while not self._take("]"):
            self._item = self._at
            first = self._class_atom()
            if self._peek("-") and not self._peek("-]"):
                self._at += 1
                last = self._class_atom()
                low, high = _single(first), _single(last)
                if low is None or high is None:
                    # ECMAScript: the hyphen stands for itself.
                    items += (*first, (45, 45), *last)
                    continue
                if low > high:
                    self._fail("has a character range out of order")
                items.append((low, high))
            else:
                items += first
        found = negated(tuple(items)) if inverted else tuple(items)
        if not found:
            self._item = start
            self._fail("has a character class that matches nothing")
        return found

    def _class_atom(self) -> ClassItems:
        char = self._next()
        if char != "\\":
            return ((ord(char), ord(char)),)
        char = self._next()
        return ((8, 8),) if char == "b" else self._escaped(char)


def _single(items: ClassItems) -> int | None:
    if len(items) == 1 and not isinstance(items[0], str) and items[0][0] == items[0][1]:
        return items[0][0]
    return None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


# --- writing -----------------------------------------------------------------------------------


def _size(node: _Node) -> int:
    match node:
        case _Sequence(nodes) | _Choice(nodes):
            return 1 + sum(map(_size, nodes))
        case _Repeat(inner, least, most):
            return 1 + _size(inner) * max(1, least, most or 0)
    return 1


def _has_anchor(node: _Node) -> bool:
    match node:
        case _Anchor():
            return True
        case _Sequence(nodes) | _Choice(nodes):
            return any(map(_has_anchor, nodes))
    return False  # repetitions have none, they are refused


def _write(node: _Node, open_start: bool, open_end: bool) -> str:
    """The text; open ends may be preceded or followed by anything unless an anchor stands there."""
    match node:
        case _Anchor(start):
            # At its own end it closes it; the other end stays open.
            if start:
                return _any(open_end)
            return _any(open_start)
        case _Choice(nodes):
            return f"(?:{'|'.join(_write(entry, open_start, open_end) for entry in nodes)})"
        case _Sequence(nodes):
            return _write_sequence(nodes, open_start, open_end)
    return f"{_any(open_start)}{_plain(node)}{_any(open_end)}"


def _write_sequence(nodes: tuple[_Node, ...], open_start: bool, open_end: bool) -> str:
    nodes, open_start, open_end = _outer_anchors(nodes, open_start, open_end)
    if not nodes:
        return _any(open_start or open_end)
    if len(nodes) == 1:
        return _write(nodes[0], open_start, open_end)
    first, *inner, last = nodes
    middle = [_plain(entry) for entry in inner]
    if _ends_in(first, True) or _ends_in(last, False) or any(map(_has_anchor, inner)):
        raise RegexError("has an anchor in its middle, which is not supported")
    return "".join((_write(first, open_start, False), *middle, _write(last, False, open_end)))


def _outer_anchors(
    nodes: tuple[_Node, ...], open_start: bool, open_end: bool
) -> tuple[tuple[_Node, ...], bool, bool]:
    while nodes and nodes[0] == _Anchor(True):
        nodes, open_start = nodes[1:], False
    while nodes and nodes[-1] == _Anchor(False):
        nodes, open_end = nodes[:-1], False
    return nodes, open_start, open_end


def _ends_in(node: _Node, first: bool) -> bool:
    """Whether an anchor stands at the inner end of the first (last) node of a sequence."""
    match node:
        case _Anchor(start):
            return start is not first
        case _Choice(nodes):
            return any(_ends_in(entry, first) for entry in nodes)
        case _Sequence(nodes):
            kept = nodes[1:] if first else nodes[:-1]
            outer = nodes[:1] if first else nodes[-1:]
            return any(map(_has_anchor, kept)) or any(_ends_in(e, first) for e in outer)
    return False


def _plain(node: _Node) -> str:
    """The text of a node without anchors."""
    match node:
        case _Char(items):
            return written(items)
        case _Sequence(nodes):
            return "".join(map(_plain, nodes))
        case _Choice(nodes):
            return f"(?:{'|'.join(map(_plain, nodes))})"
        case _Repeat(inner, least, most):
            text = _plain(inner) if isinstance(inner, _Char) else f"(?:{_plain(inner)})"
            high = "" if most is None else most
            return text + _MARKS.get((least, most), f"{{{least},{high}}}")
    raise RegexError("has an anchor in its middle, which is not supported")


_MARKS = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def _any(is_open: bool) -> str:
    return f"{ANY}*" if is_open else ""
