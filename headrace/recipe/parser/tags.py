"""What the text of a tag of the tool call format means, however it is written.

Contract: a tag is what stands between a DSML marker and `>`. Names of wrappers vary between models
and gateways, and names of the other tags are misspelled, so a tag is known by what it looks like.
Used by `lenient.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

# A tag whose text is longer ends at the next `>` whatever is open in it.
MAX_TAG = 4096

_ATTRIBUTES = r"""(?:\s+[\w-]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'>]+))*"""
_NAMES = (
    re.compile(r'\bname\s*=\s*"(.*?)"' + _ATTRIBUTES + r"\s*/?\s*$", re.DOTALL),
    re.compile(r"\bname\s*=\s*'(.*?)'" + _ATTRIBUTES + r"\s*/?\s*$", re.DOTALL),
    # The attribute is misspelled, or text follows it.
    re.compile(r'=\s*"([^"]*)"'),
    re.compile(r"\bname\s*=\s*([^\s\"'>/]+)"),
)
_STRING = re.compile(r"""\bstring\s*=\s*["']?\s*(true|false)""", re.IGNORECASE)
_BARE_END = re.compile(r"""=\s*[^\s"']+\s*$""")

_USUAL_NAMES = ("calls", "tool_calls", "toolcalls", "function_calls", "invoke", "parameter")


class TagKind(Enum):
    """What a tag opens or closes."""

    WRAPPER = auto()
    INVOKE = auto()
    PARAMETER = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Tag:
    """name: of the tool or parameter, None without one. string: None when it is not said."""

    kind: TagKind
    name: str | None = None
    string: bool | None = None
    closes_itself: bool = False


def kind_of(word: str) -> TagKind:
    """What a tag of this name is."""
    word = word.strip().lower().lstrip("_")
    if word.startswith(("par", "arg")):
        return TagKind.PARAMETER
    if word.startswith("inv"):
        return TagKind.INVOKE
    if any(part in word for part in ("call", "tool", "func")):
        return TagKind.WRAPPER
    return TagKind.UNKNOWN


def is_complete(text: str) -> bool:
    """Whether a `>` after this text ends the tag, or belongs to a name in quotes."""
    if len(text) > MAX_TAG:
        return True
    end = text.rstrip().removesuffix("/").rstrip()
    quote = next((c for c in end if c in "\"'"), "")
    if not quote:
        return True
    if end.endswith(quote):
        return end.index(quote) < len(end) - 1 and not end[:-1].rstrip().endswith("=")
    return _BARE_END.search(end, max(0, len(end) - 64)) is not None and end.count(quote) > 1


def read_tag(text: str) -> Tag:
    """The meaning of the text of an opening tag."""
    return _read_short_tag(text) if len(text) < _SHORT_TAG else _read_tag(text[: 4 * MAX_TAG])


def _read_tag(text: str) -> Tag:
    word = re.match(r"\s*([\w-]*)", text)
    kind = kind_of(word.group(1) if word else "")
    name = None
    if len(text) <= MAX_TAG:
        found = next((m for m in (pattern.search(text) for pattern in _NAMES) if m), None)
        name = found.group(1) if found else None
    elif '"' in text:
        name = text.split('"', 2)[1]
    if name is not None and kind in (TagKind.UNKNOWN, TagKind.WRAPPER):
        kind = TagKind.INVOKE
    string = _STRING.search(text)
    return Tag(
        kind,
        name,
        string.group(1).lower() == "true" if string else None,
        text.rstrip().endswith("/"),
    )


# Most tags are the same over and over.
_SHORT_TAG = 128
_read_short_tag = lru_cache(maxsize=256)(_read_tag)


def is_prose(text: str, tag: Tag, end: str) -> bool:
    """Whether the text behind a marker is no tag. end: what ended it, "" for another marker."""
    if tag.name is not None:
        return False
    if len(text.split(maxsplit=1)) > 1:
        return True
    return tag.kind is TagKind.UNKNOWN and end != ">" and bool(text.strip())


def is_beginning(text: str) -> bool:
    """Whether the text behind a marker, cut off by the end of the answer, may begin a tag."""
    words = text.split(maxsplit=1)
    if not words:
        return True
    kind = kind_of(words[0])
    if len(words) > 1:
        return kind in (TagKind.INVOKE, TagKind.PARAMETER)
    return kind is not TagKind.UNKNOWN or any(name.startswith(words[0]) for name in _USUAL_NAMES)


def split_close(text: str) -> tuple[str, str]:
    """The name in a closing tag, and text that was taken for a part of it."""
    found = re.match(r"[ \t/]*([\w.:-]*)[ \t/]*", text)
    return (found.group(1), text[found.end() :]) if found else ("", text)
