"""Golden cases on a card: the gates of `headrace check model`, and cuts into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.check.case import GoldenCase, run_case
from headrace.check.model import FP32, FP32_KVQ, check_case, chunking_results
from headrace.model.loader import load_model
from headrace.ops.numerics import Numerics
from headrace.ops.triton import missing
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


@pytest.mark.parametrize("name", ["v41_dims", "v41_fp8"])
def test_triton_attention_in_a_model(
    golden_model_dir: Callable[[str], Path], card: Platform, rehearsed: bool, name: str
):
    """fp32 logits of a golden case with every row's attention in the kernel: plain and records."""
    if missing() or rehearsed:
        pytest.skip(missing() or "Triton compiles for real cards only")
    case = GoldenCase.open(golden_model_dir(name), card)
    chosen = {"sparse_attention": "triton"}
    model = load_model(case.directory, FP32, platform=card, op_overrides=chosen)
    assert np.abs(run_case(case, model) - case.expected["logits"]).max() <= 2e-5
    quantised = load_model(case.directory, FP32_KVQ, platform=card, op_overrides=chosen)
    errors = np.abs(run_case(case, quantised) - case.expected["logits_kvq"].astype(np.float64))
    assert (errors.max(-1) <= 5e-3).mean() >= 0.9  # see `check.model._quantised`
    assert errors.mean() <= 1.5e-3


@pytest.mark.parametrize("name", ["v41_dims", "v41_fp8", "v41_a", "v4_tiny"])
def test_weights_as_they_are_stored(
    golden_model_dir: Callable[[str], Path], card: Platform, rehearsed: bool, name: str
):
    """Decoded in the products: the logits of converted weights, up to the order of sums."""
    if missing() or rehearsed:
        pytest.skip(missing() or "Triton compiles for real cards only")
    case = GoldenCase.open(golden_model_dir(name), card)
    # In bf16 a last bit may select other entries in single positions.
    modes = ((FP32, 2e-5, 2e-6), (Numerics("bfloat16", kv_quant=False), 0.2, 0.02))
    for numerics, most, mean in modes:
        stored, converted = (
            run_case(case, load_model(case.directory, numerics, platform=card, keep_stored=keep))
            for keep in (True, False)
        )
        errors = np.abs(stored - converted) / max(1.0, float(np.abs(converted).max()))
        assert errors.max() <= most
        assert errors.mean() <= mean


def test_logits_do_not_depend_on_chunking(
    golden_model_dir: Callable[[str], Path], card: Platform, rehearsed: bool
):
    tokens = 8 if rehearsed else 176
    case = GoldenCase.open(golden_model_dir("v41_a"), card)
    failed = [r for r in chunking_results(case, tokens=tokens) if not r.passed]
    assert not failed
