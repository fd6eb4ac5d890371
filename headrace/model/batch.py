"""The rows of one engine step, flattened, as the model takes them.

Sequence b owns the rows [cu_q[b], cu_q[b+1]); they continue its history at position q_start[b].
Prefill chunks and decode rows are the same thing here. Built by `engine/inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.errors import InternalError

# Rows of this slot belong to nobody: they fill a step up to a whole tile.
PADDING_SLOT = 0

# What an n-gram slot holds where there is no token: before the sequence starts.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence's share of a step.

    token_ids: all known ids of the sequence (prompt and output), int64 numpy [>= q_start + q_len].
    block_table: ids of its 128-token blocks, covering at least q_start + q_len tokens.
    slot: its ring/state slot (0 is reserved for padding). logits: "last", "all" or "none".
    window_floor: lowest position whose window rows may be read (bounded replay). write_from: rows
    below it are replayed: they write window rows only. keep_from: rows below it run through the
    producer layers only (decoder truncation), and consumer windows start there.
    """

    token_ids: np.ndarray
    q_start: int
    q_len: int
    block_table: Sequence[int]
    slot: int
    logits: str = "last"
    window_floor: int = 0
    write_from: int = 0
    keep_from: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of B sequences; S rows want logits."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    sequence: Tensor  # int64 [T], row -> b
    q_start: np.ndarray  # int64 [B]
    q_len: np.ndarray  # int64 [B]
    block_tables: Tensor  # int64 [B, M], padded with block 0
    slots: Tensor  # int64 [B]
    ngrams: Tensor  # int64 [T, G], ids newest first, NO_TOKEN before the start
    logit_rows: Tensor  # int64 [S]
    window_floor: np.ndarray  # int64 [B]
    write_from: np.ndarray  # int64 [B]
    keep_from: np.ndarray  # int64 [B]

    @property
    def total_rows(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @classmethod
    def build(cls, rows: Sequence[BatchRow], max_ngram: int = 1) -> Batch:
        """Flatten `rows` in order; `max_ngram` is G, how many ids back an n-gram looks (>= 1)."""
        q_start = np.array([r.q_start for r in rows], dtype=np.int64)
        q_len = np.array([r.q_len for r in rows], dtype=np.int64)
        sequence = np.repeat(np.arange(len(rows)), q_len)
        cu_q = np.concatenate(([0], np.cumsum(q_len)))
        positions = np.arange(cu_q[-1]) - cu_q[sequence] + q_start[sequence]
        ngrams = np.full((int(cu_q[-1]), max_ngram), NO_TOKEN, dtype=np.int64)
        for b, row in enumerate(rows):
            first = max(0, row.q_start - max_ngram + 1)
            known = np.asarray(row.token_ids[first : row.q_start + row.q_len], dtype=np.int64)
            padded = np.concatenate((np.full(max_ngram - 1, NO_TOKEN, dtype=np.int64), known))
            start = row.q_start - first + max_ngram - 1
            for back in range(max_ngram):
                ngrams[cu_q[b] : cu_q[b + 1], back] = padded[
                    start - back : start - back + row.q_len
                ]
        width = max((len(r.block_table) for r in rows), default=0)
        tables = np.zeros((len(rows), max(width, 1)), dtype=np.int64)
        for b, row in enumerate(rows):
            tables[b, : len(row.block_table)] = row.block_table
        wanted = [
            np.arange(cu_q[b] if row.logits == "all" else cu_q[b + 1] - 1, cu_q[b + 1])
            for b, row in enumerate(rows)
            if row.logits != "none"
        ]
        return cls(
            token_ids=torch.from_numpy(ngrams[:, 0].copy()),
            positions=torch.from_numpy(positions),
            sequence=torch.from_numpy(sequence),
            q_start=q_start,
            q_len=q_len,
            block_tables=torch.from_numpy(tables),
            slots=torch.tensor([r.slot for r in rows], dtype=torch.int64),
            ngrams=torch.from_numpy(ngrams),
            logit_rows=torch.from_numpy(
                np.concatenate(wanted) if wanted else np.zeros(0, dtype=np.int64)
            ),
            window_floor=np.array([r.window_floor for r in rows], dtype=np.int64),
            write_from=np.array([r.write_from for r in rows], dtype=np.int64),
            keep_from=np.array([r.keep_from for r in rows], dtype=np.int64),
        )

    def consumer_view(self) -> Batch:
        """The same rows as the consumer layers see them: their windows start at `keep_from`."""
        return replace(self, window_floor=np.maximum(self.window_floor, self.keep_from))

    def kept(self, row_tile: int) -> tuple[Batch, Tensor] | None:
        """Rows at or after `keep_from` as a batch of their own, with their row numbers [n] here.

        None where all rows are kept. Sequences without kept rows drop out. With `row_tile` > 1
        rows of the padding sequence (slot 0) are replaced by as many as fill the last tile.
        """
        first = np.maximum(self.keep_from, self.q_start)
        length = np.clip(self.q_start + self.q_len - first, 0, None)
        if (length == self.q_len).all():
            return None
        owned = self.slots.numpy() != PADDING_SLOT
        members = np.flatnonzero((length > 0) & owned)
        cu = np.concatenate(([0], np.cumsum(self.q_len)))
        ends = cu[1:][members]
        counts = length[members]
        rows = np.concatenate(
            [np.arange(e - n, e) for e, n in zip(ends, counts, strict=True)]
            or [np.zeros(0, dtype=np.int64)]
        )
        padding = -len(rows) % row_tile
        new_row = np.full(self.total_rows, -1)
        new_row[rows] = np.arange(len(rows))
        logit_rows = new_row[self.logit_rows.numpy()]
        if (logit_rows < 0).any():
            raise InternalError("A row that wants logits lies before keep_from.")
        source = torch.from_numpy(np.concatenate((rows, np.zeros(padding, dtype=np.int64))))
        sequences = torch.from_numpy(members)
        pad = 1 if padding else 0

        def per_sequence(values: np.ndarray, last: int = 0) -> np.ndarray:
            return np.concatenate((values[members], np.full(pad, last, dtype=np.int64)))

        places = torch.arange(padding)
        owner = torch.from_numpy(np.repeat(np.arange(len(members)), counts))
        batch = Batch(
            token_ids=self.token_ids[source],
            positions=torch.cat((self.positions[rows], places)),
            sequence=torch.cat((owner, torch.full((padding,), len(members)))),
            q_start=per_sequence(first),
            q_len=per_sequence(length, padding),
            block_tables=torch.nn.functional.pad(self.block_tables[sequences], (0, 0, 0, pad)),
            slots=torch.nn.functional.pad(self.slots[sequences], (0, pad)),
            ngrams=self.ngrams[source],
            logit_rows=torch.from_numpy(logit_rows),
            window_floor=per_sequence(np.maximum(self.window_floor, self.keep_from)),
            write_from=per_sequence(self.write_from),
            keep_from=per_sequence(self.keep_from),
        )
        return batch, source
