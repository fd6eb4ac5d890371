"""Golden cases on a card: the gates of `headrace check model`, and cuts into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.check.case import GoldenCase
from headrace.check.model import check_case, chunking_results
from headrace.platforms import Platform

pytestmark = pytest.mark.gpu

CASES = ("v41_dims", "v41_smooth", "v41_fp8", "v41_a", "v4_tiny")


@pytest.mark.parametrize("name", CASES)
def test_golden_case(golden_model_dir: Callable[[str], Path], card: Platform, name: str):
    """fp64, fp32 within 2e-5, KV quantised, bf16, the released path, drafts, greedy tokens."""
    results = list(check_case(GoldenCase.open(golden_model_dir(name), card), quick=True))
    failed = [f"{r.check}: {r.error:.6g}, gate {r.gate:.6g}" for r in results if not r.passed]
    assert len(results) >= 2
    assert not failed, "\n".join(failed)


def test_logits_do_not_depend_on_chunking(
    golden_model_dir: Callable[[str], Path], card: Platform, rehearsed: bool
):
    tokens = 8 if rehearsed else 176
    case = GoldenCase.open(golden_model_dir("v41_a"), card)
    failed = [r for r in chunking_results(case, tokens=tokens) if not r.passed]
    assert not failed
