"""A step plan as the model takes it.

Contract: `build_batch` turns the shares of a plan into rows of a `Batch`, in order, by array
operations over all rows at once. With `row_multiple` the step is filled up with rows of table row
0: a sequence of zeros in block 0 and slot 0, which no request owns. Called by `engine/engine.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.plan import Ints, StepPlan, Tokens
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import NO_TOKEN, Batch

# Fixed-tile operators want whole tiles of rows; the padding sequence must fit into block 0.
INVARIANT_ROW_MULTIPLE = 32


def build_batch(
    plan: StepPlan,
    tokens: Tokens,
    block_tables: npt.NDArray[np.int32],
    *,
    max_ngram: int,
    row_multiple: int = 1,
) -> Batch:
    """Rows of `plan`, padded to a multiple of `row_multiple`.

    tokens: int32 [num_rows, >= INVARIANT_ROW_MULTIPLE], known ids by table row. block_tables: int32
    [num_rows, max_blocks]. max_ngram: how many ids back an n-gram looks, at least 1.
    """
    padding = -plan.total_rows % row_multiple
    rows, q_start, q_len = plan.rows, plan.q_start, plan.q_len
    window_floor, write_from, keep_from = plan.window_floor, plan.write_from, plan.keep_from
    if padding:
        rows, q_start = _with(rows, 0), _with(q_start, 0)
        q_len = _with(q_len, padding)
        window_floor, write_from = _with(window_floor, 0), _with(write_from, 0)
        keep_from = _with(keep_from, 0)
    ends = q_len.cumsum()
    if plan.decodes == rows.size:  # one row each
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
        block_tables=torch.from_numpy(block_tables[rows, :width].astype(np.int64)),
        slots=torch.from_numpy(rows.copy()),
        ngrams=torch.from_numpy(ngrams),
        logit_rows=torch.from_numpy(_logit_rows(plan, ends[: plan.rows.size])),
        window_floor=window_floor,
        write_from=write_from,
        keep_from=keep_from,
    )


def logits_per_share(plan: StepPlan) -> Ints:
    """Logit rows of each share of a plan, int64 [B]: all of them, the last one or none."""
    counts: Ints = plan.samples.astype(np.int64)
    if plan.all_logits is not None:
        counts = np.where(plan.all_logits, plan.q_len, counts)
    return counts


def _ngrams(tokens: Tokens, rows: Ints, positions: Ints, max_ngram: int) -> Ints:
    """Ids at and before each position, newest first, int64 [T, max_ngram]."""
    back = positions[:, None] - np.arange(max_ngram)
    ids: Ints = tokens[rows[:, None], np.maximum(back, 0)].astype(np.int64)
    if max_ngram > 1:
        ids[back < 0] = NO_TOKEN
    return ids


def _logit_rows(plan: StepPlan, ends: Ints) -> Ints:
    if plan.decodes == plan.rows.size:
        return np.subtract(ends, 1)
    counts = logits_per_share(plan)
    last = counts.cumsum()
    share = np.arange(plan.rows.size).repeat(counts)
    rows: Ints = np.arange(share.size, dtype=np.int64) + (ends - last)[share]
    return rows


def _with(values: Ints, last: int) -> Ints:
    return np.append(values, np.int64(last))
