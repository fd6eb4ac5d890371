"""Engines whose weights stay as the checkpoint stores them, on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.sampling import SamplingParams
from headrace.engine.llm import LLM
from headrace.model.tiny import write_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("preset", ["tiny-8", "v4-tiny"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_answers_are_those_of_converted_weights(
    tmp_path: Path, preset: str, dtype: str, quantised: bool
):
    """Codes times scales are exact in each dtype; sums come in other orders."""
    write_tiny(tmp_path / "m", preset=preset, seed=3, quantised=quantised)
    prompts = np.random.default_rng(3).integers(3, 500, (3, 40)).tolist()
    found = {}
    for weights in ("stored", "converted"):
        config = EngineConfig(dtype=dtype, weights=weights, kv_quant=False, num_blocks=9, seed=1)
        with LLM(tmp_path / "m", config) as llm:
            found[weights] = [
                np.array([entry.logprob for entry in answer.logprobs])
                for answer in llm.generate(prompts, GREEDY)
            ]
    tolerance = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.5}[dtype]
    for ours, theirs in zip(found["stored"], found["converted"], strict=True):
        count = len(ours) if dtype == "float64" else 1  # tokens may differ later
        assert np.abs(ours - theirs)[:count].max() <= tolerance
