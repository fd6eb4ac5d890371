"""The indexer's Triton operators in Triton's interpreter: run it with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops import cases
from headrace.ops.cases import Inputs, written_view
from headrace.ops.reference import indexer as reference
from tests.conformance.test_operators import check_rows, error, selections

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from headrace.ops.catalogue import IMPLEMENTATIONS  # noqa: E402
from headrace.ops.triton import indexer, selection  # noqa: E402

# The interpreter's own, with NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

TRITON = {i.op: i for i in IMPLEMENTATIONS if i.name == "triton"}
SELECTING = [
    pytest.param(op, variant, id=f"{op}-{variant}")
    for op in ("select_top_k", "candidate_mask")
    for variant in cases.CASES[op]
]


def row_counts(variant: str) -> tuple[int, ...]:
    """Few: the interpreter runs one program after the other."""
    return (2,) if "released" in variant else (0, 1, 3, 33)


@pytest.mark.parametrize("variant", list(cases.CASES["entry_scores"]))
def test_entry_scores(variant: str):
    for rows in row_counts(variant):
        case = cases.build("entry_scores", variant, rows, torch.float32)
        found = indexer.entry_scores(*case.args, **case.kwargs)
        expected = reference.entry_scores(*case.args, **case.kwargs)
        assert found.dtype == expected.dtype
        assert error(found, expected) <= TRITON["entry_scores"].tolerance["float32"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "variant"), SELECTING)
def test_selections_are_exact(op: str, variant: str, dtype: torch.dtype):
    for rows in row_counts(variant):
        case = cases.build(op, variant, rows, dtype)
        found = getattr(selection, op)(*case.args)
        expected = getattr(reference, op)(*case.args)
        assert found.dtype == expected.dtype
        assert found.equal(expected), (rows, found, expected)


@pytest.mark.parametrize("op", ["entry_scores", "select_top_k", "candidate_mask"])
def test_rows_do_not_see_each_other(op: str):
    variant = {"entry_scores": "cut", "select_top_k": "ties", "candidate_mask": "ties"}[op]
    case = cases.build(op, variant, 48, torch.float32)
    chosen = {name: rows[:8] for name, rows in selections(48).items()}
    check_rows(TRITON[op], case, chosen)


def test_rows_of_a_sequence_are_grouped_without_changing_bits():
    """Groups of 16, 2 and 1 rows; a table with columns that nobody sees, and gaps between them."""
    i = Inputs(4, torch.float32)
    view = written_view(i, "fp4_ue8m0_planar", 9, 16)
    q, weights = i.normal(2, 37, 4, 128), i.normal(2, 37, 4)
    table = i.integers(0, 8, 2, 14)[:, ::2]
    table[:, 5:] = 8  # NaN
    visible = i.integers(0, 81, 2, 37)

    def scores(n: slice, count: int | None = None) -> Tensor:
        rows = [x[:, n].flatten(0, 1) for x in (q, weights, visible)]
        found = indexer.entry_scores(rows[0], rows[1], view, table, rows[2], count)
        return found.unflatten(0, (2, -1))

    whole = scores(slice(None))
    assert whole.shape == (2, 37, 112) and not whole.isnan().any()
    for n in (slice(20, 21), slice(3, 5), slice(0, 30)):
        assert scores(n, 80).equal(whole[:, n, :80])
    assert whole.isneginf().equal(torch.arange(112) >= visible.unsqueeze(-1))


def special(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """Scores of few different values: ties, both infinities, NaN of both signs, zeros of both."""
    values = (0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-40, 3e38)
    table = torch.tensor(values).to(dtype)
    found = table[Inputs(rows + n, dtype).integers(0, len(values), rows, n)]
    found[:1] = -torch.inf
    found[1:2] = torch.nan
    found[2:3] = -0.0
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "top_k"), [(1, 1), (40, 7), (40, 40), (5, 0), (0, 3), (300, 100)])
def test_every_kind_of_number(dtype: torch.dtype, n: int, top_k: int):
    scores = special(7, n, dtype)
    assert selection.select_top_k(scores, top_k).equal(reference.select_top_k(scores, top_k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_are_a_tournament(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    """Of three rounds; NaN must take its place in the last one too."""
    monkeypatch.setattr(selection, "CHUNKS", (8, 32))
    visible = torch.tensor([0, 1, 200, 133, 64])
    for scores in (special(5, 200, dtype), Inputs(1, dtype).normal(5, 200)):
        for top_k in (1, 16, 17):
            expected = reference.select_top_k(scores, top_k)
            assert selection.select_top_k(scores, top_k).equal(expected)
        given = scores, visible, 3, 11
        assert selection.candidate_mask(*given).equal(reference.candidate_mask(*given))


def test_candidates_of_every_kind_of_number():
    for block, keep in ((1, 3), (4, 2), (5, 9), (64, 1)):
        scores = special(9, 43, torch.float32)
        visible = torch.arange(9) * 5
        given = scores[:, 1:], visible, block, keep
        assert selection.candidate_mask(*given).equal(reference.candidate_mask(*given))
