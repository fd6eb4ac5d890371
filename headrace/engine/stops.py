"""Stop strings and stop tokens: what ends an answer besides EOS and its length.

Contract: this runs inside the engine, so that an answer ends in the step that completes a stop
string: ids, log probabilities and usage end there by construction, and the request's memory is
free before the next step (docs/decisions/0006-stop-strings-in-the-engine.md). Text comes from a
`core.protocols.Tokenizer` that whoever builds the engine injects. `StopTable` is keyed by table
row; its state can be rebuilt from the known tokens. No torch. Called by `engine/sampling_state.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.protocols import Detokenizer, Tokenizer
from headrace.core.sampling import SamplingParams, StopScope
from headrace.core.stops import StopFound, StopMatcher
from headrace.errors import InvalidRequest

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ended:
    """A token ended the answer. stop, stop_cut: as in `core.output.TokenChunk`."""

    stop: str | int | None = None
    stop_cut: int = 0


EOS_ENDED = Ended()


class StopStrings:
    """Looks for the stop strings of one answer in its tokens.

    detokenizer: fresh, of this answer alone. min_tokens: a string that completes earlier is text.
    """

    def __init__(
        self,
        stops: Sequence[str],
        detokenizer: Detokenizer,
        scope: StopScope = StopScope(),  # noqa: B008 - frozen
        min_tokens: int = 0,
    ) -> None:
        self._matcher = StopMatcher(stops)
        self._newline_stops = "\n" in stops
        self._detokenizer = detokenizer
        self._border_token = scope.border_token
        self._end_token = scope.end_token
        self._searching = not scope.after_border
        self._skip_newlines = scope.skip_newlines
        self._at_start = scope.skip_newlines
        self._min_tokens = min_tokens
        self._tokens = 0

    def push(self, token: int) -> StopFound | None:
        """Take the next token of the answer in."""
        self._tokens += 1
        if token == self._border_token:
            found = self._search(self._detokenizer.flush())
            self._at_start = self._skip_newlines and not self._searching
            self._searching = True
            self._matcher.reset()
            return found
        if token == self._end_token:
            found = self._search(self._detokenizer.flush())
            self._searching = False
            self._matcher.reset()
            return found
        return self._search(self._detokenizer.push((token,)))

    def copy(self) -> StopStrings:
        """An independent search in the same state."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.copy()
        twin._detokenizer = self._detokenizer.copy()
        return twin

    def _search(self, text: str) -> StopFound | None:
        if not self._searching or not text:
            return None
        if self._at_start:
            stripped = text.lstrip("\n")
            if stripped != text and self._newline_stops and self._tokens > self._min_tokens:
                # A newline alone as stop string is met before it can be skipped.
                return StopFound("\n", len(text))
            text = stripped
            self._at_start = not text
        if self._tokens <= self._min_tokens:
            self._matcher.skip(text)
            return None
        return self._matcher.feed(text)


@dataclass(slots=True)
class _Watched:
    """A row with something to look for."""

    stop_ids: frozenset[int]
    strings: StopStrings | None = field(default=None)


class StopTable:
    """What ends the answers of the running requests, by table row; EOS is the scheduler's."""

    def __init__(self, num_rows: int, tokenizer: Tokenizer | None = None) -> None:
        """num_rows: of the table, row 0 (never used) included. tokenizer: for stop strings."""
        self._tokenizer = tokenizer
        self._is_watched = np.zeros(num_rows, dtype=np.bool_)
        self._watched: dict[int, _Watched] = {}

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for stop strings that nobody here can turn tokens into text for."""
        if params.stop and self._tokenizer is None:
            raise InvalidRequest(
                "Stop strings need a tokenizer, and this engine was built without one.",
                param="stop",
            )

    def admit(self, row: int, params: SamplingParams, output: Iterable[int]) -> None:
        """Start to watch a row; `output`: the tokens it has drawn already (none of them ended it).

        The row must be free.
        """
        if not params.stop_token_ids and not params.stop:
            return
        watched = _Watched(frozenset(params.stop_token_ids))
        if params.stop and self._tokenizer is not None:
            watched.strings = StopStrings(
                params.stop, self._tokenizer.detokenizer(), params.stop_scope, params.min_tokens
            )
            for token in output:
                watched.strings.push(int(token))
        self._watched[row] = watched
        self._is_watched[row] = True

    def release(self, row: int) -> None:
        """Forget a row."""
        if self._is_watched[row]:
            self._is_watched[row] = False
            del self._watched[row]

    def copy(self, parent: int, child: int) -> None:
        """Let the free row `child` start in the state of `parent`."""
        watched = self._watched.get(parent)
        if watched is not None:
            strings = watched.strings.copy() if watched.strings is not None else None
            self._watched[child] = _Watched(watched.stop_ids, strings)
            self._is_watched[child] = True

    def push(self, rows: Ids, tokens: NDArray[Any]) -> dict[int, Ended]:
        """Take one new token of each of `rows` in (distinct rows, integers [n]).

        Gives index into `rows` -> how that answer ends, for those that end with this token. Run of
        several tokens per row: call it once per position, for the rows that have not ended.
        """
        ended: dict[int, Ended] = {}
        if self._watched:
            for index in np.flatnonzero(self._is_watched[rows]).tolist():
                end = self._push(self._watched[int(rows[index])], int(tokens[index]))
                if end is not None:
                    ended[index] = end
        return ended

    def _push(self, watched: _Watched, token: int) -> Ended | None:
        if token < 0:
            return None  # nothing was drawn
        if token in watched.stop_ids:
            return Ended(stop=token)
        if watched.strings is None:
            return None
        found = watched.strings.push(token)
        return None if found is None else Ended(found.stop, found.cut)
