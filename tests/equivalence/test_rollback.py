"""Rejected rows are taken back without copies: positions are simply computed again.

Rings hold window + backtrack rows and compressor states enough open rows, so that up to
`default_backtrack` rows may be written past the accepted ones and then be overwritten.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.check.case import Runner
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics

TOTAL = 160
MODES = {
    "exact": (Numerics("float64", kv_quant=False), 1e-10),
    "quantised": (Numerics("float64", kv_quant=True), 1e-10),
}


@pytest.fixture(scope="module")
def v4_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("v4-tiny") / "model"
    write_tiny(directory, preset="v4-tiny", seed=3)
    return directory


@pytest.fixture(scope="module", params=["tiny-8", "v4-tiny"])
def directory(request: pytest.FixtureRequest, tiny_dir: Path, v4_dir: Path) -> Path:
    return {"tiny-8": tiny_dir, "v4-tiny": v4_dir}[request.param]


def decode(model: Model, ids: np.ndarray, start: int, wrong: int) -> torch.Tensor:
    """Prefill `start`, then one token a step; before each step `wrong` rows are taken back."""
    rng = np.random.default_rng(1)
    runner = Runner(model, TOTAL + 16)
    out = [runner.run(ids, [start], "last")]
    for position in range(start, TOTAL):
        if wrong:
            drafted = np.concatenate((ids[:position], rng.integers(0, 512, size=wrong)))
            runner.run(drafted, [wrong], "last")
            runner.position = position
        out.append(runner.run(ids, [1], "last"))
    return torch.cat(out)


@pytest.mark.parametrize("mode", MODES)
def test_rows_taken_back_leave_no_trace(directory: Path, mode: str) -> None:
    numerics, atol = MODES[mode]
    model = load_model(directory, numerics)
    ids = np.random.default_rng(0).integers(0, 512, size=TOTAL)
    clean = decode(model, ids, TOTAL - 24, 0)
    for wrong in range(1, model.spec.default_backtrack + 1):
        found = decode(model, ids, TOTAL - 24, wrong)
        assert float((found - clean).abs().max()) <= atol, wrong
