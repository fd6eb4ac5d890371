"""Weights without a checkpoint have its shapes, formats and order of magnitude."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.model.random_weights import RandomWeights
from headrace.model.spec import ModelSpec
from headrace.model.tiny import write_tiny
from headrace.model.weight_plan import planned_tensors
from headrace.model.weights import Checkpoint


@pytest.fixture(scope="module", params=["tiny-8", "v4-tiny"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("stored") / "m"
    write_tiny(folder, preset=request.param, seed=1)
    return Checkpoint.open(folder, ModelSpec.from_directory(folder))


def test_stored_weights_are_the_numbers_of_the_file(checkpoint: Checkpoint):
    stored = 0
    for tensor in planned_tensors(checkpoint.spec):
        if tensor.kind == "engram":
            continue
        found = checkpoint.stored_weight(tensor.name)
        assert (found is not None) == (tensor.kind in ("linear", "expert"))
        if found is not None:
            stored += 1
            assert found.shape == tensor.shape
            expected = checkpoint.dequantised(tensor.name, torch.float32)
            assert found.numbers(torch.float32).equal(expected)
    assert stored > 50


def test_random_weights_have_the_shapes_and_formats_of_a_checkpoint(checkpoint: Checkpoint):
    drawn, again = (RandomWeights(checkpoint.spec, seed=4) for _ in range(2))
    other = RandomWeights(checkpoint.spec, seed=5)
    for tensor in planned_tensors(checkpoint.spec):
        name = tensor.name
        assert drawn.shape(name) == tensor.shape
        if tensor.kind == "engram":
            continue
        numbers = drawn.dequantised(name, torch.float32)
        assert numbers.shape == tensor.shape
        assert numbers.isfinite().all()
        assert numbers.equal(again.dequantised(name, torch.float32))
        assert not numbers.equal(other.dequantised(name, torch.float32))
        ours, theirs = drawn.stored_weight(name), checkpoint.stored_weight(name)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.format, ours.block) == (theirs.format, theirs.block)
            assert ours.codes.shape == theirs.codes.shape
            assert ours.scales.shape == theirs.scales.shape
            gain = float(ours.numbers(torch.float32).square().sum(-1).mean().sqrt())
            assert 0.6 < gain < 1.6


def test_tables_stand_for_longer_ones(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    layers = [layer.index for layer in checkpoint.spec.layers if layer.engram]
    monkeypatch.setattr("headrace.model.random_weights.ENGRAM_ROWS", 100)
    for layer in layers:
        table = RandomWeights(checkpoint.spec).engram_rows(layer)
        assert table.rows == 100
        rows = torch.tensor([[3, 103], [99, 1099]])
        found = table.gather(rows)
        assert found.shape[:2] == (2, 2)
        assert found[:, 0].equal(found[:, 1])
        assert found.isfinite().all()
        assert table.numbers(table.gather_stored(rows), torch.float32).equal(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_decoded_later_are_those_decoded_at_once(checkpoint: Checkpoint, dtype: torch.dtype):
    for layer in checkpoint.spec.layers:
        if layer.engram:
            table = checkpoint.engram_rows(layer.index)
            rows = torch.randint(0, table.rows, (7, 4), generator=torch.Generator().manual_seed(1))
            stored = table.gather_stored(rows)
            assert stored.shape[:2] == (7, 4)
            assert table.numbers(stored, dtype).equal(table.gather(rows, dtype))
