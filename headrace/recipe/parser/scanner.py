"""Cuts pieces of an answer into ranges: matched markers, and what lies between them.

Contract: every character goes to `take` exactly once, in order, as soon as it is certain which
action it gets: the one of the marker it belongs to, or the default of the stage. The tail of a
piece that may still become a marker is held back. A completed marker leads to another stage, where
the search begins anew. The two levels give different stages and different takers.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.core.output import TokenLogprobs
from headrace.recipe.parser.items import PieceLogprobs
from headrace.recipe.parser.matcher import Kind, Matcher, Pattern, matcher_of

A = TypeVar("A")


class Piece:
    """A stretch of output that came at once and is never joined with another.

    ids: the tokens, when it was made of tokens; `entries`: their log probabilities.
    """

    __slots__ = ("entries", "ids", "kind", "text", "tokens")

    def __init__(
        self,
        text: str,
        kind: Kind,
        tokens: int,
        ids: tuple[int, ...] = (),
        entries: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        self.text = text
        self.kind = kind
        self.tokens = tokens
        self.ids = ids
        self.entries = entries

    @property
    def logprobs(self) -> PieceLogprobs | None:
        """The log probabilities, if there are any."""
        return PieceLogprobs(self.ids, self.entries) if self.entries else None

    def take_logprobs(self) -> PieceLogprobs | None:
        """`logprobs` for the first item that is cut from the piece, None for the others."""
        taken = self.logprobs
        self.entries = ()
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class Rule(Generic[A]):
    """A marker, what its characters get, and the name of the stage that follows."""

    pattern: Pattern
    action: A
    then: str


@dataclass(frozen=True, slots=True, eq=False)
class Stage(Generic[A]):
    """Markers in order of preference, and what all other characters get.

    lead: newlines at the very beginning get this action, before anything else is searched.
    border: instead of rules: the stage ends before the first character that this finds.
    """

    name: str
    default: A
    rules: tuple[Rule[A], ...] = ()
    lead: A | None = None
    border: re.Pattern[str] | None = None
    matcher: Matcher = field(init=False)

    def __post_init__(self) -> None:
        patterns = tuple(rule.pattern for rule in self.rules)
        object.__setattr__(self, "matcher", matcher_of(patterns))


class Scanner(Generic[A]):
    """The search in one answer.

    take(action, piece, text, to_end): a range of a piece; to_end: nothing of the piece follows.
    follow(rule, next): the stage after a marker, or None when the answer ends with it. At a border
    the rule is None; next: the first character after it, "" when it has not come yet.
    """

    __slots__ = ("_follow", "_fresh", "_held", "_pending", "_starts", "_state", "_take", "stage")

    def __init__(
        self,
        stage: Stage[A],
        take: Callable[[A, Piece, str, bool], None],
        follow: Callable[[Rule[A] | None, str], Stage[A] | None],
    ) -> None:
        self._take = take
        self._follow = follow
        self._pending: deque[tuple[Piece, int]] = deque()  # undecided: piece, from where in it
        self._held = 0  # undecided characters
        self._enter(stage)

    def _enter(self, stage: Stage[A]) -> None:
        self.stage = stage
        self._state = stage.matcher.root
        # Where the partial match of each pattern with newlines begins, relative to the piece.
        self._starts = [0] * len(stage.matcher.leading)
        self._fresh = stage.lead is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is held back and leading newlines are past."""
        return not self._pending and not self._fresh

    @property
    def held_text(self) -> str:
        """The characters that are held back."""
        return "".join(piece.text[start:] for piece, start in self._pending)

    @property
    def holds(self) -> bool:
        """Whether pieces are held back, empty ones included."""
        return bool(self._pending)

    def feed(self, piece: Piece) -> bool:
        """Search one more piece; False when the answer ended in it."""
        text = piece.text
        if self._pending or self._fresh or not text:
            return self._feed_slowly(piece)
        stage = self.stage
        if stage.border is None and stage.matcher.find.search(text) is None:
            self._take(stage.default, piece, text, True)
            return True
        # Nothing is held back: all that is decided lies in this piece.
        position = done = 0
        size = len(text)
        while True:
            rule, start, position = self._search(text, position, piece.kind)
            if rule is None and start < 0:
                break
            if start > done:
                self._take(self.stage.default, piece, text[done:start], start == size)
            if rule is not None:
                self._take(rule.action, piece, text[start:position], position == size)
            done = position
            following = self._follow(rule, text[position : position + 1])
            if following is None:
                return False
            self._enter(following)
            if position == size:
                return True
            if following.lead is not None:
                self._pending.append((piece, position))
                position = done = self._skip_lead(text, position)
                self._pending.clear()
            if self._starts:
                self._starts = [position] * len(self._starts)
        held = self._partial(position)
        if position - held > done:
            self._take(self.stage.default, piece, text[done : position - held], not held)
        if held:
            self._pending.append((piece, position - held))
            self._starts = [start - position for start in self._starts]
        self._held = held
        return True

    def _feed_slowly(self, piece: Piece) -> bool:
        text = piece.text
        self._pending.append((piece, 0))
        done = -self._held
        position = 0
        while True:
            if self._fresh and position < len(text):
                position = self._skip_lead(text, position)
                done = position
            rule, start, position = self._search(text, position, piece.kind)
            if rule is None and start < 0:
                break
            self._decide(start - done, self.stage.default)
            if rule is not None:
                self._decide(position - start, rule.action)
            done = position
            following = self._follow(rule, text[position : position + 1])
            if following is None:
                return False
            self._enter(following)
            self._starts = [position] * len(self._starts)
        held = self._partial(position)
        self._decide(position - held - done, self.stage.default)
        self._held = held
        self._starts = [start - position for start in self._starts]
        return True

    def finish(self) -> None:
        """No more text comes: what is held back gets the default action."""
        while self._pending:
            piece, start = self._pending.popleft()
            self._take(self.stage.default, piece, piece.text[start:], True)
        self._held = 0

    def drop(self, characters: int) -> list[Piece]:
        """Forget so many characters at the end of those held back; the pieces that are all gone."""
        keep = self._held - characters
        self._decide(keep, self.stage.default)
        gone = [piece for piece, start in self._pending if not start]
        self._pending.clear()
        self._held = 0
        return gone

    def _skip_lead(self, text: str, position: int) -> int:
        lead = self.stage.lead
        end = position
        while end < len(text) and text[end] == "\n":
            end += 1
        if end > position and lead is not None:
            self._decide(end - position, lead)
            self._starts = [end] * len(self._starts)
        self._fresh = end == len(text)
        return end

    def _search(self, text: str, position: int, kind: Kind) -> tuple[Rule[A] | None, int, int]:
        """The next marker: its rule, begin, end; without one: None, -1 and the end of the text."""
        border = self.stage.border
        if border is not None:
            found = border.search(text, position)
            return (None, found.start(), found.start()) if found else (None, -1, len(text))
        matcher, state, starts = self.stage.matcher, self._state, self._starts
        if kind is Kind.SPECIAL and position == 0:
            state, number, position, moved = matcher.special(state, text)
            for place, start in moved:
                starts[place] = start
        else:
            state, number, position = matcher.walk(state, text, position, kind, starts)
        if number < 0:
            self._state = state
            return None, -1, position
        if number in matcher.leading:
            start = starts[matcher.leading.index(number)]
        else:
            start = position - matcher.lengths[number]
        return self.stage.rules[number], start, position

    def _partial(self, position: int) -> int:
        """How many characters at the end may still become a marker."""
        if self._state is self.stage.matcher.root:
            return 0
        return max(self._state.depth, *(position - start for start in self._starts), 0)

    def _decide(self, count: int, action: A) -> None:
        """The next undecided characters get an action; empty pieces go with those before them."""
        if count <= 0:
            return
        pending = self._pending
        while pending:
            piece, start = pending[0]
            rest = len(piece.text) - start
            if rest > count:
                if count:
                    self._take(action, piece, piece.text[start : start + count], False)
                    pending[0] = (piece, start + count)
                return
            pending.popleft()
            self._take(action, piece, piece.text[start:], True)
            count -= rest
