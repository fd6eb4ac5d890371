"""The batch of a plan: the same as `Batch.build` makes of its shares one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.inputs import build_batch
from headrace.engine.plan import NO_COPIES, StepPlan
from headrace.model.batch import Batch, BatchRow

RANDOM = np.random.default_rng(3)
TOKENS = RANDOM.integers(1, 900, (9, 600)).astype(np.int32)
TOKENS[0] = 0
TABLES = RANDOM.integers(1, 99, (9, 5)).astype(np.int32)
TABLES[0] = 0


def column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def plan_of(
    shares: list[tuple[int, int, bool]], decodes: int, all_logits: list[bool] | None
) -> StepPlan:
    """Shares (q_start, q_len, samples) of rows 8, 7, ..."""
    count = len(shares)
    return StepPlan(
        number=1,
        version=0,
        rows=column(list(range(8, 8 - count, -1))),
        epochs=column([0] * count),
        q_start=column([share[0] for share in shares]),
        q_len=column([share[1] for share in shares]),
        samples=np.array([share[2] for share in shares]),
        decodes=decodes,
        total_rows=sum(share[1] for share in shares),
        window_floor=column([share[0] // 2 for share in shares]),
        write_from=column([share[0] // 3 for share in shares]),
        keep_from=column([share[0] // 4 for share in shares]),
        all_logits=None if all_logits is None else np.array(all_logits),
        block_copies=NO_COPIES,
        slot_copies=NO_COPIES,
        forks=0,
    )


def one_by_one(plan: StepPlan, max_ngram: int, row_multiple: int) -> Batch:
    rows = []
    for share, row in enumerate(plan.rows.tolist()):
        wants_all = plan.all_logits is not None and plan.all_logits[share]
        rows.append(
            BatchRow(
                TOKENS[row].astype(np.int64),
                int(plan.q_start[share]),
                int(plan.q_len[share]),
                TABLES[row].tolist(),
                row,
                "all" if wants_all else "last" if plan.samples[share] else "none",
                int(plan.window_floor[share]),
                int(plan.write_from[share]),
                int(plan.keep_from[share]),
            )
        )
    if padding := -plan.total_rows % row_multiple:
        rows.append(BatchRow(np.zeros(padding, dtype=np.int64), 0, padding, [0], 0, "none"))
    return Batch.build(rows, max_ngram)


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


chunks = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 70), st.booleans()), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(chunks, st.lists(st.integers(1, 500), max_size=3), st.integers(1, 4), st.data())
def test_plans_of_all_kinds(
    chunks: list[tuple[int, int, bool]], decodes: list[int], max_ngram: int, data: st.DataObject
) -> None:
    shares = [(start, 1, True) for start in decodes] + chunks
    flags = st.lists(st.booleans(), min_size=len(shares), max_size=len(shares))
    all_logits = data.draw(st.none() | flags)
    multiple = data.draw(st.sampled_from([1, 32]))
    plan = plan_of(shares, len(decodes), all_logits)
    ours = build_batch(plan, TOKENS, TABLES, max_ngram=max_ngram, row_multiple=multiple)
    assert_same(ours, one_by_one(plan, max_ngram, multiple))


@pytest.mark.parametrize("multiple", [1, 4, 32])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_decode_steps(count: int, multiple: int) -> None:
    plan = plan_of([(11 * i + 120, 1, True) for i in range(count)], count, None)
    ours = build_batch(plan, TOKENS, TABLES, max_ngram=3, row_multiple=multiple)
    assert_same(ours, one_by_one(plan, 3, multiple))


def test_the_batch_keeps_its_values_when_the_tables_change() -> None:
    tokens, tables = TOKENS.copy(), TABLES.copy()
    plan = plan_of([(5, 1, True), (9, 1, True)], 2, None)
    batch = build_batch(plan, tokens, tables, max_ngram=2)
    tokens[:], tables[:], plan.rows[:] = 0, 0, 0
    assert batch.ngrams.min() > 0 and batch.block_tables.min() > 0 and batch.slots.min() > 0
