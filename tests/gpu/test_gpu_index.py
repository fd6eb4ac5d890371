"""The indexer's Triton operators on a card: released sizes, a million entries, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.ops.cases import Inputs, written_view
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.numerics import DTYPES
from headrace.ops.records import RecordView
from headrace.ops.reference import indexer as reference
from headrace.platforms import Platform
from tests.conformance.test_operators import error

pytestmark = pytest.mark.gpu

TRITON = {i.op: i for i in IMPLEMENTATIONS if i.name == "triton"}
HEADS, TOP_K, BLOCK, KEEP = 32, 512, 8, 2048
BOTH = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def compiles(rehearsed: bool) -> None:
    probe = TRITON["entry_scores"].probe
    reason = probe() if probe is not None else None
    if rehearsed or reason:
        pytest.skip(reason or "Triton compiles for real cards only")


def random_scores(card: Platform, rows: int, n: int, dtype: str) -> tuple[Tensor, Tensor]:
    """(scores [rows, n], visible [rows]); bf16 numbers are few, so that most have equals."""
    generator = torch.Generator(card.device).manual_seed(rows + n)
    scores = torch.randn((rows, n), generator=generator, device=card.device).to(DTYPES[dtype])
    visible = torch.linspace(0, n, rows, device=card.device).to(torch.int64)
    hidden = torch.arange(n, device=card.device) >= visible.unsqueeze(-1)
    return scores.masked_fill(hidden, -torch.inf), visible


def queries(
    card: Platform, sequences: int, each: int, blocks: int, dtype: str
) -> tuple[Tensor, Tensor, RecordView, Tensor, Tensor]:
    """Arguments of `entry_scores`: FP4 keys of 128 in blocks of 128 entries."""
    i = Inputs(sequences + each, DTYPES[dtype])
    view = written_view(i, "fp4_ue8m0_planar", 65, 128)
    assert view.scales is not None
    view = RecordView(
        view.data.to(card.device),
        view.format,
        view.width,
        scales=view.scales.to(card.device),
    )
    rows = sequences * each
    given = (i.normal(rows, HEADS, 128), i.normal(rows, HEADS))
    table = i.integers(0, 64, sequences, blocks)
    visible = i.integers(0, blocks * 128 + 1, rows)
    q, weights, table, visible = (x.to(card.device) for x in (*given, table, visible))
    return q, weights, view, table, visible


@BOTH
@pytest.mark.parametrize(("rows", "n"), [(6, 16_385), (6, 131_072), (6, 1 << 20), (2048, 16_000)])
def test_best_of_long_rows(card: Platform, rows: int, n: int, dtype: str):
    scores, _ = random_scores(card, rows, n, dtype)
    found = TRITON["select_top_k"].function(scores, TOP_K)
    assert found.equal(reference.select_top_k(scores, TOP_K))


@BOTH
@pytest.mark.parametrize(("rows", "n"), [(6, 131_073), (6, 1 << 20), (512, 20_000)])
def test_candidates_of_long_rows(card: Platform, rows: int, n: int, dtype: str):
    given = (*random_scores(card, rows, n, dtype), BLOCK, KEEP)
    found = TRITON["candidate_mask"].function(*given)
    assert found.equal(reference.candidate_mask(*given))


@BOTH
@pytest.mark.parametrize(("sequences", "each"), [(4, 6), (1, 300), (33, 1)])
def test_released_scores(card: Platform, sequences: int, each: int, dtype: str):
    given = queries(card, sequences, each, 64, dtype)
    rows, count = sequences * each, 64 * 128
    allowed = torch.rand((rows, count // BLOCK), device=card.device) < 0.2
    allowed = allowed.repeat_interleave(BLOCK, dim=1)
    for rest in ((), (count, allowed)):
        found = TRITON["entry_scores"].function(*given, *rest)
        measured = error(found.cpu(), reference.entry_scores(*given, *rest).cpu())
        tolerance = TRITON["entry_scores"].tolerance
        assert tolerance is not None
        assert measured <= tolerance[dtype]


@BOTH
def test_a_graph_gives_what_a_call_gives(card: Platform, dtype: str):
    """Captured once, replayed on other numbers: nothing waits, nothing depends on values."""
    q, weights, view, table, visible = queries(card, 4, 6, 200, dtype)

    def run() -> tuple[Tensor, Tensor]:
        scores = TRITON["entry_scores"].function(q, weights, view, table, visible)
        mask = TRITON["candidate_mask"].function(scores, visible, BLOCK, KEEP)
        again = (q, weights, view, table, visible, scores.shape[1], mask)
        limited = TRITON["entry_scores"].function(*again)
        return mask, TRITON["select_top_k"].function(limited, TOP_K)

    captured = capture(run)
    for factor in (-1.0, 0.5):
        q.mul_(factor)
        visible.sub_(57).clamp_min_(0)
        expected = run()
        for found, wanted in zip(captured(), expected, strict=True):
            assert found.equal(wanted)


def capture(run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """`run` as a graph."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay
