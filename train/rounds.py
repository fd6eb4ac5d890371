"""Speculative decoding straight on model and draft module: what a round drafts and what holds.

A small loop over `Model.forward` and `Model.draft`, without the engine's scheduler: every draft is
verified, so that all outcomes are known. What a chat answers depends on its seed alone under
`gumbel` and greedily, whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kv.cache import KVCache
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.dspark import Drafts
from headrace.model.deepseek.model import Model
from train.draft_forward import draft_spec

Coupling = Literal["gumbel", "maximal"]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Chat:
    """A question: prompt ids, the most tokens of its answer, the seed of its random numbers."""

    family: str
    prompt: tuple[int, ...]
    limit: int
    seed: int


@dataclass(frozen=True, slots=True)
class Round:
    """One decode round. emitted: tokens that a client gets of it, at most 1 + drafts. ended: it
    ended the answer, which cuts what counts.

    accepted bool [n]: whether the draft at a place and all before it were. observed bool [n]: the
    answer was not over before that place. confidence [n]: before sigmoid and temperature. overlap
    [n]: 1 - TV of draft and target at that place, given the drafts before it.
    """

    family: str
    emitted: int
    ended: bool
    accepted: NDArray[np.bool_]
    observed: NDArray[np.bool_]
    confidence: Numbers
    overlap: Numbers


@dataclass(slots=True)
class _Playing:
    """A chat in a slot. ids: prompt and answer, room for drafts behind; known: tokens that are
    certain, the last of which is not in the cache yet. drafts [n], weights [n, V]."""

    chat: Chat
    slot: int
    ids: NDArray[np.int64]
    known: int
    drafts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    weights: Numbers = field(default_factory=lambda: np.zeros((0, 0)))
    confidence: Numbers = field(default_factory=lambda: np.zeros(0))
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    @property
    def left(self) -> int:
        """Tokens that the answer may still have."""
        return len(self.chat.prompt) + self.chat.limit - self.known


def noise(seed: int, position: int, vocabulary: int) -> Numbers:
    """Gumbel noise [V] of the token at an absolute position."""
    key = np.array([seed, position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).gumbel(size=vocabulary)


def probabilities(logits: Tensor, temperature: float) -> Numbers:
    """fp64 [n, V]; at temperature 0 all on the lowest id of the highest logits."""
    if temperature == 0.0:
        p = torch.zeros(logits.shape, dtype=torch.float64)
        p.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    else:
        p = torch.softmax(logits.double() / temperature, -1)
    return np.asarray(p.numpy())


class Player:
    """Plays chats on one model, `batch` at a time."""

    def __init__(
        self, model: Model, temperature: float, coupling: Coupling = "gumbel", batch: int = 16
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.coupling = coupling
        self.batch = batch
        self.count = draft_spec(model.spec).block_size
        # Prompts are cut as an engine cuts them.
        self.keep = model.spec.keep(model.spec.truncation_refusal() is None)

    def play(self, chats: Sequence[Chat]) -> Iterator[Round]:
        """All rounds of all chats, in no fixed order."""
        longest = max(len(chat.prompt) + chat.limit for chat in chats) + self.count + 1
        blocks = -(-longest // BLOCK_TOKENS)
        cache = KVCache(
            self.model.kv_groups(),
            num_blocks=self.batch * blocks + 1,
            num_slots=self.batch + 1,
            dtype=self.model.numerics.torch_dtype,
        )
        waiting, playing = list(chats)[::-1], list[_Playing]()
        free = list(range(1, self.batch + 1))
        while waiting or playing:
            fresh = []
            while waiting and free:
                chat = waiting.pop()
                ids = np.zeros(longest, np.int64)
                ids[: len(chat.prompt)] = chat.prompt
                rng = np.random.default_rng(chat.seed)
                fresh.append(_Playing(chat, free.pop(), ids, len(chat.prompt), rng=rng))
            rows = [self._row(one, blocks, one not in fresh) for one in (*playing, *fresh)]
            logits = self.model.forward(Batch.build(rows, self.model.max_ngram), cache)
            parts = list(logits.split([1 + self.count] * len(playing) + [1] * len(fresh)))
            for one, part in zip(playing, parts, strict=False):
                yield self._verify(one, part)
            for one, part in zip(fresh, parts[len(playing) :], strict=True):
                self._append(one, [self._draw(one, probabilities(part, self.temperature)[0])])
            playing += fresh
            for one in [x for x in playing if self._over(x)]:
                playing.remove(one)
                free.append(one.slot)
            if playing:
                self._draft(playing, cache)

    def _row(self, one: _Playing, blocks: int, decodes: bool) -> BatchRow:
        table = range((one.slot - 1) * blocks + 1, one.slot * blocks + 1)
        prompt = len(one.chat.prompt)
        keep = max(0, prompt - self.keep) if self.keep > 1 else 0
        if not decodes:
            return BatchRow(one.ids, 0, prompt, table, one.slot, "last", keep_from=keep)
        start, n = one.known - 1, self.count
        one.ids[one.known : one.known + n] = one.drafts
        return BatchRow(one.ids, start, 1 + n, table, one.slot, "all", keep_from=keep)

    def _over(self, one: _Playing) -> bool:
        ended = one.ids[one.known - 1] == self.model.spec.eos_id
        return bool(ended) or one.left <= 0

    def _append(self, one: _Playing, tokens: Sequence[int]) -> None:
        one.ids[one.known : one.known + len(tokens)] = tokens
        one.known += len(tokens)

    # --- drafting and verification -------------------------------------------------------------

    def _draft(self, playing: list[_Playing], cache: KVCache) -> None:
        """New drafts for all, behind their last known token."""
        weights: list[Numbers] = []

        def pick(place: int, logits: Tensor) -> Tensor:
            q = probabilities(logits, self.temperature)
            weights.append(q)
            drawn = [self._draw(one, row, place) for one, row in zip(playing, q, strict=True)]
            return torch.tensor(drawn)

        drafts: Drafts = self.model.draft(
            torch.tensor([int(one.ids[one.known - 1]) for one in playing]),
            torch.tensor([one.known - 1 for one in playing]),
            torch.tensor([one.slot for one in playing]),
            cache,
            pick=pick,
        )
        for number, one in enumerate(playing):
            one.drafts = drafts.token_ids[number, 1:].numpy()
            one.weights = np.stack([q[number] for q in weights])
            one.confidence = drafts.confidence[number].double().numpy()

    def _draw(self, one: _Playing, p: Numbers, ahead: int = 0) -> int:
        """A token of the distribution p [V], for the place `ahead` tokens behind the known ones."""
        if self.temperature == 0.0:
            return int(p.argmax())
        if self.coupling == "maximal":
            return int(one.rng.choice(len(p), p=p))
        with np.errstate(divide="ignore"):
            return int((np.log(p) + noise(one.chat.seed, one.known + ahead, len(p))).argmax())

    def _verify(self, one: _Playing, logits: Tensor) -> Round:
        """Check the drafts against logits [1 + n, V]; the answer goes on by what holds."""
        n, eos = self.count, self.model.spec.eos_id
        p = probabilities(logits, self.temperature)
        overlap = np.minimum(p[:n], one.weights).sum(-1)
        tokens: list[int] = []
        for place in range(n + 1):
            token = self._target(one, p[place], place)
            tokens.append(token)
            if place == n or token != one.drafts[place]:
                break
        held = len(tokens) - 1
        over = tokens.index(eos) if eos in tokens else n
        emitted = tokens[: min(over + 1, one.left)]
        places = np.arange(n)
        found = Round(
            family=one.chat.family,
            emitted=len(emitted),
            ended=len(emitted) < len(tokens) or tokens[-1] == eos or one.left <= len(tokens),
            accepted=places < held,
            observed=places <= over,
            confidence=one.confidence,
            overlap=overlap,
        )
        self._append(one, emitted)
        return found

    def _target(self, one: _Playing, p: Numbers, place: int) -> int:
        """The token that stands at this place: the draft where it is accepted."""
        if self.temperature == 0.0 or self.coupling == "gumbel" or place == self.count:
            return self._draw(one, p, place)
        draft, q = int(one.drafts[place]), one.weights[place]
        if one.rng.random() * q[draft] < p[draft]:
            return draft
        rest = np.maximum(p - q, 0.0)
        mass = rest.sum()
        return int(one.rng.choice(len(p), p=rest / mass if mass > 0 else p))
