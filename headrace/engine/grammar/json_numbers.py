"""Keeps the exponents of JSON numbers to two digits, which 64-bit floats can hold.

Grammar libraries let a number go on for ever (1e871463): JSON, but infinite for whoever reads it.
A `NumberLimit` belongs to a vocabulary; `after` follows a JSON text by a few states and `mask` has
the tokens that may come next as far as exponents go. Used by the backends' matchers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from headrace.engine.grammar.backend import MaskWords

MAX_EXPONENT_DIGITS = 2

# What a text ends in: nothing of interest, in a string, behind its backslash, or an exponent with
# its sign and as many 1 as it has digits.
START, _STRING, _ESCAPE, _EXPONENT = b"", b'"', b"\\", b"e"
_STATES = (START, _STRING, _ESCAPE, _EXPONENT, b"e+", b"e1", b"e11")
_TOO_LONG = _EXPONENT + b"1" * (MAX_EXPONENT_DIGITS + 1)
_DIGITS = b"0123456789"
_HAS_DIGIT = re.compile(rb"[0-9]")


def after(state: bytes, data: bytes) -> bytes:
    """The state after more of the text."""
    for byte in data:
        state = _step(state, byte)
        if state == _TOO_LONG:
            break
    return state


def _step(state: bytes, byte: int) -> bytes:
    if state == _STRING:
        return _ESCAPE if byte == ord("\\") else START if byte == ord('"') else _STRING
    if state == _ESCAPE or byte == ord('"'):
        return _STRING
    if byte in b"eE":  # of `true` and `false` too, which no digit follows
        return _EXPONENT
    if state == _EXPONENT and byte in b"+-":
        return b"e+"
    if state.startswith(_EXPONENT) and byte in _DIGITS:
        return _EXPONENT + b"1" * (state.count(b"1") + 1)
    return START


class NumberLimit:
    """Masks by state over one vocabulary; all are made at the start (some 40 ms), not in a step."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """texts: bytes by token id."""
        self._texts = texts
        digits = [id for id, text in enumerate(texts) if _HAS_DIGIT.search(text)]
        self._masks = {state: self._made(state, digits) for state in _STATES}

    def after(self, state: bytes, token: int) -> bytes:
        """The state after a token."""
        return after(state, self._texts[token])

    def mask(self, state: bytes) -> MaskWords:
        """Tokens that make no exponent too long, int32 [ceil(vocab / 32)]."""
        return self._masks[state]

    def _made(self, state: bytes, candidates: Sequence[int]) -> MaskWords:
        mask = np.full((len(self._texts) + 31) // 32, -1, dtype=np.int32)
        bits = mask.view(np.uint32)
        for token in candidates:
            if self.after(state, token) == _TOO_LONG:
                bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        return mask


class NumberStates:
    """Where one answer is: a state after each of its tokens."""

    def __init__(self, limit: NumberLimit) -> None:
        self._limit = limit
        self._states = [START]

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by tokens."""
        for token in tokens:
            self._states.append(self._limit.after(self._states[-1], token))

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if count:
            del self._states[-count:]

    def restrict(self, words: MaskWords) -> None:
        """Take tokens out of a mask that would make an exponent too long."""
        words &= self._limit.mask(self._states[-1])
