"""Quantisers and cache rows of Triton on a card: extremes, every byte, any place, bit for bit."""

from __future__ import annotations

import pytest
import torch

from headrace.ops import cases
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.numerics import DTYPES
from headrace.platforms import Platform
from tests.conformance import row_checks

pytestmark = pytest.mark.gpu

TRITON = [i for i in IMPLEMENTATIONS if i.name == "triton"]
CALLS = {i.op: i.function for i in TRITON}


@pytest.fixture(autouse=True)
def compiles(rehearsed: bool) -> None:
    reason = TRITON[0].probe() if TRITON[0].probe is not None else None
    if rehearsed or reason:
        pytest.skip(reason or "Triton compiles for real cards only")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [32, 64, 128, 24])
def test_fake_quantisers_meet_extremes(card: Platform, group: int, dtype: str):
    for seed in range(5):
        x = row_checks.extreme_rows(2 * group, DTYPES[dtype], seed=seed)
        row_checks.check_fakes(CALLS, card.device, group, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", row_checks.QUANTISED)
def test_records_of_extremes(card: Platform, name: str, dtype: str):
    width = cases.record_view(cases.Inputs(1, torch.float32), name, 1, 1).width
    for seed in range(5):
        x = row_checks.extreme_rows(width, DTYPES[dtype], seed=seed)
        row_checks.check_records(CALLS, card.device, name, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", row_checks.RECORDS)
def test_every_byte_is_read(card: Platform, name: str, dtype: str):
    row_checks.check_every_byte(CALLS, card.device, name, DTYPES[dtype])


@pytest.mark.parametrize("name", row_checks.RECORDS)
def test_places(card: Platform, name: str):
    row_checks.check_places(CALLS, card.device, name)
    row_checks.check_outside(CALLS, card.device, name)
