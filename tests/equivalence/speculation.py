"""Scripted drafters, requests that end in all ways, and combinations of settings, for the tests of
speculation and of the overlapped loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.request import Request
from headrace.engine.engine import Engine
from headrace.engine.speculation.drafts import DraftRequest, Proposal
from headrace.kv.cache import KVCache
from headrace.model.tiny import write_tiny
from tests.unit.engine.fakes import FakeDetokenizer, FakeTokenizer

DRAFTS = 5
Streams = Mapping[tuple[str, int], Sequence[int]]  # output ids by (request id, choice)


class Oracle:
    """A drafter that knows the answers.

    kind: perfect (always right), wrong (never), mixed (right up to a place that depends on the
    position), noise (whatever the numbers give).
    """

    def __init__(
        self, kind: str, length: int, vocab_size: int, known: Sequence[Sequence[int]]
    ) -> None:
        """known: full token lists (prompt and answer)."""
        self.kind, self.length, self._vocab_size = kind, length, vocab_size
        self._known = [np.array(tokens, dtype=np.int64) for tokens in known]

    def draft(self, request: DraftRequest, cache: KVCache) -> Proposal:
        ids = np.zeros((request.rows.size, self.length), dtype=np.int64)
        features = np.zeros((request.rows.size, self.length))
        for place, (row, length) in enumerate(
            zip(request.rows.tolist(), request.lengths.tolist(), strict=True)
        ):
            ids[place] = self._following(request.tokens[row, :length])
            rng = np.random.default_rng([length, 5])
            features[place] = rng.normal(2.0, 2.0, self.length)
        return Proposal(ids, features)

    def _following(self, tokens: np.ndarray) -> np.ndarray:
        after = np.zeros(self.length, dtype=np.int64)
        for known in self._known:
            if len(known) >= len(tokens) and np.array_equal(known[: len(tokens)], tokens):
                found = known[len(tokens) : len(tokens) + self.length]
                after[: len(found)] = found
                break
        right = self.length
        if self.kind == "wrong":
            right = 0
        elif self.kind == "mixed":
            right = len(tokens) % (self.length + 1)
        elif self.kind == "noise":
            rng = np.random.default_rng([len(tokens), int(tokens[-1])])
            return rng.integers(0, self._vocab_size, self.length)
        after[right:] = (after[right:] + 1) % self._vocab_size
        return after


def tiny_with_drafts(directory: Path, seed: int = 1) -> Path:
    """tiny-8 with a draft block of five: no tensor depends on that."""
    write_tiny(directory, preset="tiny-8", seed=seed)
    config = json.loads((directory / "config.json").read_text())
    text = json.dumps(config).replace('"dspark_block_size": 3', f'"dspark_block_size": {DRAFTS}')
    (directory / "config.json").write_text(text)
    return directory


class LetterDetokenizer(FakeDetokenizer):
    """Every id is a letter at once, so that a stop string can end at any token."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    def copy(self) -> LetterDetokenizer:
        return LetterDetokenizer()


class LetterTokenizer(FakeTokenizer):
    def detokenizer(self) -> LetterDetokenizer:
        return LetterDetokenizer()


@dataclass
class Answers:
    """What came out. ends: (finish, stop) by choice; last_places: how far into the tokens of its
    last step each answer ended."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], tuple[Any, Any]] = field(default_factory=dict)
    last_places: dict[tuple[str, int], int] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """last_places depend on the drafts."""
        return isinstance(other, Answers) and (self.tokens, self.ends) == (other.tokens, other.ends)


def serve(
    engine: Engine,
    requests: Sequence[Request],
    *,
    arrive_every: int = 0,
    preempt: Mapping[int, str] | None = None,
) -> Answers:
    """All answers. arrive_every: steps between arrivals. preempt: step -> request id."""
    answers = Answers()
    waiting = list(requests)
    step = 0
    while waiting or engine.has_work():
        while waiting and (not arrive_every or step % arrive_every == 0):
            engine.add(waiting.pop(0))
            if arrive_every:
                break
        places: dict[tuple[str, int], int] = {}
        for chunk in engine.step():
            name = chunk.request_id, chunk.choice
            stream = answers.tokens.setdefault(name, [])
            assert chunk.index == len(stream) and name not in answers.ends
            stream += chunk.tokens
            places[name] = places.get(name, -1) + 1
            if chunk.finish is not None:
                answers.ends[name] = chunk.finish, chunk.stop
                answers.last_places[name] = places[name]
        step += 1
        if preempt and step in preempt:
            engine.scheduler.preempt(preempt[step], 0.0)
    stats = engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.total_blocks, 0, 0)
    return answers


def covering(
    dimensions: Mapping[str, Sequence[Any]], seed: int = 0, strength: int = 2
) -> list[dict[str, Any]]:
    """Settings in which every pair of values of two dimensions occurs, chosen greedily."""
    names = list(dimensions)
    everything = list(product(*(range(len(dimensions[name])) for name in names)))
    groups = list(combinations(range(len(names)), strength))
    missing = {(g, tuple(one[i] for i in g)) for one in everything for g in groups}
    rng = np.random.default_rng(seed)
    rng.shuffle(everything)  # type: ignore[arg-type]
    chosen = []
    while missing:
        best = max(
            everything,
            key=lambda one: sum((g, tuple(one[i] for i in g)) in missing for g in groups),
        )
        missing -= {(g, tuple(best[i] for i in g)) for g in groups}
        chosen.append({name: dimensions[name][i] for name, i in zip(names, best, strict=True)})
    return chosen
