"""The model that comes with the package: its files, its answers, its evaluation."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_tiny
import torch

from headrace.assets import embedded_model
from headrace.cli.main import run
from headrace.config import EngineConfig
from headrace.core.output import FinishReason
from headrace.core.sampling import SamplingParams
from headrace.engine.llm import LLM
from headrace.engine.load import loading_threads
from headrace.ops.numerics import Numerics
from headrace.platforms import CpuPlatform

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "tiny"
LARGEST_FILE = 16 * 2**20
TOLERANCE = 2e-4  # largest error over largest logit
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "greedy.json").read_text("utf-8"))


def test_the_files_are_those_the_golden_answers_were_made_with() -> None:
    folder = embedded_model()
    assert record_tiny.sums(folder) == (GOLDEN / "SHA256SUMS").read_text("utf-8")
    assert max(path.stat().st_size for path in folder.iterdir()) <= LARGEST_FILE
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    shards = {path.name for path in folder.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == shards and len(shards) == 2


def test_the_package_holds_the_model() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["packages"] == ["headrace"]
    assert "headrace" in build["targets"]["sdist"]["include"]
    # hatch leaves out what git ignores.
    patterns = (ROOT / ".gitignore").read_text("utf-8").split()
    names = [path.name for path in embedded_model().iterdir()]
    assert not [p for p in patterns for name in names if Path(name).match(p)]
    assert not {"assets", "assets/", "tiny/", "headrace/assets/"} & set(patterns)


def test_the_greedy_answers_are_the_golden_ones() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=record_tiny.MAX_TOKENS)
    with LLM(embedded_model(), EngineConfig(threads=1, max_model_len=2048)) as llm:
        outputs = llm.generate([case["prompt"] for case in CASES], greedy)
    assert len(CASES) == 8
    for case, output in zip(CASES, outputs, strict=True):
        assert list(output.token_ids) == case["answer"], case["family"]
        assert output.finish is FinishReason.STOP


@pytest.mark.parametrize("family", record_tiny.LOGITS_OF)
def test_logits_in_fp32_are_those_of_fp64(family: str) -> None:
    prompt = next(case["prompt"] for case in CASES if case["family"] == family)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        logits = record_tiny.last_logits(
            embedded_model(), prompt, Numerics("float32", kv_quant=False)
        )
    finally:
        torch.set_num_threads(threads)
    with np.load(GOLDEN / "logits.npz") as golden:
        expected = golden[family]
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, error


def test_the_evaluation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["eval", "tiny", "--n", "2", "--family", "arithmetic", "--jobs", "1", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (code, shown["passed"], shown["scores"][0]["items"]) == (0, True, 2)
    assert shown["model"] == "embedded"


def test_a_small_model_is_loaded_on_one_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with loading_threads(embedded_model(), EngineConfig(), CpuPlatform()):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
