"""The parser of level `official`: stages, and from ranges to items (spec recipe 10.2, 10.3).

Contract: item by item what deepseek-recipe 0.2.0 makes of the same pieces. Neighbouring ranges with
one action are a segment; a piece's part of it becomes an item when the piece ends or another
segment begins. Used by `parser.py`; level `clients` is in `lenient.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from functools import lru_cache

from headrace.recipe.constants import SpecialTokens
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.json_text import escaped
from headrace.recipe.parser.items import (
    CallArguments,
    CallBegin,
    CallNamed,
    Content,
    Item,
    Reasoning,
    TextKind,
)
from headrace.recipe.parser.matcher import Pattern
from headrace.recipe.parser.scanner import Piece, Rule, Scanner, Stage
from headrace.recipe.parts import Part


class Act(IntEnum):
    """What becomes of characters; marks (`LABELS`) are written once per segment."""

    SKIP = auto()
    CONTENT = auto()
    REASONING = auto()
    SPACE = auto()
    STOP = auto()
    CALL = auto()
    NAME = auto()
    NAME_END = auto()
    RAW = auto()
    ESCAPED = auto()
    OPEN_OBJECT = auto()
    NEXT_PARAMETER = auto()
    COLON = auto()
    OPEN_QUOTE = auto()
    CLOSE_QUOTE = auto()
    EMPTY_OBJECT = auto()
    CLOSE_OBJECT = auto()
    OPEN_BRACE = auto()
    OPEN_BRACKET = auto()


LABELS = {
    Act.OPEN_OBJECT: "{",
    Act.NEXT_PARAMETER: ", ",
    Act.COLON: ": ",
    Act.OPEN_QUOTE: '"',
    Act.CLOSE_QUOTE: '"',
    Act.EMPTY_OBJECT: "{}",
    Act.CLOSE_OBJECT: "}",
}
# What a piece becomes unchanged, once its segment has begun.
_QUIET: dict[Act, TextKind] = {
    Act.CONTENT: Content,
    Act.REASONING: Reasoning,
    Act.ESCAPED: CallArguments,
}
JSON_OPENERS = {Act.OPEN_BRACE: "{", Act.OPEN_BRACKET: "["}


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers that are made of control tokens."""

    open: Pattern
    close: Pattern
    thinking_end: Pattern
    thinking_end_lines: Pattern

    @classmethod
    def of(cls, special: SpecialTokens, ascii_bars: bool = False) -> Markers:
        """The markers of a spelling; with ASCII bars they exist in text chunks only."""
        end = special.thinking_end
        dsml = special.dsml.replace("｜", "|") if ascii_bars else special.dsml
        size = len(dsml)
        return cls(
            open=Pattern("<" + dsml, (1, 1 + size), newlines=True),
            close=Pattern("</" + dsml, (2, 2 + size)),
            thinking_end=Pattern(end, (0, len(end))),
            thinking_end_lines=Pattern(end, (0, len(end)), newlines=True),
        )

    def closing(self, name: str) -> Pattern:
        """A closing tag."""
        return Pattern(self.close.text + name + ">", self.close.special)


@lru_cache(maxsize=64)
def stages_of(
    special: SpecialTokens, stops: tuple[str, ...], tools: bool, json: bool
) -> dict[str, Stage[Act]]:
    """All stages by name, shared by the streams with these settings."""
    marks = Markers.of(special)
    opener = [Rule(marks.open, Act.SKIP, "tools")] if tools else []
    stopping = [Rule(Pattern(stop), Act.STOP, "stopped") for stop in stops]
    end = Rule(marks.thinking_end, Act.SKIP, "content")
    if json:
        fences = [Rule(Pattern(f), Act.SKIP, "json") for f in ("```json\n", "```\n")]
        braces = [Rule(Pattern(c), a, "json") for a, c in JSON_OPENERS.items()]
        content = [*fences, *braces, *opener, end]
    else:
        content = [*stopping, *opener, end]
    text = Act.SPACE if json else Act.CONTENT
    # A stop that is one newline completes before the leading newline can be dropped.
    lead = None if not json and "\n" in stops else Act.SKIP
    reasoning = (*opener, Rule(marks.thinking_end_lines, Act.SKIP, "content_lead"))
    fence_end = Rule(Pattern("\n```"), Act.SKIP, "after_json")
    stages = [
        Stage("content", text, tuple(content)),
        Stage("content_lead", text, tuple(content), lead),
        Stage("json", Act.CONTENT, (*stopping, fence_end)),
        Stage("after_json", Act.SPACE, tuple(opener)),
        Stage("reasoning", Act.REASONING, reasoning),
        Stage("reasoning_lead", Act.REASONING, reasoning, Act.SKIP),
        Stage("finished", Act.SKIP),
        *_call_stages(marks),
    ]
    return {stage.name: stage for stage in stages}


def _call_stages(marks: Markers) -> list[Stage[Act]]:
    parameter = Pattern("parameter name=")
    return [
        Stage(
            "tools",
            Act.SKIP,
            (
                Rule(Pattern('invoke name="'), Act.CALL, "name"),
                Rule(marks.closing("tool_calls"), Act.SKIP, "finished"),
                Rule(marks.closing(" calls"), Act.SKIP, "finished"),
            ),
        ),
        Stage("name", Act.NAME, (Rule(Pattern('"'), Act.NAME_END, "first"),)),
        Stage(
            "first",
            Act.SKIP,
            (
                Rule(parameter, Act.OPEN_OBJECT, "parameter"),
                Rule(marks.close, Act.EMPTY_OBJECT, "tools"),
            ),
        ),
        Stage(
            "more",
            Act.SKIP,
            (
                Rule(parameter, Act.NEXT_PARAMETER, "parameter"),
                Rule(marks.close, Act.CLOSE_OBJECT, "tools"),
            ),
        ),
        Stage("parameter", Act.RAW, (Rule(Pattern(" "), Act.COLON, "attribute"),)),
        Stage(
            "attribute",
            Act.SKIP,
            (
                Rule(Pattern('true">'), Act.OPEN_QUOTE, "string"),
                Rule(Pattern('false">'), Act.SKIP, "raw"),
            ),
        ),
        Stage("string", Act.ESCAPED, (Rule(marks.close, Act.CLOSE_QUOTE, "more"),)),
        Stage("raw", Act.RAW, (Rule(marks.close, Act.SKIP, "more"),)),
    ]


def first_stage(parsing: ParsingOptions) -> str:
    """Name of the stage that an answer begins in."""
    if parsing.starts_in_tool_calls:
        return "tools"
    return {
        ThinkingStage.REASONING_START: "reasoning_lead",
        ThinkingStage.REASONING_CONTINUATION: "reasoning",
        ThinkingStage.CONTENT_CONTINUATION: "content",
        None: "content_lead",
    }[parsing.thinking_stage]


class OfficialMachine:
    """Pieces -> items of one answer. reasoning: the reasoning so far; calls: names so far."""

    def __init__(self, parsing: ParsingOptions, special: SpecialTokens) -> None:
        stops = tuple(stop for stop in parsing.stops if stop)
        self._stages = stages_of(special, stops, parsing.parse_tool_calls, parsing.parse_json)
        self.scanner = Scanner(self._stages[first_stage(parsing)], self._take, self._follow)
        self.items: list[Item] = []
        self.reasoning: list[Part] = []
        self.calls = 0
        self.stop: str | None = None
        self._name: list[str] = []
        # The segment: its action, the piece whose part is open, that part, whether it is the first.
        self._act: Act | None = None
        self._piece: Piece | None = None
        self._part: list[str] = []
        self._first = True

    @property
    def in_reasoning(self) -> bool:
        """Whether the reasoning was not left yet."""
        return self.scanner.stage.default is Act.REASONING

    @property
    def quiet(self) -> TextKind | None:
        """See `OutputParser.quiet`."""
        act = self._act
        if self._piece is not None or act is not self.scanner.stage.default:
            return None
        return _QUIET.get(act) if self.scanner.idle else None

    def feed(self, piece: Piece) -> bool:
        """Take one piece; False when a stop sequence completed."""
        if not piece.text and self._act is not None and not self.scanner.holds:
            self._take(self._act, piece, "", True)
            return True
        return self.scanner.feed(piece)

    def finish(self) -> None:
        """No more pieces come."""
        self.scanner.finish()
        self._close()

    def _follow(self, rule: Rule[Act] | None, _: str) -> Stage[Act] | None:
        if rule is None:
            return self.scanner.stage
        if rule.action is Act.STOP:
            self.stop = rule.pattern.text
            self._close()
            return None
        return self._stages[rule.then]

    def _take(self, act: Act, piece: Piece, text: str, to_end: bool) -> None:
        if act is not self._act:
            self._close()
            self._act = act
            self._first = True
        self._piece = piece
        self._part.append(text)
        if to_end:
            self._close()

    def _close(self) -> None:
        """The open part becomes an item."""
        piece, act = self._piece, self._act
        if piece is None or act is None:
            return
        text = self._part[0] if len(self._part) == 1 else "".join(self._part)
        self._part.clear()
        self._piece = None
        first, self._first = self._first, False
        if act is Act.CONTENT:
            self.items.append(Content(text, piece.logprobs))
        elif act is Act.REASONING:
            self.reasoning.append(text)
            self.items.append(Reasoning(text, piece.logprobs))
        elif act is Act.SPACE:
            self.items.append(Content(" ", piece.logprobs))
        elif act is Act.RAW:
            self.items.append(CallArguments(text))
        elif act is Act.ESCAPED:
            self.items.append(CallArguments(escaped(text)))
        elif act is Act.NAME:
            self._name.append(text)
        elif first:
            self._mark(act, piece)

    def _mark(self, act: Act, piece: Piece) -> None:
        """What a marker leaves behind, at its first piece."""
        if act in LABELS:
            self.items.append(CallArguments(LABELS[act]))
        elif act in JSON_OPENERS:
            self.items.append(Content(JSON_OPENERS[act], piece.logprobs))
        elif act is Act.CALL:
            self.items.append(CallBegin())
        elif act is Act.NAME_END:
            self.calls += 1
            self.items.append(CallNamed("".join(self._name)))
            self._name.clear()
