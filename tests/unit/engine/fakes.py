"""A model whose logits depend on every cache row it should read, and an oracle without an engine.

`FakeModel` writes (token, position) of each row into real cache memory: a paged group through the
block table and a ring through the slot. The logits of a row are random numbers seeded by a hash of
all it reads back. A wrong block, slot, position, chunk border or n-gram changes them completely;
`answer_alone` computes the right ones from the tokens only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core.kv import GroupKind, KVGroupSpec, RecordFormat
from headrace.core.protocols import Detokenizer
from headrace.core.sampling import SamplingParams
from headrace.kv.cache import KVCache
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import NO_TOKEN, Batch
from headrace.ops.numerics import Numerics
from tests.unit.engine.sampling_rows import Row, tokens_of

VOCAB = 50
EOS = 1
NAN_TOKEN = 13  # a history that starts with it has NaN logits
WINDOW = 5
BACKTRACK = 6  # rows that may be taken back: five drafts and the one before them
RING = WINDOW + BACKTRACK
NGRAM = 3


@dataclass(frozen=True)
class FakeSpec:
    vocab_size: int = VOCAB
    hidden: int = 2
    bos_id: int = 0
    eos_id: int = EOS
    max_position: int = 2000

    def truncation_refusal(self) -> str | None:
        return "the fake model has one layer"

    def replay_refusal(self) -> str | None:
        return None

    def keep(self, truncate: bool) -> int:
        return 1

    def replay_rows(self, mode: str, truncate: bool) -> int:
        return 128 if mode == "exact" else WINDOW


def logits_of(tokens: np.ndarray, positions: np.ndarray, ring: np.ndarray, ngram: np.ndarray):
    """[VOCAB] fp64 of one row from what it reads."""
    if tokens[0] == NAN_TOKEN:
        return np.full(VOCAB, np.nan)
    parts = (tokens, positions, ring, ngram)
    content = b"".join(np.ascontiguousarray(part, dtype=np.int64).tobytes() for part in parts)
    seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
    return np.random.default_rng(seed).normal(0.0, 2.0, VOCAB)


class FakeModel:
    """Implements `ModelLike`."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.spec = FakeSpec()
        self.numerics = Numerics(dtype="float64", kv_quant=False, batch_invariant=batch_invariant)
        self.max_ngram = NGRAM
        self.rows_per_step: list[int] = []
        self.sequences_per_step: list[int] = []
        self.fail_next: BaseException | None = None
        self._poisoned = False

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return (
            KVGroupSpec("history", GroupKind.PAGED, (0,), 2, RecordFormat.PLAIN),
            KVGroupSpec(
                "window", GroupKind.RING, (0,), 2, RecordFormat.PLAIN, rows=RING, window=WINDOW
            ),
        )

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        if not self._poisoned:
            cache.poison()
            self._poisoned = True
        self.rows_per_step.append(batch.total_rows)
        self.sequences_per_step.append(len(batch.q_len))
        history = cache.view("history", 0).data
        ring = cache.view("window", 0).data
        wanted = set(batch.logit_rows.tolist())
        logits = []
        for row in range(batch.total_rows):
            sequence = int(batch.sequence[row])
            position = int(batch.positions[row])
            table, slot = batch.block_tables[sequence], int(batch.slots[sequence])
            entry = torch.tensor([int(batch.token_ids[row]), position], dtype=history.dtype)
            if position >= batch.write_from[sequence]:
                history[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = entry
            ring[slot, position % RING] = entry
            if row in wanted:
                seen = torch.arange(position + 1)
                read = history[table[seen // BLOCK_TOKENS], seen % BLOCK_TOKENS].numpy()
                lowest = max(0, position - WINDOW + 1, int(batch.window_floor[sequence]))
                near = np.arange(lowest, position + 1)
                logits.append(
                    logits_of(
                        read[:, 0],
                        read[:, 1],
                        ring[slot].numpy()[near % RING],
                        batch.ngrams[row].numpy(),
                    )
                )
        return torch.from_numpy(np.array(logits).reshape(-1, VOCAB))


def expected_logits(tokens: Sequence[int]) -> np.ndarray:
    """Logits [VOCAB] after `tokens`, from the tokens alone."""
    ids = np.array(tokens)
    positions = np.arange(len(ids))
    ring = np.stack((ids, positions), axis=1)[-WINDOW:]
    ngram = np.concatenate((np.full(NGRAM, NO_TOKEN), ids))[-NGRAM:][::-1]
    return logits_of(ids, positions, ring, ngram)


def answer_alone(prompt: Sequence[int], params: SamplingParams, max_model_len: int = 2000):
    """The output ids that an engine must give; the seed must be set unless greedy."""
    tokens = list(prompt)
    limit = max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    while len(tokens) < limit:
        logits = torch.from_numpy(expected_logits(tokens))[None]
        row = Row(params, params.seed or 0, prompt, tokens[len(prompt) :])
        (token,) = tokens_of(logits, [row])
        tokens.append(token)
        stopped = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if stopped:
            break
    return tuple(tokens[len(prompt) :])


class FakeDetokenizer(Detokenizer):
    """Every pair of ids becomes one letter pair, so text lags behind ids."""

    def __init__(self) -> None:
        self._rest: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._rest += token_ids
        whole = len(self._rest) // 2 * 2
        ready, self._rest = self._rest[:whole], self._rest[whole:]
        return "".join(chr(65 + token) for token in ready)

    def flush(self) -> str:
        return "".join(chr(65 + token) for token in self._rest)

    def copy(self) -> FakeDetokenizer:
        twin = FakeDetokenizer()
        twin._rest = list(self._rest)
        return twin


class FakeTokenizer:
    """Ids are letters counted from "A"."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 65 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    def detokenizer(self) -> FakeDetokenizer:
        return FakeDetokenizer()
