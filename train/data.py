"""Training batches: tokenised items and English, packed into rows of one length.

FORMAT (agreed with the training loop; nothing else is passed between the two):
    Batch.tokens    uint16 [rows, length]  token ids, vocabulary 8192
    Batch.weights   uint8  [rows, length]  loss weight of tokens[r, i] AS A TARGET, in sixteenths:
                                           0 = no loss (prompts, padding, first of a document),
                                           16 = weight 1. The prediction of it is made at i - 1.
    Batch.positions uint16 [rows, length]  position inside its document, 0 at each first token, so
                                           documents begin where positions == 0 (cu_seqlens of the
                                           flattened batch = flatnonzero(positions == 0), plus end).
                                           A document never crosses a row and begins at a multiple
                                           of `Plan.align`: up to there the one before ends with pad
                                           tokens without loss.
    Batch.families  uint8  [rows, length]  index into FAMILY_NAMES, for losses by family
English comes from one file that `python -m train.data english SOURCE TOKENIZER OUT train` writes.

STREAM (what the loop uses): `batches(plan, tokenizer, seed=, start=, workers=)` yields
Batch number start, start + 1, ...; batch i depends only on (plan, seed, i): resuming = start at i,
no epochs, no state. It runs generator processes on all cores.
"""

from __future__ import annotations

import itertools
import json
import lzma
import math
import multiprocessing
import os
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.eval.families import FAMILIES, draw
from headrace.eval.items import FIRST_TEST_SEED, Draw, Item
from headrace.recipe.constants import CHECKPOINT_IMAGE_SPELLING, SpecialTokens
from headrace.recipe.encoder import load_encoder
from headrace.recipe.render.v41 import render

FAMILY_NAMES = (*FAMILIES, "english")
ENGLISH = len(FAMILY_NAMES) - 1
FULL = 16  # weight 1
SPECIAL = SpecialTokens(image=CHECKPOINT_IMAGE_SPELLING)

# Shares of the tokens of tasks.
MIX: Mapping[str, float] = {
    "tools": 0.32,
    "json": 0.16,
    "arithmetic": 0.11,
    "sorting": 0.10,
    "counting": 0.07,
    "copying": 0.07,
    "recall": 0.08,
    "followups": 0.06,
    "definitions": 0.02,
    "small_talk": 0.01,
}
# Questions that stand alone: several make a conversation, with more answers for the same tokens.
CHAINED = ("arithmetic", "sorting", "counting", "copying", "definitions", "small_talk")
_LONGEST_CHAIN = 6
# For rows of 2k and more: what needs the length.
LONG_MIX: Mapping[str, float] = {**{name: share / 2 for name, share in MIX.items()}, "recall": 0.54}


@dataclass(frozen=True, slots=True)
class Plan:
    """rows, length: of a batch. mix: shares of task tokens. english: share of the rows that are
    English alone (it also fills what is left over in other rows); english_weight: loss weight of
    its tokens, in sixteenths. thinking: share of samples with thinking on. recall: tokens of the
    shortest and longest text.
    """

    length: int = 1024
    rows: int = 64
    mix: Mapping[str, float] = field(default_factory=lambda: dict(MIX))
    english: float = 0.2
    english_weight: int = 6
    thinking: float = 0.5
    recall: tuple[int, int] | None = None
    align: int = 8

    @property
    def recall_range(self) -> tuple[int, int]:
        """Tokens of the texts of recall: by default up to what a row holds."""
        return self.recall or (200, max(250, self.length - 450))


@dataclass(frozen=True, slots=True)
class Batch:
    """See the module's text."""

    tokens: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.uint8]
    positions: npt.NDArray[np.uint16]
    families: npt.NDArray[np.uint8]


class Encoder:
    """Items -> ids and loss weights, many at a time."""

    def __init__(self, tokenizer_json: Path) -> None:
        content = json.loads(tokenizer_json.read_text("utf-8"))
        self.added: dict[str, int] = {t["content"]: t["id"] for t in content["added_tokens"]}
        self._encode = load_encoder(content, str(tokenizer_json))
        self._known: dict[str, tuple[int, ...]] = {}

    def texts(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Ids of plain texts; those that come again and again are remembered."""
        known = self._known
        new = [text for text in texts if text not in known]
        fresh = dict(zip(new, self._encode(new), strict=True))
        if len(known) < 20_000:
            known.update((text, ids) for text, ids in fresh.items() if len(text) < 40)
            known.update((text, ids) for text, ids in fresh.items() if text.startswith("\n\n## "))
        return [fresh[text] if text in fresh else known[text] for text in texts]

    def items(self, items: list[Item]) -> list[tuple[list[int], list[int]]]:
        """(ids, weights) of the whole of each item, its answer and what ends it included."""
        prompts = [_whole(item) for item in items]
        regions = iter(self.texts([text for parts in prompts for text in parts[0::2]]))
        return [self._weighted(parts, regions) for parts in prompts]

    def _weighted(
        self, parts: tuple[str, ...], regions: Iterator[tuple[int, ...]]
    ) -> tuple[list[int], list[int]]:
        ids = list(next(regions))
        weights = [0] * len(ids)
        state = 0  # 0: prompt, 1: behind <Assistant>, 2: answer
        for spelling in parts[1::2]:
            ids.append(self.added[spelling])
            weights.append(FULL if state == 2 else 0)
            if spelling == SPECIAL.assistant:
                state = 1
            elif spelling == SPECIAL.eos:
                state = 0
            elif state == 1:
                state = 2
            region = next(regions)
            ids += region
            weights += [FULL if state == 2 else 0] * len(region)
        return ids, weights


def _whole(item: Item) -> tuple[str, ...]:
    """Prompt and answer as the prompt of a continuation, which is how the codec writes both."""
    messages = (*item.conversation.messages, replace(item.answer, prefix=True))
    parts = render(replace(item.conversation, messages=messages), SPECIAL).parts
    return (*parts, SPECIAL.eos, "")


def chained(items: list[Item]) -> Item:
    """One conversation that asks all questions in turn; the last answer is the expected one."""
    messages = items[0].conversation.messages
    for before, after in itertools.pairwise(items):
        said = replace(before.answer, reasoning_content=None)
        messages = (*messages, said, after.conversation.messages[-1])
    return replace(items[-1], conversation=replace(items[0].conversation, messages=messages))


@dataclass(frozen=True, slots=True)
class English:
    """Documents one behind the other; starts: where each begins, and the end."""

    tokens: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]

    @classmethod
    def load(cls, path: Path) -> English:
        """Read what `encode_english` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["tokens"], arrays["starts"])

    def chunk(self, rng: random.Random, size: int) -> list[npt.NDArray[np.uint16]]:
        """`size` tokens from somewhere, cut at the borders of documents."""
        start = rng.randrange(len(self.tokens) - size)
        inner = self.starts[(self.starts > start) & (self.starts < start + size)]
        borders = [start, *inner.tolist(), start + size]
        return [self.tokens[a:b] for a, b in itertools.pairwise(borders)]


def encode_english(source: Path, tokenizer_json: Path, out: Path, *, held_out: bool) -> None:
    """Encode the documents of `train.english`, each between BOS and EOS."""
    encoder = Encoder(tokenizer_json)
    bos, eos = encoder.added[SPECIAL.bos], encoder.added[SPECIAL.eos]
    pieces: list[npt.NDArray[np.uint16]] = []
    starts = [0]
    with lzma.open(source, "rt", encoding="utf-8") as file:
        for line in file:
            document = json.loads(line)
            if document["held_out"] == held_out:
                ids = encoder.texts([document["text"]])[0]
                pieces.append(np.array([bos, *ids, eos], np.uint16))
                starts.append(starts[-1] + len(ids) + 2)
    np.savez_compressed(out, tokens=np.concatenate(pieces), starts=np.array(starts, np.int64))
    print(f"{out}: {starts[-1] / 1e6:.2f} M tokens, {len(pieces)} documents")


class Maker:
    """Makes batches; batch i depends on plan, seed and i alone."""

    _CHUNK = 48  # items that are encoded together

    def __init__(self, plan: Plan, seed: int, tokenizer_json: Path, english: Path | None) -> None:
        self.plan = plan
        self.seed = seed
        self.encoder = Encoder(tokenizer_json)
        self.english = English.load(english) if english else None
        self.bos = self.encoder.added[SPECIAL.bos]

    def batch(self, index: int) -> Batch:
        """Batch number `index`."""
        plan = self.plan
        rng = random.Random(f"batch:{self.seed}:{index}")
        shape = (plan.rows, plan.length)
        batch = Batch(
            np.full(shape, 2, np.uint16),
            np.zeros(shape, np.uint8),
            np.zeros(shape, np.uint16),
            np.zeros(shape, np.uint8),
        )
        english_rows = 0
        if self.english:
            english_rows = math.floor(plan.rows * plan.english + rng.random())
        room = [plan.length] * plan.rows
        self._fill_with_tasks(rng, batch, room, english_rows)
        for row in rng.sample(range(plan.rows), plan.rows):
            self._fill_with_english(rng, batch, row, room[row])
        return batch

    def _fill_with_tasks(
        self, rng: random.Random, batch: Batch, room: list[int], first_row: int
    ) -> None:
        """First fit of the rows from `first_row` on, until nearly nothing fits any more."""
        open_rows = list(range(first_row, self.plan.rows))
        stream = self._items(rng)
        misses = 0
        while open_rows and misses < 12:
            family, ids, weights = next(stream)
            row = next((row for row in open_rows if room[row] >= len(ids)), None)
            if row is None:
                misses += len(ids) < self.plan.length // 3
                continue
            at = self.plan.length - room[row]
            place = (row, slice(at, at + len(ids)))
            batch.tokens[place] = ids
            batch.weights[place] = weights
            size = -(-len(ids) // self.plan.align) * self.plan.align
            place = (row, slice(at, min(at + size, self.plan.length)))
            batch.positions[place] = np.arange(place[1].stop - at)
            batch.families[place] = family
            room[row] -= place[1].stop - at
            if room[row] < 48:
                open_rows.remove(row)

    def _items(self, rng: random.Random) -> Iterator[tuple[int, list[int], list[int]]]:
        """Encoded items; the family that lacks most tokens of its share comes next."""
        mix = {name: share for name, share in self.plan.mix.items() if share > 0}
        size = dict.fromkeys(mix, 200.0)  # mean tokens of an item, learned on the way
        used = {name: rng.random() * 2000 * share for name, share in mix.items()}
        while True:
            names, items = [], []
            for _ in range(self._CHUNK):
                name = min(mix, key=lambda name: used[name] / mix[name])
                used[name] += size[name]
                names.append(name)
                items.append(self._item(rng, name))
            for name, (ids, weights) in zip(names, self.encoder.items(items), strict=True):
                used[name] += len(ids) - size[name]
                size[name] += 0.1 * (len(ids) - size[name])
                if len(ids) <= self.plan.length:
                    yield FAMILY_NAMES.index(name), ids, weights

    def _item(self, rng: random.Random, name: str) -> Item:
        low, high = self.plan.recall_range
        tokens = round(math.exp(rng.uniform(math.log(low), math.log(high))))
        options = Draw(rng.random() < self.plan.thinking, tokens, far=rng.random() < 0.2)
        item = draw(name, rng.randrange(FIRST_TEST_SEED), options)[-1]
        if name not in CHAINED or rng.random() < 0.5:
            return item
        chain = [item]
        for _ in range(rng.randrange(1, _LONGEST_CHAIN)):
            other = rng.choice(CHAINED) if rng.random() < 0.2 else name
            chain.append(draw(other, rng.randrange(FIRST_TEST_SEED), options)[-1])
        return chained(chain)

    def _fill_with_english(self, rng: random.Random, batch: Batch, row: int, room: int) -> None:
        at = self.plan.length - room
        batch.families[row, at:] = ENGLISH
        if self.english is None or room < 16:
            batch.positions[row, at:] = np.arange(room)
            return
        for piece in self.english.chunk(rng, room):
            size = min(-(-len(piece) // self.plan.align) * self.plan.align, self.plan.length - at)
            piece = piece[:size]
            place = (row, slice(at, at + len(piece)))
            batch.tokens[place] = piece
            batch.tokens[row, at] = self.bos
            batch.weights[place] = self.plan.english_weight
            batch.weights[row, at] = 0
            batch.positions[row, at : at + size] = np.arange(size)
            at += size
            if at == self.plan.length:
                break


_maker: list[Maker] = []  # of a worker process; set once by _start


def _start(*arguments: Any) -> None:
    # One thread each: the pool has a process per core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker.append(Maker(*arguments))


def _batch(index: int) -> Batch:
    return _maker[0].batch(index)


def batches(
    plan: Plan,
    tokenizer_json: Path,
    *,
    seed: int,
    english: Path | None = None,
    start: int = 0,
    workers: int = 0,
    ahead: int = 3,
) -> Iterator[Batch]:
    """Batch number `start` and all later ones, without end, made by `workers` processes.

    workers: 0 makes them in this process. ahead: batches per worker that may wait to be taken.
    """
    arguments = (plan, seed, tokenizer_json, english)
    if workers == 0:
        maker = Maker(*arguments)
        while True:
            yield maker.batch(start)
            start += 1
    # Spawned: the caller may have started CUDA, and must guard its __main__.
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start, arguments) as pool:
        waiting = deque(pool.apply_async(_batch, (start + i,)) for i in range(workers * ahead))
        start += len(waiting)
        while True:
            batch: Batch = waiting.popleft().get()
            waiting.append(pool.apply_async(_batch, (start,)))
            start += 1
            yield batch


if __name__ == "__main__":
    # english SOURCE TOKENIZER OUT HELD_OUT: see train/README.md.
    _, source, tokenizer, out, held = sys.argv[1:]
    encode_english(Path(source), Path(tokenizer), Path(out), held_out=held == "held-out")
