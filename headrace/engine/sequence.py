"""A request while the engine works on it.

Contract: a `Sequence` holds the known tokens (prompt and output so far), how many of them already
have cache rows, and what ends it. Only the scheduler changes it. Plain data: no torch, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.core.sampling import SamplingParams

TokenIds = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    prompt: int64 [prompt_length]. seed: of its draws. stop_ids: tokens that end it (EOS, unless
    ignored, and the stop tokens of the request). length_limit: tokens of prompt and output at most.
    order: arrival number, given by the scheduler. arrival_s / queued_s: when it arrived / when it
    last joined the queue. computed: tokens that have cache rows. epoch: grows with each preemption,
    so that the result of an older plan is recognised.
    """

    request_id: str
    prompt: TokenIds
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    length_limit: int
    order: int = -1
    arrival_s: float = 0.0
    queued_s: float = 0.0
    computed: int = 0
    epoch: int = 0
    length: int = field(init=False)
    _tokens: TokenIds = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = np.array(self.prompt, dtype=np.int64)
        self.length = len(self._tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def output_length(self) -> int:
        """Tokens drawn so far."""
        return self.length - len(self.prompt)

    @property
    def tokens(self) -> TokenIds:
        """All known ids, int64 [length]; a view that later appends leave valid."""
        return self._tokens[: self.length]

    @property
    def decoding(self) -> bool:
        """Whether all known tokens but the newest drawn one have cache rows."""
        return self.computed == self.length - 1 and self.output_length > 0

    def append(self, token: int) -> None:
        """Add a drawn token."""
        if self.length == len(self._tokens):
            # Doubling keeps appends cheap without reserving the whole context at the start.
            grown = np.zeros(min(2 * self.length + 16, self.length_limit), dtype=np.int64)
            grown[: self.length] = self._tokens
            self._tokens = grown
        self._tokens[self.length] = token
        self.length += 1

    def restart(self) -> None:
        """Forget the cache rows; drawn tokens stay and are computed again like a prompt."""
        self.computed = 0
        self.epoch += 1
