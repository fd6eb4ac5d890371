"""The shares of a step as the model takes them.

Contract: `build_batch` turns shares into rows of a `Batch`, in order, by array operations over all
rows at once. With `row_multiple` the step is filled up with rows of table row 0: a sequence of
zeros in block 0 and slot 0, which no request owns. Called by `engine/executor.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.plan import Ints, Tokens
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import NO_TOKEN, Batch

# Fixed-tile operators want whole tiles of rows; the padding sequence must fit into block 0.
INVARIANT_ROW_MULTIPLE = 32


@dataclass(slots=True, eq=False)
class Shares:
    """Rows [q_start, q_start + q_len) of B requests, as they really run; int64 [B] each.

    rows: table rows. logits: how many of the last rows give logits. window_floor, write_from,
    keep_from: as in `model.batch.BatchRow`. block_tables: int32 [B, M], wide enough for all rows.
    """

    rows: Ints
    q_start: Ints
    q_len: Ints
    logits: Ints
    window_floor: Ints
    write_from: Ints
    keep_from: Ints
    block_tables: npt.NDArray[np.int32]

    def at(self, places: Ints) -> Shares:
        """Those at `places`, int64 [n]."""
        return Shares(*(getattr(self, name)[places] for name in Shares.__slots__))

    def padded(self, rows: int) -> Shares:
        """The same and one share of table row 0 with so many rows, of which nobody wants logits."""
        last = dict.fromkeys(_COLUMNS, 0) | {"q_len": rows}
        columns = {name: np.append(getattr(self, name), last[name]) for name in _COLUMNS}
        tables = np.append(self.block_tables, np.zeros_like(self.block_tables[:1]), axis=0)
        return Shares(**columns, block_tables=tables)


_COLUMNS = tuple(name for name in Shares.__slots__ if name != "block_tables")


def build_batch(shares: Shares, tokens: Tokens, *, max_ngram: int, row_multiple: int = 1) -> Batch:
    """Rows of at least one share, padded to a multiple of `row_multiple`.

    tokens: int32 [num_rows, >= INVARIANT_ROW_MULTIPLE], known ids and drafts by table row.
    max_ngram: how many ids back an n-gram looks, at least 1.
    """
    padding = -int(shares.q_len.sum()) % row_multiple
    if padding:
        shares = shares.padded(padding)
    rows, q_start, q_len = shares.rows, shares.q_start, shares.q_len
    ends = q_len.cumsum()
    if ends[-1] == rows.size:  # one row each
        sequence = np.arange(rows.size, dtype=np.int64)
        positions = q_start.copy()
    else:
        sequence = np.arange(rows.size, dtype=np.int64).repeat(q_len)
        positions = np.arange(ends[-1], dtype=np.int64) + (q_start - ends + q_len)[sequence]
    ngrams = _ngrams(tokens, rows[sequence], positions, max_ngram)
    width = -(-int((q_start + q_len).max()) // BLOCK_TOKENS)
    return Batch(
        token_ids=torch.from_numpy(ngrams[:, 0].copy()),
        positions=torch.from_numpy(positions),
        sequence=torch.from_numpy(sequence),
        q_start=q_start,
        q_len=q_len,
        block_tables=torch.from_numpy(shares.block_tables[:, :width].astype(np.int64)),
        slots=torch.from_numpy(rows.copy()),
        ngrams=torch.from_numpy(ngrams),
        logit_rows=torch.from_numpy(last_rows(ends, shares.logits)),
        window_floor=shares.window_floor,
        write_from=shares.write_from,
        keep_from=shares.keep_from,
    )


def last_rows(ends: Ints, counts: Ints) -> Ints:
    """The last counts[b] numbers before ends[b], for each b in order: int64 [sum of counts]."""
    last = counts.cumsum()
    share = np.arange(counts.size).repeat(counts)
    rows: Ints = np.arange(share.size, dtype=np.int64) + (ends - last)[share]
    return rows


def _ngrams(tokens: Tokens, rows: Ints, positions: Ints, max_ngram: int) -> Ints:
    """Ids at and before each position, newest first, int64 [T, max_ngram]."""
    back = positions[:, None] - np.arange(max_ngram)
    ids: Ints = tokens[rows[:, None], np.maximum(back, 0)].astype(np.int64)
    if max_ngram > 1:
        ids[back < 0] = NO_TOKEN
    return ids
