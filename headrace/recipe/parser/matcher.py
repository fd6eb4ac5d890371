"""Searches several markers at once in a text that arrives in pieces.

Contract: all patterns of a set are followed in parallel (Knuth-Morris-Pratt); the first in the
list wins when several complete at the same character. Their joint progress is one state, and steps
between states are computed once, so a character costs one look-up however many patterns there are.
Sets are shared by all streams that use them. Used by `scanner.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

# So many states are remembered; more are only reached by long or hostile stops.
MAX_STATES = 2048
MAX_SPECIALS = 8
# An element that no character equals: a pattern with it is held back but never completes.
NEVER = "\ue000never"


class Kind(IntEnum):
    """Where the characters of a piece come from; decides which elements they can match."""

    TEXT = 0  # plain text from the engine: matches by spelling
    PLAIN = 1  # ordinary tokens: matches only literal elements
    SPECIAL = 2  # one token of the added vocabulary: matches only special elements


@dataclass(frozen=True, slots=True)
class Pattern:
    """A marker: `text` with the range [start, end) of it being a control token.

    newlines: any number of newlines before it belong to it. never: it is held back while it stands
    at the end, but it never completes.
    """

    text: str
    special: tuple[int, int] = (0, 0)
    newlines: bool = False
    never: bool = False


class Risks(NamedTuple):
    """What in plain text may begin a marker.

    anywhere: characters that may. at_end: texts that any beginning of may, but only at the end of a
    piece, because a control token has to follow; with True, newlines before it belong to it.
    """

    anywhere: frozenset[str]
    at_end: frozenset[tuple[str, bool]]


class Edge:
    """A step: the state reached, the pattern that completed (or -1), what moved.

    moved: (number of a pattern with newlines, characters of it that are matched now) for each whose
    match begins elsewhere than before.
    """

    __slots__ = ("match", "moved", "state")

    def __init__(self, state: State, match: int, moved: tuple[tuple[int, int], ...]) -> None:
        self.state = state
        self.match = match
        self.moved = moved


class State:
    """Progress of every pattern; `depth`: the longest partial match of those without newlines."""

    __slots__ = ("depth", "edges", "progress", "specials")

    def __init__(self, progress: tuple[int, ...], depth: int) -> None:
        self.progress = progress
        self.depth = depth
        self.edges: tuple[dict[str, Edge], dict[str, Edge], dict[str, Edge]] = ({}, {}, {})
        self.specials: dict[str, Walk] | None = None


# The state, the pattern that completed or -1, the place after it; number and start of each pattern
# with newlines whose match begins elsewhere than before.
Walk = tuple[State, int, int, tuple[tuple[int, int], ...]]


class Matcher:
    """A compiled set of patterns.

    find: regular expression search for a character that can begin a pattern. risks: for tokens, and
    for tokens whose control tokens are known by spelling only. leading: numbers of the patterns
    with newlines, as `Edge.moved` counts them.
    """

    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        self.patterns = patterns
        self.leading = tuple(i for i, pattern in enumerate(patterns) if pattern.newlines)
        self._place = {i: place for place, i in enumerate(self.leading)}
        self._elements = tuple(_elements(pattern) for pattern in patterns)
        self._fallback = tuple(_fallback(elements) for elements in self._elements)
        self.lengths = tuple(len(elements) for elements in self._elements)
        starters = {pattern.text[0] for pattern in patterns}
        if self.leading:
            starters.add("\n")
        self.risks = (_risks(patterns, spelled=False), _risks(patterns, spelled=True))
        # An empty class would not compile; `(?!)` finds nothing.
        self.find = re.compile(f"[{re.escape(''.join(sorted(starters)))}]" if starters else "(?!)")
        self._alphabet = frozenset("".join(pattern.text for pattern in patterns)) | {"\n"}
        self._states: dict[tuple[int, ...], State] = {}
        self.root = self._state((0,) * len(patterns))
        away = tuple((place, 0) for place in range(len(self.leading)))
        self._away = Edge(self.root, -1, away)

    def walk(
        self, state: State, text: str, position: int, kind: Kind, starts: list[int]
    ) -> tuple[State, int, int]:
        """Steps with a text up to a match: the state, the pattern (or -1), the place after it.

        starts: per pattern with newlines, where its match begins; kept up to date.
        """
        root, find = self.root, self.find.search
        size = len(text)
        while position < size:
            if state is root:
                found = find(text, position)
                position = found.start() if found else size
                for place in range(len(starts)):
                    starts[place] = position
                if found is None:
                    break
            character = text[position]
            edge = state.edges[kind].get(character) or self.edge(state, kind, character)
            state = edge.state
            position += 1
            for place, matched in edge.moved:
                starts[place] = position - matched
            if edge.match >= 0:
                return state, edge.match, position
        return state, -1, size

    def special(self, state: State, text: str) -> Walk:
        """`walk` with a control token, and the starts that it changed; remembered."""
        if state.specials is None:
            state.specials = {}
        walk = state.specials.get(text)
        if walk is None:
            starts = [-MAX_STATES] * len(self.leading)
            end = self.walk(state, text, 0, Kind.SPECIAL, starts)
            moved = tuple((i, at) for i, at in enumerate(starts) if at != -MAX_STATES)
            walk = (*end, moved)
            if len(state.specials) < MAX_SPECIALS:
                state.specials[text] = walk
        return walk

    def edge(self, state: State, kind: Kind, character: str) -> Edge:
        """The step from a state with a character; remembered."""
        if character not in self._alphabet:
            return self._away
        edge = state.edges[kind].get(character)
        if edge is None:
            edge = self._step(state, kind, character)
            state.edges[kind][character] = edge
        return edge

    def _state(self, progress: tuple[int, ...]) -> State:
        state = self._states.get(progress)
        if state is None:
            plain = (p for i, p in enumerate(progress) if i not in self._place)
            state = State(progress, max(plain, default=0))
            if len(self._states) > MAX_STATES:
                self._forget()
            self._states[progress] = state
        return state

    def _forget(self) -> None:
        """Begin anew: the states that go on being used are few, and soon known again."""
        root = self.root
        self._states = {root.progress: root}
        root.specials = None
        for edges in root.edges:
            edges.clear()

    def _step(self, state: State, kind: Kind, character: str) -> Edge:
        progress: list[int] = []
        moved: list[tuple[int, int]] = []
        match = -1
        for number, before in enumerate(state.progress):
            now = self._advance(number, max(before, 0), kind, character)
            place = self._place.get(number)
            if place is not None:
                newline = character == "\n" and before <= 0 and kind is not Kind.SPECIAL
                if newline:
                    now = -1
                # Unmoved: one character more of the pattern, or newlines that go on.
                if not (now == before + 1 and before > 0) and not (before == -1 and now in (-1, 1)):
                    moved.append((place, abs(now)))
            if now == self.lengths[number] and match < 0:
                match = number
            progress.append(now)
        if match >= 0:
            # The set is left; the progress of the others does not matter any more.
            return Edge(self.root, match, tuple(moved))
        return Edge(self._state(tuple(progress)), -1, tuple(moved))

    def _advance(self, number: int, matched: int, kind: Kind, character: str) -> int:
        elements = self._elements[number]
        fallback = self._fallback[number]
        while True:
            if matched < len(elements) and _fits(elements[matched], kind, character):
                return matched + 1
            if matched == 0:
                return 0
            matched = fallback[matched - 1]


def _risks(patterns: tuple[Pattern, ...], spelled: bool) -> Risks:
    anywhere: set[str] = set()
    at_end: set[tuple[str, bool]] = set()
    for pattern in patterns:
        start, end = pattern.special
        if spelled or start == end:
            anywhere.add(pattern.text[0])
            start = 0
        if start or pattern.newlines:
            at_end.add((pattern.text[:start], pattern.newlines))
    if any(start and lines for start, lines in at_end):
        at_end.discard(("", True))  # the other says so, too
    return Risks(frozenset(anywhere), frozenset(at_end))


Element = tuple[str, bool]


def _elements(pattern: Pattern) -> tuple[Element, ...]:
    start, end = pattern.special
    elements = [(c, start <= i < end) for i, c in enumerate(pattern.text)]
    return (*elements, (NEVER, False)) if pattern.never else tuple(elements)


def _fits(element: Element, kind: Kind, character: str) -> bool:
    wanted, special = element
    return wanted == character and (kind is Kind.TEXT or special == (kind is Kind.SPECIAL))


def _fallback(elements: tuple[Element, ...]) -> tuple[int, ...]:
    """Per prefix: the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(elements)
    matched = 0
    for i in range(1, len(elements)):
        while matched and elements[i] != elements[matched]:
            matched = table[matched - 1]
        if elements[i] == elements[matched]:
            matched += 1
        table[i] = matched
    return tuple(table)


@lru_cache(maxsize=64)
def matcher_of(patterns: tuple[Pattern, ...]) -> Matcher:
    """The compiled set of these patterns, shared."""
    return Matcher(patterns)
