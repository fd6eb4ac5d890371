"""When a grammar begins to hold: after its trigger sequence.

Contract: `Trigger.after(progress, token)` is the automaton of Knuth, Morris and Pratt: progress
counts the trigger tokens that the newest tokens spell, and `len(trigger)` means complete. Once the
bound token is seen, the rest of the trigger is forced, token by token. Pure functions of small
integers, so going back is keeping the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence


class Trigger:
    """One trigger sequence, at least one token."""

    def __init__(self, tokens: Sequence[int], bound_token: int | None) -> None:
        self._tokens = tuple(tokens)
        self._bound_token = bound_token
        self._fallback = _fallbacks(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def after(self, progress: int, bound: bool, token: int) -> tuple[int, bool]:
        """Progress after a token, and whether the rest is forced."""
        tokens = self._tokens
        while progress and tokens[progress] != token:
            progress = self._fallback[progress]
        if tokens[progress] == token:
            progress += 1
        return progress, bound or token == self._bound_token

    def token(self, progress: int) -> int:
        """The token that goes on from there."""
        return self._tokens[progress]


def _fallbacks(tokens: tuple[int, ...]) -> list[int]:
    """By progress: the next shorter progress that the same tokens spell."""
    fallback = [0, 0]
    for place in range(1, len(tokens)):
        shorter = fallback[place]
        while shorter and tokens[shorter] != tokens[place]:
            shorter = fallback[shorter]
        fallback.append(shorter + (tokens[shorter] == tokens[place]))
    return fallback
