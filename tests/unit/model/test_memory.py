"""Counted bytes of the weights are those that a loaded model keeps."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import InternalError
from headrace.model.loader import load_model, random_model
from headrace.model.memory import STORED, weight_memory
from headrace.model.tiny import write_tiny
from headrace.model.weights import EngramTable
from headrace.ops.numerics import Numerics
from headrace.platforms import CpuPlatform


def kept_bytes(model: Any) -> int:
    """Of all tensors of a model, shared memory counted once; without what the host keeps."""
    found: dict[int, int] = {}
    waiting = [value for name, value in vars(model).items() if name != "_token_map"]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.numel() and not (value.dtype == torch.int64 and value.dim() == 1):
                found[value.untyped_storage().data_ptr()] = max(
                    found.get(value.untyped_storage().data_ptr(), 0), value.nbytes
                )
        elif isinstance(value, (tuple, list)):
            waiting += value
        elif is_dataclass(value) and not isinstance(value, (type, EngramTable)):
            waiting += [
                getattr(value, f.name)
                for f in fields(value)
                if f.name not in ("multipliers", "primes", "offsets", "table", "spec")
            ]
    return sum(found.values())


@pytest.mark.parametrize("preset", ["tiny-8", "v4-tiny"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("with_draft", [True, False])
def test_counted_is_kept(tmp_path: Path, preset: str, dtype: str, with_draft: bool):
    write_tiny(tmp_path / "m", preset=preset, seed=1)
    model = load_model(tmp_path / "m", Numerics(dtype), with_draft=with_draft)
    counted = weight_memory(model.spec, dtype, with_draft=with_draft)
    # Scales of the hyper-connections, 3 numbers each, are kept once per row.
    assert counted.device_bytes == pytest.approx(kept_bytes(model), rel=1e-3)


@pytest.mark.parametrize("preset", ["tiny-8", "v4-tiny"])
@pytest.mark.parametrize("with_draft", [True, False])
def test_counted_is_kept_as_stored(tmp_path: Path, preset: str, with_draft: bool):
    write_tiny(tmp_path / "m", preset=preset, seed=1)
    numerics = Numerics("bfloat16")
    model = load_model(tmp_path / "m", numerics, with_draft=with_draft, keep_stored=True)
    counted = weight_memory(model.spec, STORED, with_draft=with_draft)
    assert counted.device_bytes == pytest.approx(kept_bytes(model), rel=1e-3)
    drawn = random_model(
        model.spec, numerics, CpuPlatform(), with_draft=with_draft, keep_stored=True
    )
    assert kept_bytes(drawn) == kept_bytes(model)
    whole = weight_memory(model.spec, "bfloat16", with_draft=with_draft)
    assert counted.experts_bytes < 0.3 * whole.experts_bytes
    assert (0 < counted.draft_experts_bytes < counted.draft_bytes) == (
        with_draft and model.spec.draft is not None
    )


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_counted_is_kept_as_stored_in_other_dtypes(tmp_path: Path, quantised: bool, dtype: str):
    """What the checkpoint does not quantise is kept in the model's dtype."""
    write_tiny(tmp_path / "m", preset="v4-tiny", quantised=quantised, seed=1)
    model = load_model(tmp_path / "m", Numerics(dtype), keep_stored=True)
    counted = weight_memory(model.spec, STORED, with_draft=False, dtype=dtype)
    assert counted.device_bytes == pytest.approx(kept_bytes(model), rel=1e-3)


def test_unknown_format(tmp_path: Path):
    write_tiny(tmp_path / "m", preset="v4-tiny", seed=1)
    model = load_model(tmp_path / "m", Numerics())
    with pytest.raises(InternalError, match="int8"):
        weight_memory(model.spec, "int8", with_draft=False)
