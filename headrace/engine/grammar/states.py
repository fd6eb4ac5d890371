"""Masks by grammar state: what was computed once is looked up afterwards, by every request.

Contract: a `StateGraph` belongs to one compiled grammar and grows as answers pass through it. A
`State` knows its mask and, by token, the states after it, so a known path costs a dictionary
look-up a token and the library is not asked at all. Paths join where the JSON position is equal
(`json_positions.py`); other grammars give a tree. Bounded: a graph that outgrows its limit starts
anew. Used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.engine.grammar.backend import BackendMatcher, CompiledGrammar, MaskWords, TokenTable
from headrace.engine.grammar.json_positions import Position, advance, start
from headrace.engine.grammar.json_schema_shape import shape_of

NOT_FORCED = -1
# Measured: a state with its place in two dictionaries.
_STATE_BYTES = 500


class State:
    """A place in a grammar.

    mask: int32 [ceil(vocab / 32)], read-only, shared between states that have equal ones. forced:
    the only token that may come next, or NOT_FORCED. following: states after tokens seen so far.
    """

    __slots__ = ("following", "forced", "mask", "position")

    def __init__(self, mask: MaskWords, forced: int, position: Position | None) -> None:
        self.mask = mask
        self.forced = forced
        self.position = position
        self.following: dict[int, State] = {}

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        return bool(int(self.mask[token >> 5]) >> (token & 31) & 1)


class StateGraph:
    """All states of one compiled grammar that answers have reached."""

    def __init__(self, grammar: CompiledGrammar, table: TokenTable, limit_bytes: int) -> None:
        """Computes the first mask. limit_bytes: of masks and states, 0: nothing is kept.

        Raises MatcherFailed when the grammar exceeds a limit at its start.
        """
        self.matcher: Callable[[], BackendMatcher] = grammar.matcher
        self._texts = table.texts
        self._limit_bytes = limit_bytes
        self._words = np.zeros(table.num_words, dtype=np.int32)
        schema = grammar.json_schema
        self._start = None if schema is None else start(shape_of(schema))
        self.computed = 0  # masks, since the start
        self.num_words = table.num_words
        self.end = State(only(table.eos_id, table.num_words), table.eos_id, None)
        self.end.following[table.eos_id] = self.end
        self.all_but_eos: MaskWords = ~self.end.mask
        self.all_but_eos.flags.writeable = False
        self._forget()
        self.root = self._new(self.matcher(), self._start)

    def after(self, state: State, token: int, matcher: Callable[[], BackendMatcher]) -> State:
        """The state after an allowed token that `state.following` does not have.

        matcher: gives one that has accepted everything up to and including the token; not called
        where the state is known. Raises MatcherFailed.
        """
        position = state.position
        if position is not None:
            position = advance(position, self._texts[token])
        known = None if position is None else self._by_position.get(position)
        if known is None:
            if self.size_bytes > self._limit_bytes:
                self._forget()
                self.root = State(self.root.mask, self.root.forced, self._start)
            known = self._new(matcher(), position)
        if self._limit_bytes:
            state.following[token] = known
            self.size_bytes += _STATE_BYTES
            if position is not None:
                self._by_position[position] = known
        return known

    def _forget(self) -> None:
        self._masks: dict[bytes, MaskWords] = {}
        self._by_position: dict[Position, State] = {}
        self.size_bytes = 0

    def _new(self, matcher: BackendMatcher, position: Position | None) -> State:
        matcher.fill_mask(self._words)
        self.computed += 1
        data = self._words.tobytes()
        mask = self._masks.get(data)
        if mask is None:
            mask = self._masks[data] = np.frombuffer(data, dtype=np.int32)
            self.size_bytes += len(data)
        return State(mask, single_token(mask), position)


def single_token(mask: Sequence[int] | MaskWords) -> int:
    """The token of a mask that allows one only, else NOT_FORCED."""
    words = np.flatnonzero(mask)
    if words.size != 1:
        return NOT_FORCED
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else NOT_FORCED


def only(token: int, num_words: int) -> MaskWords:
    """The mask that allows one token."""
    words = np.zeros(num_words, dtype=np.int32)
    words.view(np.uint32)[token >> 5] = 1 << (token & 31)
    return words
