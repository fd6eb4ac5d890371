"""The batch of a step: the same as `Batch.build` makes of its shares one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.inputs import Shares, build_batch
from headrace.model.batch import Batch, BatchRow

RANDOM = np.random.default_rng(3)
TOKENS = RANDOM.integers(1, 900, (9, 600)).astype(np.int32)
TOKENS[0] = 0
TABLES = RANDOM.integers(1, 99, (9, 5)).astype(np.int32)
TABLES[0] = 0


def column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def shares_of(shares: list[tuple[int, int, int]]) -> Shares:
    """(q_start, q_len, logits) of rows 8, 7, ..."""
    start = column([share[0] for share in shares])
    rows = column(list(range(8, 8 - len(shares), -1)))
    return Shares(
        rows=rows,
        q_start=start,
        q_len=column([share[1] for share in shares]),
        logits=column([share[2] for share in shares]),
        window_floor=start // 2,
        write_from=start // 3,
        keep_from=start // 4,
        block_tables=TABLES[rows],
    )


def one_by_one(shares: Shares, max_ngram: int, row_multiple: int) -> Batch:
    """Without the numbers of the rows that give logits: `BatchRow` knows all, last and none."""
    rows = [
        BatchRow(
            TOKENS[row].astype(np.int64),
            int(shares.q_start[share]),
            int(shares.q_len[share]),
            TABLES[row].tolist(),
            row,
            "none",
            int(shares.window_floor[share]),
            int(shares.write_from[share]),
            int(shares.keep_from[share]),
        )
        for share, row in enumerate(shares.rows.tolist())
    ]
    ends = shares.q_len.cumsum().tolist()
    wanted = [
        row
        for end, count in zip(ends, shares.logits.tolist(), strict=True)
        for row in range(end - count, end)
    ]
    if padding := -ends[-1] % row_multiple:
        rows.append(BatchRow(np.zeros(padding, dtype=np.int64), 0, padding, [0], 0, "none"))
    return replace(Batch.build(rows, max_ngram), logit_rows=torch.tensor(wanted, dtype=torch.int64))


def assert_same(ours: Batch, wanted: Batch) -> None:
    for name in Batch.__slots__:
        a, b = getattr(ours, name), getattr(wanted, name)
        if name == "block_tables":
            # Ours is as wide as the longest share of the step needs.
            needed = -(-int((ours.q_start + ours.q_len).max()) // 128)
            assert a.shape[1] == needed
            b = b[:, :needed]
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), name
        else:
            assert a.dtype == b.dtype and np.array_equal(a, b), name


@st.composite
def shares(draw: st.DrawFn) -> Shares:
    """Chunks, decode rows with and without drafts; all, some, one or none of their logits."""
    found = []
    for _ in range(draw(st.integers(1, 7))):
        length = draw(st.sampled_from([1, 1, 1, 2, 6, 31, 70]))
        count = draw(st.sampled_from([0, 1, min(2, length), length]))
        found.append((draw(st.integers(0, 500)), length, count))
    return shares_of(found)


@settings(max_examples=80, deadline=None)
@given(shares(), st.integers(1, 4), st.sampled_from([1, 32]))
def test_shares_of_all_kinds(found: Shares, max_ngram: int, multiple: int) -> None:
    ours = build_batch(found, TOKENS, max_ngram=max_ngram, row_multiple=multiple)
    assert_same(ours, one_by_one(found, max_ngram, multiple))


@pytest.mark.parametrize("multiple", [1, 4, 32])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_decode_steps(count: int, multiple: int) -> None:
    found = shares_of([(11 * i + 120, 1, 1) for i in range(count)])
    ours = build_batch(found, TOKENS, max_ngram=3, row_multiple=multiple)
    assert_same(ours, one_by_one(found, 3, multiple))


def test_the_batch_keeps_its_values_when_the_tables_change() -> None:
    tokens = TOKENS.copy()
    found = shares_of([(5, 1, 1), (9, 1, 1)])
    batch = build_batch(found, tokens, max_ngram=2)
    tokens[:], found.block_tables[:], found.rows[:] = 0, 0, 0
    assert batch.ngrams.min() > 0 and batch.block_tables.min() > 0 and batch.slots.min() > 0
