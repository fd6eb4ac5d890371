"""Operators for many rows against the reference, at sizes where they take over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.cases import Inputs, written_view
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.cpu import prefill
from headrace.ops.numerics import Numerics
from headrace.ops.reference import attention, indexer
from headrace.ops.registry import resolve

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
MAJORS, MINORS = 16, 16


def places(i: Inputs, rows: int, count: int, spread: int) -> Tensor:
    """int64 [rows, count], distinct in a row, from a range of `spread` that moves with the row."""
    written = (MAJORS - 1) * MINORS  # the last block is NaN
    first = (torch.arange(rows) * (written - spread) // max(1, rows - 1)).unsqueeze(-1)
    return first + i.distinct(rows, count, spread)


def attention_inputs(
    i: Inputs, rows: int, *, heads: int = 8, entries: int = 24, spread: int = 60, sequences: int = 1
) -> list[object]:
    """Rows of some sequences with a window of 16 behind each; some see fewer keys, row 0 none."""
    window = 16
    each = rows // sequences
    start = torch.arange(rows) // each * (each + window) + torch.arange(rows) % each
    index = start.unsqueeze(-1) + torch.arange(window)
    keys = i.normal(int(index.max()) + 2, 32)
    keys[-1] = torch.nan  # nobody's
    index[1::5, :7] = -1
    place = places(i, rows, entries, spread)
    absent = i.integers(0, 4, *place.shape) == 0
    index[0], absent[:1] = -1, True
    view = written_view(i, "fp4_e4m3", MAJORS, MINORS) if entries else None
    major = (place // MINORS).masked_fill(absent, -1)
    minor = (place % MINORS).masked_fill(absent, -1)
    q = i.normal(rows, heads, 32, scale=2.0)
    return [q, keys, index, view, major, minor, i.wide(heads, scale=2.0), 32**-0.5]


def worst(a: Tensor, b: Tensor) -> float:
    """Largest difference; equal NaNs are equal."""
    assert torch.equal(a.isnan(), b.isnan())
    return float((a - b).nan_to_num().abs().max())


@DTYPES
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (700, {}),
        (700, {"entries": 0}),
        (171, {"heads": 3}),
        (530, {"heads": 1}),
        (513, {"spread": 200, "entries": 4}),  # little is shared: rows gather their entries
        (600, {"sequences": 200}),  # nor do windows share much
        (65, {"heads": 40}),
        (1, {}),
    ],
)
def test_attention_of_many_rows(dtype: torch.dtype, rows: int, changes: dict[str, int]) -> None:
    given = attention_inputs(Inputs(rows, dtype), rows, **changes)
    expected = attention.sparse_attention(*given)  # type: ignore[arg-type]
    found = prefill.sparse_attention(*given)  # type: ignore[arg-type]
    assert found.dtype == dtype and found.shape == expected.shape
    assert worst(found, expected) < TOLERANCE[dtype]
    assert not found.isnan().any() and not found[0].any()


def test_both_ways_to_the_keys_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = prefill._keys

    def watched(*given: object) -> prefill._Keys:
        keys = real(*given)  # type: ignore[arg-type]
        seen.append(keys.keys.ndim)
        return keys

    monkeypatch.setattr(prefill, "_keys", watched)
    prefill.sparse_attention(*attention_inputs(Inputs(1, torch.float32), 512))  # type: ignore[arg-type]
    assert set(seen) == {2}
    seen.clear()
    shared = attention_inputs(Inputs(1, torch.float32), 512, spread=200, entries=4)
    prefill.sparse_attention(*shared)  # type: ignore[arg-type]
    assert set(seen) == {2, 3}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_damaged_key_reaches_only_the_rows_that_see_it(bad: float) -> None:
    given = attention_inputs(Inputs(3, torch.float32), 300)
    clean = prefill.sparse_attention(*given)  # type: ignore[arg-type]
    keys, index = given[1].clone(), given[2]  # type: ignore[attr-defined]
    keys[100] = bad
    found = prefill.sparse_attention(given[0], keys, *given[2:])  # type: ignore[arg-type]
    sees = (index == 100).any(1)  # type: ignore[operator]
    assert 0 < int(sees.sum()) < 20
    assert found[sees].isnan().all(-1).all()
    assert worst(found[~sees], clean[~sees]) < 1e-5
    # Nor does a query that is NaN leave its row.
    q = given[0].clone()  # type: ignore[attr-defined]
    q[7] = torch.nan
    found = prefill.sparse_attention(q, *given[1:])  # type: ignore[arg-type]
    assert found[7].isnan().all() and not found[8:].isnan().any() and not found[:7].isnan().any()


def test_entries_in_a_wide_range_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = attention_inputs(Inputs(5, torch.float64), 300)
    expected = prefill.sparse_attention(*given)  # type: ignore[arg-type]
    monkeypatch.setattr(prefill, "_RANGE", 8)
    monkeypatch.setattr(prefill, "_ENTRIES", 1)  # and decoded a tile at a time
    assert worst(prefill.sparse_attention(*given), expected) < 1e-12  # type: ignore[arg-type]


@DTYPES
@pytest.mark.parametrize(("b", "n", "total"), [(1, 300, 1000), (3, 65, 700), (1, 1, 3), (2, 9, 0)])
def test_index_scores_of_many_rows(dtype: torch.dtype, b: int, n: int, total: int) -> None:
    i = Inputs(b, dtype)
    given = i.normal(b, n, 5, 16), i.normal(b, n, 5), i.normal(b, total, 16)
    expected = indexer.index_scores(*given)
    found = prefill.index_scores(*given)
    assert found.shape == expected.shape
    assert total == 0 or worst(found, expected) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("top_k", [1, 8, 64, 499, 500, 501])
def test_the_best_are_those_of_the_reference(dtype: torch.dtype, top_k: int) -> None:
    i = Inputs(top_k, dtype)
    scores = i.normal(200, 500)
    scores[:60] = scores[:60].mul(2).round()  # ties
    scores[60] = 1.0
    scores[61] = -torch.inf
    scores[62:120, 30:] = -torch.inf
    scores[63, 29] = torch.inf
    assert torch.equal(prefill.select_top_k(scores, top_k), indexer.select_top_k(scores, top_k))
    scores[70, 3] = torch.nan
    scores[71] = torch.nan
    assert torch.equal(prefill.select_top_k(scores, top_k), indexer.select_top_k(scores, top_k))
    assert prefill.select_top_k(scores[:0], top_k).shape[0] == 0


# Operator -> the function of `prefill` that it hands over to.
HANDED = {
    "sparse_attention": "sparse_attention",
    "entry_scores": "index_scores",
    "select_top_k": "select_top_k",
}


@pytest.mark.parametrize("name", HANDED)
@pytest.mark.parametrize("implementation", ["decode", "compiled"])
def test_they_are_what_prompts_use(
    monkeypatch: pytest.MonkeyPatch, name: str, implementation: str
) -> None:
    called = []
    real = getattr(prefill, HANDED[name])
    monkeypatch.setattr(prefill, HANDED[name], lambda *given: called.append(name) or real(*given))
    numbers = Numerics("float32")
    if implementation not in {x.name for x in IMPLEMENTATIONS if x.op == name}:
        implementation = "decode"  # Numba is an extra; entry_scores has no kernel of its own
    op = getattr(resolve(IMPLEMENTATIONS, "cpu", numbers, {name: implementation}), name)
    i = Inputs(1, torch.float32)
    view, table = written_view(i, "fp4_ue8m0", 5, 256), torch.tensor([[0, 1, 2, 3]])
    given: dict[str, tuple[object, ...]] = {
        "sparse_attention": tuple(attention_inputs(i, 1500, heads=32)),
        "entry_scores": (
            *(i.normal(300, 8, 32), i.normal(300, 8), view, table),
            torch.arange(601, 901),
        ),
        "select_top_k": (i.normal(300, 900), 64),
    }
    op(*given[name])
    assert called == [name]
