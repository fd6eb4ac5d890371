"""A step plan as the model takes it.

Contract: `build_batch` turns the shares of a plan into rows of a `Batch`, in order, so that logit
row i belongs to sampling share i. With `row_multiple` the step is filled up with rows of a padding
sequence in block 0 and slot 0, which no request owns. Called by `engine/engine.py`.
"""

from __future__ import annotations

import numpy as np

from headrace.engine.scheduler import StepPlan, StepShare
from headrace.model.batch import Batch, BatchRow

# Fixed-tile operators want whole tiles of rows; the padding sequence must fit into block 0.
INVARIANT_ROW_MULTIPLE = 32


def build_batch(plan: StepPlan, *, max_ngram: int, row_multiple: int = 1) -> Batch:
    """Rows of `plan`, padded to a multiple of `row_multiple`; max_ngram as in `Batch.build`."""
    rows = [_batch_row(share) for share in plan.shares]
    padding = -plan.total_rows % row_multiple
    if padding:
        rows.append(padding_row(padding))
    return Batch.build(rows, max_ngram)


def padding_row(rows: int) -> BatchRow:
    """`rows` rows that belong to nobody and want no logits."""
    return BatchRow(
        token_ids=np.zeros(rows, dtype=np.int64),
        q_start=0,
        q_len=rows,
        block_table=[0],
        slot=0,
        logits="none",
    )


def _batch_row(share: StepShare) -> BatchRow:
    return BatchRow(
        token_ids=share.sequence.tokens,
        q_start=share.q_start,
        q_len=share.q_len,
        block_table=share.block_table.tolist(),
        slot=share.slot,
        logits="last" if share.samples else "none",
    )
