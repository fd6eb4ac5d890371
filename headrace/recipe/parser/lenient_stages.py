"""The stages of level `clients`: which markers are searched where.

Contract: text stages find the same markers as the official ones, and more; the stages inside of
calls exist once per dialect (the marker with its own bars, and with ASCII bars). What follows a
marker is decided in `lenient.py`, except where a rule names a stage.
"""

from __future__ import annotations

import re
from enum import IntEnum, auto
from functools import lru_cache

from headrace.recipe.constants import SpecialTokens
from headrace.recipe.parser.machine import Markers
from headrace.recipe.parser.matcher import Pattern
from headrace.recipe.parser.scanner import Rule, Stage


class Do(IntEnum):
    """What becomes of characters: nothing more from `DROP` on."""

    CONTENT = auto()
    REASONING = auto()
    BRACKET = auto()  # the first character of the JSON value
    TAG = auto()
    GAP = auto()  # white space that counts only if text follows
    VALUE = auto()
    BODY = auto()
    DROP = auto()
    STOP = auto()
    OPEN = auto()
    CLOSE = auto()
    LONE = auto()
    BARE = auto()  # a tag without marker
    END = auto()  # of a tag, or what ends a tag that has no end
    BARE_END = auto()


# Dialects: suffix of the names of their stages.
OWN, ASCII = "", "|"
# Written in a rule: the stage is found by the machine.
ASK = "?"

_NOT_SPACE = re.compile(r"\S")
_NOT_NAME = re.compile(r"[^\w \t.:/-]")


def _markers(special: SpecialTokens, dialect: str) -> Markers:
    return Markers.of(special, ascii_bars=dialect == ASCII)


def _eos(special: SpecialTokens) -> list[Rule[Do]]:
    # clients: end-token. Held back while it stands at the end, dropped if nothing follows.
    eos = special.eos
    return [Rule(Pattern(eos, (0, len(eos)), never=True), Do.DROP, ASK)] if eos else []


def _tags(special: SpecialTokens, dialects: tuple[str, ...]) -> list[Rule[Do]]:
    rules = []
    for dialect in dialects:
        marks = _markers(special, dialect)
        rules.append(Rule(marks.open, Do.OPEN, ASK))
        rules.append(Rule(marks.close, Do.CLOSE, ASK))
    return rules


def _lone(special: SpecialTokens) -> Rule[Do]:
    # clients: broken-tags. The marker without its bracket, inside of a block.
    return Rule(Pattern(special.dsml, (0, len(special.dsml))), Do.LONE, ASK)


def dialects_of(special: SpecialTokens) -> tuple[str, ...]:
    """The dialects of a marker."""
    return (OWN, ASCII) if "｜" in special.dsml else (OWN,)


@lru_cache(maxsize=64)
def stages_of(
    special: SpecialTokens,
    stops: tuple[str, ...],
    markup: bool,
    json: bool,
    engine_stops: bool = False,
) -> dict[str, Stage[Do]]:
    """All stages by name, shared by the streams with these settings."""
    marks = Markers.of(special)
    dialects = dialects_of(special)
    tags = _tags(special, dialects) if markup else []
    openers = [rule for rule in tags if rule.action is not Do.CLOSE]
    # clients: engine-stop. Where it searches, a complete stop string may still be text.
    stopping = [Rule(Pattern(stop, never=engine_stops), Do.STOP, ASK) for stop in stops]
    thinking_end = Rule(marks.thinking_end, Do.DROP, "content")
    eos = _eos(special)
    if json:
        content = [
            *(Rule(Pattern(f), Do.DROP, "json") for f in ("```json\n", "```\n")),
            *(Rule(Pattern(c), Do.BRACKET, "json") for c in "{["),
        ]
    else:
        content = stopping
    content = [*content, *tags, thinking_end, *eos]
    # clients: json-value-alone. What surrounds it does not become spaces.
    text = Do.DROP if json else Do.CONTENT
    lead = None if not json and "\n" in stops and not engine_stops else Do.DROP
    reasoning = (*openers, Rule(marks.thinking_end_lines, Do.DROP, "content_lead"), *eos)
    fence_end = Rule(Pattern("\n```"), Do.DROP, "after_json")
    stages = [
        Stage("content", text, tuple(content)),
        Stage("content_lead", text, tuple(content), lead),
        # clients: json-value-alone. A call ends it.
        Stage("json", Do.CONTENT, (*stopping, fence_end, *openers, *eos)),
        Stage("after_json", Do.DROP, (*tags, *eos)),
        Stage("reasoning", Do.REASONING, reasoning),
        Stage("reasoning_lead", Do.REASONING, reasoning, Do.DROP),
        # clients: text-after-calls
        Stage("gap", Do.GAP, border=_NOT_SPACE),
        Stage("block_gap", Do.GAP, border=_NOT_SPACE),
        Stage("block", text, (*content, *_bare_tags(special))),
    ]
    for dialect in dialects if markup else ():
        stages += _call_stages(special, dialect)
    return {stage.name: stage for stage in stages}


def _bare_tags(special: SpecialTokens) -> list[Rule[Do]]:
    """Tags without the marker, and the marker without its bracket."""
    texts = ("<invoke name=", "invoke name=", "<parameter name=", "parameter name=")
    return [
        *(Rule(Pattern(text), Do.BARE, ASK) for text in texts),
        Rule(Pattern("</invoke>"), Do.DROP, "block"),
        Rule(Pattern("</parameter>"), Do.DROP, "block"),
        _lone(special),
    ]


def _call_stages(special: SpecialTokens, dialect: str) -> list[Stage[Do]]:
    tags = [*_tags(special, (dialect,)), _lone(special), *_eos(special)]
    end = [Rule(Pattern(text), Do.END, ASK) for text in (">", "\n\n")]
    thinking_end = Rule(Markers.of(special).thinking_end, Do.END, ASK)
    parameter = [
        Rule(Pattern(text), Do.BARE, ASK) for text in ("<parameter name=", "parameter name=")
    ]
    stray = Rule(Pattern("</parameter>"), Do.DROP, "call" + dialect)
    bare_call = Rule(Pattern("</invoke>"), Do.BARE_END, ASK)
    bare_value = Rule(Pattern("</parameter>"), Do.BARE_END, ASK)
    return [
        Stage("tag" + dialect, Do.TAG, (thinking_end, *end, *tags)),
        # clients: closing-tags. They may have any name, and no `>`.
        Stage("close" + dialect, Do.TAG, border=_NOT_NAME),
        Stage("close_end" + dialect, Do.DROP, (Rule(Pattern(">"), Do.END, ASK),)),
        Stage("call" + dialect, Do.BODY, (*parameter, stray, bare_call, *tags)),
        Stage("value" + dialect, Do.VALUE, tuple(tags)),
        # clients: broken-tags. What was opened without a marker may be closed without one.
        Stage("bare_value" + dialect, Do.VALUE, (bare_value, *tags)),
    ]
