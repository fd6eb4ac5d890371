"""Random requests of all kinds in waves, every choice from one seed; used by `soak.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams

Tokens = tuple[int, ...]

MAX_TOKENS = 1024  # prompt and output together: the tiny model's limit


@dataclass(frozen=True, slots=True)
class Amount:
    """How much comes.

    in_flight: requests at most outside bursts. burst: requests of the largest burst. rates:
    arrivals per step, one is drawn for each phase. long_output: tokens of the longest answers.
    aborts, preemptions: shares of steps with one; preemptions by force, beside those that the pool
    needs. writers: share of the phases in which prompts are short and answers long: many run at
    once, then all of them grow.
    """

    in_flight: int = 24
    burst: int = 60
    rates: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    long_output: int = 400
    aborts: float = 0.02
    preemptions: float = 0.01
    writers: float = 0.4


class Load:
    """Random requests of all kinds from one seed."""

    def __init__(self, seed: int, vocab_size: int, amount: Amount) -> None:
        self._amount = amount
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._roots = [self._ids(640) for _ in range(4)]
        self._known: deque[Tokens] = deque(maxlen=16)  # prompts with their answers
        self._made = 0
        self._rate = 0.3
        self._phase_left = 0
        self._writers = False

    def chance(self, share: float) -> bool:
        """True in this share of calls."""
        return bool(self._random.random() < share)

    def below(self, end: int) -> int:
        """An integer from 0 to end - 1."""
        return int(self._random.integers(end))

    def arrivals(self) -> int:
        """How many requests come now: waves of quiet, usual and busy times, and bursts."""
        if self._phase_left == 0:
            self._phase_left = int(self._random.integers(10, 120))
            self._rate = float(self._random.choice(self._amount.rates))
            self._writers = self.chance(self._amount.writers)
            if self.chance(0.1):
                return int(self._random.integers(self._amount.burst // 3, self._amount.burst))
        self._phase_left -= 1
        return int(self._random.poisson(self._rate))

    def answered(self, prompt: Tokens, output: Tokens) -> None:
        """An answer has ended: its conversation may go on."""
        self._known.append(prompt + output)

    def request(self) -> Request:
        """The next request; its id is new."""
        self._made += 1
        prompt = self._prompt()
        return Request(
            f"r{self._made}",
            prompt,
            self._params(MAX_TOKENS - len(prompt)),
            priority=int(self._random.choice([-1, 0, 0, 0, 0, 1])),
        )

    def _ids(self, count: int) -> Tokens:
        # The ids below 3 are BOS, EOS and padding.
        return tuple(self._random.integers(3, self._vocab_size, count).tolist())

    def _between(self, *ranges: tuple[int, int]) -> int:
        first, last = ranges[self.below(len(ranges))]
        return int(self._random.integers(first, last + 1))

    def _prompt(self) -> Tokens:
        if self._writers:
            return self._ids(self._between((1, 100)))
        kind = self._random.random()
        if kind < 0.25 and self._known:
            known = self._known[self.below(len(self._known))]
            return known[: MAX_TOKENS - 100] + self._ids(self._between((1, 60)))
        if kind < 0.6:
            root = self._roots[self.below(len(self._roots))]
            return root[: self._between((120, 640))] + self._ids(self._between((1, 90)))
        return self._ids(self._between((1, 16), (1, 64), (1, 64), (65, 250), (250, 700)))

    def _params(self, room: int) -> SamplingParams:
        longest = self._amount.long_output
        # Long ones grow by blocks that the pool does not have.
        long = self.chance(0.8 if self._writers else 0.15)
        output = self._between((longest // 2, longest)) if long else self._between((1, 6), (6, 40))
        output = min(room, output)
        fields: dict[str, Any] = {
            "max_tokens": output,
            "seed": self.below(2**63),
            "temperature": 0.0 if self.chance(0.3) else float(self._random.uniform(0.3, 1.5)),
            "ignore_eos": self.chance(0.5),
        }
        extras: tuple[tuple[float, str, Callable[[], object]], ...] = (
            (0.2, "n", lambda: self._between((2, 4))),
            (0.2, "top_k", lambda: self._between((1, 60))),
            (0.2, "top_p", lambda: float(self._random.uniform(0.5, 1.0))),
            (0.1, "min_p", lambda: 0.05),
            (0.1, "repetition_penalty", lambda: 1.2),
            (0.1, "presence_penalty", lambda: 0.7),
            (0.1, "frequency_penalty", lambda: 0.4),
            (0.1, "logit_bias", lambda: {self.below(self._vocab_size): 4.0}),
            (0.1, "banned_token_ids", lambda: self._ids(3)),
            (0.3, "stop", self._stop),
            (0.1, "stop_token_ids", lambda: self._ids(2)),
            (0.2, "min_tokens", lambda: self._between((0, output))),
            (0.2, "logprobs", lambda: self._between((0, 3))),
            (0.03, "prompt_logprobs", lambda: 1),
        )
        fields |= {name: make() for share, name, make in extras if self.chance(share)}
        return SamplingParams(**fields)

    def _stop(self) -> tuple[str, ...]:
        letters = "etaoinshrdlu .,QXZ"
        count, length = self._between((1, 3)), self._between((1, 2))
        return tuple(
            "".join(letters[self.below(len(letters))] for _ in range(length)) for _ in range(count)
        )
