"""Counted bytes of the weights are those that a loaded model keeps."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import InternalError
from headrace.model.loader import load_model
from headrace.model.memory import STORED, weight_memory
from headrace.model.tiny import write_tiny
from headrace.model.weights import EngramTable
from headrace.ops.numerics import Numerics


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


def test_stored_bytes_are_those_of_the_file(tmp_path: Path):
    write_tiny(tmp_path / "m", preset="tiny-8", seed=1)
    model = load_model(tmp_path / "m", Numerics())
    counted = weight_memory(model.spec, STORED, with_draft=True)
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    header = int.from_bytes((tmp_path / "m" / "model.safetensors").read_bytes()[:8], "little")
    assert counted.device_bytes + counted.engram_bytes == size - header - 8
    assert 0 < counted.draft_experts_bytes < counted.draft_bytes
    assert weight_memory(model.spec, STORED, with_draft=False).draft_bytes == 0


def test_unknown_format(tmp_path: Path):
    write_tiny(tmp_path / "m", preset="v4-tiny", seed=1)
    model = load_model(tmp_path / "m", Numerics())
    with pytest.raises(InternalError, match="int8"):
        weight_memory(model.spec, "int8", with_draft=False)
