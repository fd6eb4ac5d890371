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


@pytest.mark.parametrize(("impl", "dtype"), TABLE)
def test_agrees_with_reference(card: Platform, rehearsed: bool, impl: Implementation, dtype: str):
    """The reference is held against its own fp64 mode on the host, as on a CPU."""
    reason = impl.probe() if impl.probe is not None else None
    if impl.name.startswith("triton") and (reason or rehearsed):
        pytest.skip(reason or "Triton compiles for real cards only")
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
    p
    for p in TABLE
    if p.values[0].batch_invariant and {"*", "cuda"}.intersection(p.values[0].invariant_on)
]


@pytest.mark.parametrize(("impl", "dtype"), INVARIANT)
def test_declared_batch_invariance_holds(
    card: Platform, rehearsed: bool, impl: Implementation, dtype: str
):
    """Bit for bit, also a row alone and 2,000 of them."""
    reason = impl.probe() if impl.probe is not None else None
    if reason or rehearsed:
        pytest.skip(reason or "what adds up is the host's")
    for variant in cases.CASES[impl.op]:
        case = on_device(cases.build(impl.op, variant, 96, DTYPES[dtype]), card.device)
        several = {**selections(96), "one": torch.tensor([57])}
        if "released" not in variant:
            several["many"] = torch.arange(96).repeat(21)[:2000]
        check_rows(impl, case, several)


def test_products_of_fp32_are_fp32(card: Platform):
    """TF32 keeps ten bits: it would be off by some 3e-4."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn((512, 512), generator=generator) for _ in range(2))
    found = (a.to(card.device) @ b.to(card.device)).cpu().double()
    exact = a.double() @ b.double()
    assert float((found - exact).norm() / exact.norm()) < 2e-6
