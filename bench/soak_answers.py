"""What came out of an engine, how it came, and what differs between two answers.

`Ledger` takes every chunk in the order in which it comes and notes what breaks the contract of
`core/output.py`. Used by `soak.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.core.output import FinishReason, TokenChunk, TokenLogprobs
from headrace.core.request import Request

Name = tuple[str, int]  # request id, choice


@dataclass(slots=True)
class Answer:
    """What has come out for one choice."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: tuple[str | int | None, int] = (None, 0)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Ledger:
    """Every answer so far, and what was wrong with the way it came."""

    def __init__(self) -> None:
        self.answers: dict[Name, Answer] = {}
        self.violations: list[str] = []
        self.live: dict[str, int] = {}  # request id -> choices that have not ended

    def open(self, request: Request) -> None:
        """A request was taken in."""
        self.live[request.request_id] = request.sampling.n
        for choice in range(request.sampling.n):
            self.answers[request.request_id, choice] = Answer(request)

    def take(self, chunk: TokenChunk) -> Answer | None:
        """A chunk came; its answer, if it has ended now."""
        name = (chunk.request_id, chunk.choice)
        answer = self.answers.get(name)
        if answer is None or answer.finish is not None:
            self.violations.append(f"{name}: a chunk for nobody, or behind the end")
            return None
        if chunk.index != len(answer.tokens):
            self.violations.append(f"{name}: index {chunk.index} after {len(answer.tokens)} tokens")
        answer.tokens += chunk.tokens
        answer.logprobs += chunk.logprobs or ()
        if chunk.prompt_logprobs is not None:
            if answer.prompt_logprobs is not None:
                self.violations.append(f"{name}: prompt log probabilities came twice")
            answer.prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish is None:
            return None
        answer.finish, answer.stop = chunk.finish, (chunk.stop, chunk.stop_cut)
        self.live[chunk.request_id] -= 1
        if self.live[chunk.request_id] == 0:
            del self.live[chunk.request_id]
        self._check_end(name, answer)
        return answer

    def _check_end(self, name: Name, answer: Answer) -> None:
        params = answer.request.sampling
        count = len(answer.tokens)
        if answer.finish is FinishReason.ERROR:
            self.violations.append(f"{name}: ended with an error")
        if params.max_tokens is not None and (
            count > params.max_tokens
            or (answer.finish is FinishReason.LENGTH and count != params.max_tokens)
        ):
            self.violations.append(f"{name}: {count} tokens of {params.max_tokens}")
        if params.logprobs is not None and len(answer.logprobs) != count:
            self.violations.append(f"{name}: {len(answer.logprobs)} records of {count} tokens")


def difference(name: Name, found: Answer, alone: Answer) -> str | None:
    """What differs between an answer under load and alone, None: nothing."""
    if found.tokens != alone.tokens:
        same = np.array(found.tokens[: len(alone.tokens)]) == alone.tokens[: len(found.tokens)]
        return f"tokens, from {int(np.append(same, False).argmin())} of {len(alone.tokens)} on"
    if found.finish is not FinishReason.ABORT and (found.finish, found.stop) != (
        alone.finish,
        alone.stop,
    ):
        return f"end: {found.finish} {found.stop} and {alone.finish} {alone.stop}"
    if found.logprobs != alone.logprobs:
        return "log probabilities"
    # Those of the prompt come with the first chunk of choice 0.
    if name[1] == 0 and found.tokens and found.prompt_logprobs != alone.prompt_logprobs:
        return "log probabilities of the prompt"
    return None


def repeated_share(tokens: list[int]) -> float:
    """Length of the longest n-gram that occurs twice, as a share of the whole: 1/2 and more loop.

    A text that ends in a loop has one (the two may overlap); random text has a short one.
    """
    low, high = 0, max(0, len(tokens) - 1)
    while low < high:
        middle = (low + high + 1) // 2
        grams = [tuple(tokens[i : i + middle]) for i in range(len(tokens) - middle + 1)]
        low, high = (middle, high) if len(set(grams)) < len(grams) else (low, middle - 1)
    return low / len(tokens) if tokens else 0.0
