"""The conformance table on a card: every implementation that runs there, on every case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.ops import cases
from headrace.ops.cases import Case
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.numerics import DTYPES
from headrace.ops.records import RecordView
from headrace.ops.registry import Implementation
from headrace.ops.stored_weights import StoredWeight
from headrace.platforms import Platform
from tests.conformance.test_operators import (
    OWN_ERROR,
    OWN_ERROR_ACT_FP8,
    REFERENCE,
    check_rows,
    error,
    in_fp64,
    outputs,
    result_dtype,
    selections,
)

pytestmark = pytest.mark.gpu

TABLE = [
    pytest.param(impl, dtype, id=f"{impl.op}-{impl.name}-{dtype}")
    for impl in IMPLEMENTATIONS
    if "*" in impl.platforms or "cuda" in impl.platforms
    for dtype in DTYPES
    if "*" in impl.dtypes or dtype in impl.dtypes
]

# Every Triton operator in each small case, with a whole tile of rows and a part of one: little
# enough for compute-sanitizer, which is some 50 times slower (scripts/sanitize.py).
SMALL_ROWS = 33
SMALL = [
    pytest.param(impl, variant, id=f"{impl.op}-{impl.name}-{variant}")
    for impl in IMPLEMENTATIONS
    if impl.name.startswith("triton")
    for variant in cases.CASES[impl.op]
    if "released" not in variant
]


def on_device(case: Case, device: str) -> Case:
    """The same call with all tensors there."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, RecordView):
            scales = None if value.scales is None else value.scales.to(device)
            return replace(value, data=value.data.to(device), scales=scales)
        if isinstance(value, StoredWeight):
            codes = value.codes.to(device)
            return replace(value, codes=codes, scales=value.scales.to(device))
        return value

    return replace(case, args=tuple(moved(value) for value in case.args))


def skip_without_triton(impl: Implementation, rehearsed: bool) -> None:
    reason = impl.probe() if impl.probe is not None else None
    if impl.name.startswith("triton") and (reason or rehearsed):
        pytest.skip(reason or "Triton compiles for real cards only")


@pytest.mark.parametrize(("impl", "dtype"), TABLE)
def test_agrees_with_reference(card: Platform, rehearsed: bool, impl: Implementation, dtype: str):
    """The reference is held against its own fp64 mode on the host, as on a CPU."""
    skip_without_triton(impl, rehearsed)
    for variant in cases.CASES[impl.op]:
        own = impl.name == "reference"
        own_error = OWN_ERROR_ACT_FP8 if "act_fp8" in variant else OWN_ERROR
        tolerance = own_error if own else impl.tolerance or dict.fromkeys(DTYPES, 0.0)
        # fp64 sums of another library come in another order.
        limit = max(tolerance[dtype], 1e-12)
        for rows in cases.row_counts(variant):
            case, again = (cases.build(impl.op, variant, rows, DTYPES[dtype]) for _ in range(2))
            exact = again if case.in_place is not None or not own else in_fp64(again)
            found = outputs(impl, on_device(case, card.device))
            expected = outputs(REFERENCE[impl.op], exact)
            assert len(found) == len(expected)
            for number, (f, e) in enumerate(zip(found, expected, strict=True)):
                assert f.device.type == torch.device(card.device).type
                if f.is_floating_point():
                    assert f.dtype == result_dtype(impl.op, dtype, number)
                measured = error(f.cpu(), e)
                allowed = limit if e.is_floating_point() else 0.0
                where = f"{variant}, result {number}, {rows} rows"
                assert measured <= allowed, f"{where}: {measured:.3g} > {allowed:.3g}"


INVARIANT = [
    pytest.param(impl, dtype, id=f"{impl.op}-{impl.name}-{dtype}")
    for impl in IMPLEMENTATIONS
    if impl.batch_invariant and {"*", "cuda"}.intersection(impl.invariant_on)
    if "*" in impl.platforms or "cuda" in impl.platforms
    for dtype in DTYPES
    if "*" in impl.dtypes or dtype in impl.dtypes
]


@pytest.mark.parametrize(("impl", "dtype"), INVARIANT)
def test_batch_invariant(card: Platform, rehearsed: bool, impl: Implementation, dtype: str):
    """A row's bits do not depend on which rows stand beside it, nor on its place among them."""
    skip_without_triton(impl, rehearsed)
    if impl.op == "ngram_rows":
        pytest.skip("runs on the host, whatever the model's device")
    checked = 0
    for variant in cases.CASES[impl.op]:
        case = on_device(cases.build(impl.op, variant, 96, DTYPES[dtype]), card.device)
        if case.in_place is not None:
            continue  # rows are stored as they are
        found = outputs(impl, case)[0]
        if case.rows and found.shape[0] >= 96:
            several = selections(found.shape[0])
            # Which need no whole tiles of rows, but for what they leave to `fixed_tile`.
            if impl.name.startswith("triton") and variant != "fp8":
                several["one"] = torch.tensor([57])
                if "released" not in variant:
                    several["many"] = torch.arange(96).repeat(21)[:2000]
            check_rows(impl, case, several)
            checked += 1
    assert checked or impl.op == "write_records"  # which has no rows of results


@pytest.mark.sanitizer
@pytest.mark.parametrize(("impl", "variant"), SMALL)
def test_small_launch(card: Platform, rehearsed: bool, impl: Implementation, variant: str):
    """One launch in bf16, compared on the host, so that hardly any kernel but Triton's runs."""
    skip_without_triton(impl, rehearsed)
    dtype = "bfloat16"
    case, again = (cases.build(impl.op, variant, SMALL_ROWS, DTYPES[dtype]) for _ in range(2))
    found = outputs(impl, on_device(case, card.device))
    expected = outputs(REFERENCE[impl.op], again)
    tolerance = (impl.tolerance or dict.fromkeys(DTYPES, 0.0))[dtype]
    for number, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert error(f.cpu(), e) <= (tolerance if e.is_floating_point() else 0.0), number


def test_coefficients_of_bf16_streams_are_those_of_fp32(card: Platform, rehearsed: bool):
    """What tensor cores multiply loses nothing of an fp32 weight."""
    for op in ("hc_enter", "hc_head"):
        impl = next(i for i in IMPLEMENTATIONS if (i.op, i.name) == (op, "triton"))
        skip_without_triton(impl, rehearsed)
        case = cases.build(op, "released", 33, torch.bfloat16)
        found = outputs(impl, on_device(case, card.device))
        expected = outputs(REFERENCE[op], in_fp64(case))
        coefficients = slice(1, None) if op == "hc_enter" else slice(None)
        for f, e in zip(found[coefficients], expected[coefficients], strict=True):
            assert error(f.cpu(), e) <= 1e-5


def test_products_of_fp32_are_fp32(card: Platform):
    """TF32 keeps ten bits: it would be off by some 3e-4."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn((512, 512), generator=generator) for _ in range(2))
    found = (a.to(card.device) @ b.to(card.device)).cpu().double()
    exact = a.double() @ b.double()
    assert float((found - exact).norm() / exact.norm()) < 2e-6
