"""The conformance table: every implementation of the catalogue on every case of ops/cases.

A new kernel is tested by registering it: it must agree with the reference within the tolerance it
declares, keep its promise of batch invariance bit for bit, and leave its inputs alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from headrace.ops import cases
from headrace.ops.cases import Case
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.numerics import DTYPES
from headrace.ops.records import RecordView
from headrace.ops.registry import Implementation
from headrace.ops.signatures import OPS
from headrace.ops.stored_weights import StoredWeight

REFERENCE = {impl.op: impl for impl in IMPLEMENTATIONS if impl.name == "reference"}
# The reference against itself in fp64: what fp32 arithmetic and bf16 results may cost. Activations
# rounded to FP8 jump by 1/16 where a difference in the last bit crosses a rounding border.
OWN_ERROR = {"float64": 0.0, "float32": 5e-6, "bfloat16": 2e-2}
OWN_ERROR_ACT_FP8 = {"float64": 0.0, "float32": 5e-6, "bfloat16": 0.1}
# Operators whose results stay in fp32 (fp64) whatever the compute dtype.
WIDE_RESULTS = {
    *("hc_head", "pool_entries", "router", "engram_gate", "logits"),
}
HERE = [impl for impl in IMPLEMENTATIONS if "*" in impl.platforms or "cpu" in impl.platforms]
TABLE = [
    pytest.param(impl, variant, dtype, id=f"{impl.op}-{impl.name}-{variant}-{dtype}")
    for impl in HERE
    for variant in cases.CASES[impl.op]
    # Stored weights are only kept on a card.
    if not (variant.startswith("stored_") and impl.name in ("decode", "compiled"))
    for dtype in DTYPES
    if "*" in impl.dtypes or dtype in impl.dtypes
]
# Cases with batch rows in dim 0 of arguments and results; the others have tests of their own below.
INVARIANT = [
    p
    for p in TABLE
    if p.values[0].batch_invariant
    and p.values[2] != "float64"
    and p.values[0].op != "write_records"
    and (p.values[0].op, p.values[1]) != ("entry_scores", "sequences")
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Batch invariance is promised for one thread; the other tests need no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outputs(impl: Implementation, case: Case) -> tuple[torch.Tensor, ...]:
    """Results of a call; of an in-place call the bytes of the view it wrote (NaN before)."""
    result = impl.function(*case.args, **case.kwargs)
    if case.in_place is not None:
        return tuple(as_bytes(part) for part in tensors(case.args[case.in_place]))
    return result if isinstance(result, tuple) else (result,)


def tensors(value: object) -> list[torch.Tensor]:
    """All tensors inside an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, RecordView):
        return [value.data] if value.scales is None else [value.data, value.scales]
    if isinstance(value, StoredWeight):
        return [value.codes, value.scales]
    return []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Content as bytes, so that NaNs and the sign of zero compare too."""
    return tensor.contiguous().flatten().view(torch.uint8).clone()


def in_fp64(case: Case) -> Case:
    """The same numbers in the fp64 mode."""

    def convert(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, RecordView) and value.data.is_floating_point():
            return replace(value, data=value.data.double())
        return torch.float64 if isinstance(value, torch.dtype) else value

    return replace(case, args=tuple(convert(value) for value in case.args))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest magnitude; for integers, how many differ."""
    assert found.shape == expected.shape
    if not expected.is_floating_point():
        return float((found != expected).sum())
    if expected.numel() == 0:
        return 0.0
    unseen = expected == -torch.inf
    assert (found == -torch.inf).equal(unseen)
    found, expected = found.masked_fill(unseen, 0.0), expected.masked_fill(unseen, 0.0)
    assert torch.isfinite(found).all(), "not finite"
    difference = (found.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    return difference if difference == 0.0 else difference / largest


def test_every_operator_has_cases_and_a_reference():
    assert set(cases.CASES) == set(OPS)
    assert set(REFERENCE) == set(OPS)
    assert all(cases.CASES.values())


@pytest.mark.parametrize(("impl", "variant", "dtype"), TABLE)
def test_agrees_with_reference(impl: Implementation, variant: str, dtype: str):
    """The reference itself is held against its own fp64 mode on the same numbers."""
    own = impl.name == "reference"
    own_error = OWN_ERROR_ACT_FP8 if "act_fp8" in variant else OWN_ERROR
    tolerance = own_error if own else impl.tolerance or dict.fromkeys(DTYPES, 0.0)
    for rows in cases.row_counts(variant):
        case = cases.build(impl.op, variant, rows, DTYPES[dtype])
        found = outputs(impl, case)
        again = cases.build(impl.op, variant, rows, DTYPES[dtype])
        in_place = case.in_place is not None
        expected = outputs(REFERENCE[impl.op], in_fp64(again) if own and not in_place else again)
        assert len(found) == len(expected)
        for number, (f, e) in enumerate(zip(found, expected, strict=True)):
            if f.is_floating_point():
                assert f.dtype == result_dtype(impl.op, dtype, number)
            measured = error(f, e)
            limit = tolerance[dtype] if e.is_floating_point() else 0.0
            assert measured <= limit, f"result {number}, {rows} rows: {measured:.3g} > {limit:.3g}"


def result_dtype(op: str, dtype: str, number: int) -> torch.dtype:
    """What a floating-point result of an operator must be in a compute dtype."""
    # The input of the sublayer comes first, its coefficients are wide.
    wide = op in WIDE_RESULTS or (op == "hc_enter" and number > 0)
    return torch.float32 if wide and dtype != "float64" else DTYPES[dtype]


def take(case: Case, rows: torch.Tensor) -> Case:
    """The case with these of its batch rows only, in this order."""
    args = list(case.args)
    for place in case.rows:
        args[place] = args[place][rows.to(args[place].device)]
    return replace(case, args=tuple(args))


def selections(total: int) -> dict[str, torch.Tensor]:
    """Which rows of `total` to take: whole tiles of 32, as the engine pads them."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(5))
    return {
        "first": torch.arange(32),
        "last": torch.arange(total - 32, total),
        "every third": torch.arange(0, total, 3)[:32],
        "reversed": torch.arange(total).flip(0),
        "some, shuffled": order[:64],
        "one, repeated": torch.full((32,), 41),
        "all, twice": torch.arange(total).repeat(2),
    }


def check_rows(impl: Implementation, case: Case, chosen: dict[str, torch.Tensor]) -> None:
    """Each choice of rows gives, bit for bit, what these rows give among all rows."""
    whole = outputs(impl, case)
    for name, rows in chosen.items():
        parts = outputs(impl, take(case, rows))
        for number, (part, full) in enumerate(zip(parts, whole, strict=True)):
            part, wanted = part.cpu(), full.cpu()[rows]
            same = as_bytes(part).equal(as_bytes(wanted))
            assert same, f"result {number}, {name}: rows {differing(part, wanted)} differ"


def differing(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """Rows that are not equal."""
    return (a != b).flatten(1).any(-1).nonzero().flatten().tolist()


@pytest.mark.parametrize(("impl", "variant", "dtype"), INVARIANT)
def test_batch_invariant(impl: Implementation, variant: str, dtype: str):
    """A row's bits do not depend on which rows stand beside it, nor on its place among them."""
    case = cases.build(impl.op, variant, 96, DTYPES[dtype])
    assert case.rows
    total = outputs(impl, case)[0].shape[0]
    check_rows(impl, case, selections(total))


# Rows that want logits are not padded to whole tiles: these operators see any number of them.
ANY_ROWS = [p for p in INVARIANT if p.values[0].op in ("hc_collapse", "rms_norm", "logits")]
ANY_ROWS = [p for p in ANY_ROWS if p.values[1] == "released"]


@pytest.mark.parametrize(("impl", "variant", "dtype"), ANY_ROWS)
def test_batch_invariant_for_any_row_count(impl: Implementation, variant: str, dtype: str):
    case = cases.build(impl.op, variant, 37, DTYPES[dtype])
    check_rows(impl, case, {str(n): torch.arange(37 - n, 37) for n in (1, 2, 3, 31, 33, 36)})


def invariant(op: str, *dtypes: str) -> list[object]:
    """(implementation, dtype) of every batch-invariant implementation of an operator."""
    return [
        pytest.param(impl, dtype, id=f"{impl.name}-{dtype}")
        for impl in HERE
        if impl.op == op and impl.batch_invariant
        for dtype in dtypes
    ]


@pytest.mark.parametrize(("impl", "dtype"), invariant("entry_scores", "float32", "bfloat16"))
def test_entry_scores_do_not_depend_on_chunk_or_entry_count(impl: Implementation, dtype: str):
    """Prefill scores a rectangle of rows over as many entries as the longest sequence has."""
    i = cases.Inputs(3, DTYPES[dtype])
    view = cases.written_view(i, "fp4_ue8m0_planar", 11, 16)
    q, weights, table = i.normal(3, 40, 16, 128), i.normal(3, 40, 16), i.integers(0, 10, 3, 10)
    visible = i.integers(0, 97, 3, 40)

    def scores(b: slice, n: slice, blocks: int, count: int | None = None) -> torch.Tensor:
        rows = (x[b, n].flatten(0, 1) for x in (q, weights, visible))
        parts = *rows, table[b, :blocks]
        found = impl.function(parts[0], parts[1], view, parts[3], parts[2], count)
        return found.unflatten(0, (-1, q[:, n].shape[1]))

    whole = scores(slice(None), slice(None), 10)
    assert whole.shape == (3, 40, 160)
    for b, n, blocks, count in (
        (slice(1, 2), slice(0, 1), 6, 96),
        (slice(0, 3), slice(7, 40), 6, None),
        (slice(0, 3), slice(7, 9), 7, 97),
    ):
        part = scores(b, n, blocks, count)
        assert part.equal(whole[b, n, : part.shape[-1]])


@pytest.mark.parametrize(("impl", "dtype"), invariant("sparse_attention", "float32", "bfloat16"))
@pytest.mark.parametrize("variant", ["plain", "fp4", "fp8", "released"])
def test_attention_does_not_depend_on_absent_places(impl: Implementation, dtype: str, variant: str):
    """More places without a key change nothing; nor does what lies in rows nobody reads."""
    case = cases.build("sparse_attention", variant, 33, DTYPES[dtype])
    whole = impl.function(*case.args)
    q, window, index, view, major, minor, sink, scale = case.args
    none = torch.full((33, 100), -1)
    wider = (torch.cat((major, none), 1), torch.cat((minor, none), 1))
    moved = (torch.cat((window[-1:], window)), torch.where(index < 0, index, index + 1))
    assert impl.function(q, *moved, view, *wider, sink, scale).equal(whole)
    assert torch.count_nonzero(whole[0]) == 0  # row 0 sees no key


@pytest.mark.parametrize(("impl", "dtype"), invariant("select_top_k", "float32", "bfloat16"))
def test_top_k_does_not_depend_on_unseen_places(impl: Implementation, dtype: str):
    case = cases.build("select_top_k", "ties", 64, DTYPES[dtype])
    scores, top_k = case.args
    wider = torch.nn.functional.pad(scores, (0, 77), value=-torch.inf)
    assert impl.function(wider, top_k).equal(impl.function(scores, top_k))


@pytest.mark.parametrize(("impl", "dtype"), invariant("candidate_mask", "float32", "bfloat16"))
def test_candidates_do_not_depend_on_unseen_places(impl: Implementation, dtype: str):
    for variant in ("ties", "blocks_of_8"):
        scores, visible, block, keep = cases.build(
            "candidate_mask", variant, 64, DTYPES[dtype]
        ).args
        n = scores.shape[1]
        wider = torch.nn.functional.pad(scores, (0, 77), value=-torch.inf)
        found = impl.function(wider, visible, block, keep)
        seen = torch.arange(n + 77) < visible.unsqueeze(-1)
        mask = impl.function(scores, visible, block, keep)
        assert (found & seen)[:, :n].equal(mask & seen[:, :n])


@pytest.mark.parametrize(
    ("impl", "variant", "dtype"), [p for p in TABLE if p.values[2] != "float64"]
)
def test_leaves_inputs_alone(impl: Implementation, variant: str, dtype: str):
    case = cases.build(impl.op, variant, 3, DTYPES[dtype])
    before = copy.deepcopy(case.args)
    outputs(impl, case)
    for place, (now, then) in enumerate(zip(case.args, before, strict=True)):
        if place == case.in_place:
            continue
        for a, b in zip(tensors(now), tensors(then), strict=True):
            assert as_bytes(a).equal(as_bytes(b)), f"argument {place} changed"


@pytest.mark.parametrize("impl", [i for i in HERE if i.op == "write_records"])
@pytest.mark.parametrize("variant", list(cases.CASES["write_records"]))
def test_write_touches_only_its_rows(impl: Implementation, variant: str):
    case = cases.build("write_records", variant, 33, torch.float32)
    view, major, minor, _ = case.args
    before = [as_bytes(part).view(part.shape[:2].numel(), -1) for part in tensors(view)]
    outputs(impl, case)
    written = major * view.data.shape[1] + minor
    untouched = torch.ones(view.data.shape[:2].numel(), dtype=torch.bool)
    untouched[written] = False
    assert untouched.any()
    for part, then in zip(tensors(view), before, strict=True):
        now = as_bytes(part).view(part.shape[:2].numel(), -1)
        assert now[untouched].equal(then[untouched])
        assert (now[written] != 0xFF).any(-1).all()
