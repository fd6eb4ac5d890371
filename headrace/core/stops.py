"""Stop strings in text that arrives piece by piece.

Contract: pure text, no tokens. `StopMatcher` finds the stop string that completes first (at the
same character: the one that is listed first) in time linear in the text, whatever the pieces.
`HeldText` holds back text that may turn out to be the beginning of a stop string. The engine
decides with the first where an answer ends (`engine/stops.py`); whoever shows text (`LLM`, the
protocol parsers) uses the second and cuts what the engine says. One implementation for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopFound:
    """A completed stop string. cut: its characters and those that follow it in the same piece."""

    stop: str
    cut: int


class StopMatcher:
    """Knuth-Morris-Pratt over several strings; its state is one number per string."""

    __slots__ = ("_failures", "_first", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: not empty strings; the sequence is kept."""
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._first = frozenset(stop[0] for stop in self._stops)
        self._matched = [0] * len(self._stops)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> StopFound | None:
        """Search more text; after a find the rest of `text` is not looked at."""
        if not any(self._matched) and self._first.isdisjoint(text):
            return None
        matched, stops, failures = self._matched, self._stops, self._failures
        for position, character in enumerate(text):
            found = -1
            for index, stop in enumerate(stops):
                length = matched[index]
                while length and stop[length] != character:
                    length = failures[index][length - 1]
                if stop[length] == character:
                    length += 1
                    if length == len(stop):
                        # Further matching goes on as after any mismatch.
                        length = failures[index][length - 1]
                        found = index if found < 0 else found
                matched[index] = length
            if found >= 0:
                return StopFound(stops[found], len(stops[found]) + len(text) - position - 1)
        return None

    def skip(self, text: str) -> None:
        """Take text in without looking for an end: only `held` changes."""
        rest = text
        while (found := self.feed(rest)) is not None:
            rest = rest[len(rest) - (found.cut - len(found.stop)) :]

    def reset(self) -> None:
        """What comes next does not continue what came before."""
        self._matched = [0] * len(self._stops)

    def copy(self) -> StopMatcher:
        """An independent matcher in the same state."""
        twin = StopMatcher.__new__(StopMatcher)
        twin._stops, twin._failures, twin._first = self._stops, self._failures, self._first
        twin._matched = list(self._matched)
        return twin


class HeldText:
    """Lets text through except for an end that may become a stop string."""

    __slots__ = ("_held", "_matcher")

    def __init__(self, stops: Sequence[str]) -> None:
        """Without stops everything passes at once."""
        self._matcher = StopMatcher(stops) if stops else None
        self._held = ""

    def push(self, text: str) -> str:
        """Text that is certain now."""
        if self._matcher is None:
            return text
        self._matcher.skip(text)
        text = self._held + text
        certain = len(text) - self._matcher.held
        self._held = text[certain:]
        return text[:certain]

    def finish(self, text: str = "", cut: int = 0) -> str:
        """The rest, with the last piece `text`, less the `cut` characters at the end."""
        rest, self._held = self._held + text, ""
        return rest[: max(0, len(rest) - cut)]


def _failure_table(pattern: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = table[length - 1]
        if pattern[length] == pattern[index]:
            length += 1
        table[index] = length
    return table
