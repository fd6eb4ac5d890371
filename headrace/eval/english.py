"""Perplexity on held-out English by the length of the context.

Contract: the same tokens, the last of every piece, are predicted from contexts of every length, so
that the numbers differ by the context alone. Exact: all layers on all rows, no prefix cache. Used
by `headrace eval tiny`.
"""

from __future__ import annotations

import itertools
import json
import lzma
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from headrace.assets import embedded_model
from headrace.kv.cache import KVCache
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.recipe.tokenizer import Tokenizer

LENGTHS = (512, 1024, 2048, 4096, 8192)
TARGETS = 256
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Loss:
    """Summed negative log-likelihood (nats) of `tokens` tokens of one piece after `length`."""

    length: int
    piece: int
    source: str
    loss: float
    tokens: int


@cache
def held_out() -> tuple[tuple[str, str], ...]:
    """(source, text) of the pieces, each a little over the greatest length."""
    path = embedded_model() / "held-out.jsonl.xz"
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    return tuple((entry["source"], entry["text"]) for entry in map(json.loads, lines))


def losses(
    model: Model,
    tokenizer: Tokenizer,
    piece: int,
    bos: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Loss]:
    """The losses of one piece at all lengths."""
    source, text = held_out()[piece]
    ids = tokenizer.encode(text)[: max(LENGTHS) - 1]
    result = []
    for length in LENGTHS:
        # The first token of every document is the same, also in training.
        context = [bos, *ids[len(ids) - length + 1 :]]
        result.append(Loss(length, piece, source, tail_loss(model, context, TARGETS), TARGETS))
        progress()
    return result


def tail_loss(model: Model, ids: Sequence[int], targets: int) -> float:
    """Summed loss of the last `targets` ids, each predicted from all before it."""
    blocks = -(-len(ids) // BLOCK_TOKENS)
    cache_ = KVCache(
        model.kv_groups(), num_blocks=blocks + 1, num_slots=2, dtype=model.numerics.torch_dtype
    )
    tokens = np.array(ids, np.int64)
    table = list(range(1, blocks + 1))
    first = len(ids) - targets - 1  # the row that predicts the first target
    borders = [*range(0, first, _CHUNK), first, len(ids) - 1]
    logits = torch.empty(0)
    with torch.inference_mode():
        for start, end in itertools.pairwise(borders):
            wanted = "all" if start == first else "none"
            row = BatchRow(tokens, start, end - start, table, 1, wanted)
            logits = model.forward(Batch.build([row], model.max_ngram), cache_)
        expected = torch.from_numpy(tokens[-targets:])
        return float(torch.nn.functional.cross_entropy(logits, expected, reduction="sum"))


def perplexities(found: Sequence[Loss]) -> dict[int, float]:
    """Length -> perplexity over all pieces."""
    result = {}
    for length in LENGTHS:
        of_length = [loss for loss in found if loss.length == length]
        if of_length:
            tokens = sum(loss.tokens for loss in of_length)
            result[length] = math.exp(sum(loss.loss for loss in of_length) / tokens)
    return result
