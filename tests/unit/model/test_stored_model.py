"""A model whose matrices stay as they are stored computes what one with their numbers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics
from headrace.ops.signatures import OPS
from headrace.ops.stored_weights import StoredWeight

# Those of a CPU take numbers.
PLAIN = dict.fromkeys(OPS, "reference")


def logits(model: Model) -> torch.Tensor:
    cache = KVCache(model.kv_groups(), num_blocks=3, num_slots=2, dtype=model.numerics.torch_dtype)
    ids = np.random.default_rng(3).integers(3, 500, 140)
    row = BatchRow(ids, 0, len(ids), [1, 2], slot=1, logits="all")
    return model.forward(Batch.build([row], model.max_ngram), cache)


@pytest.mark.parametrize("preset", ["tiny-8", "v4-tiny"])
@pytest.mark.parametrize(
    "numerics",
    [
        Numerics("float64", kv_quant=False),
        Numerics("float32"),
        Numerics("bfloat16", act_quant=True),
    ],
    ids=["fp64", "fp32", "released"],
)
def test_bits_are_those_of_converted_weights(tmp_path: Path, preset: str, numerics: Numerics):
    write_tiny(tmp_path / "m", preset=preset, seed=4)
    stored, converted = (
        load_model(tmp_path / "m", numerics, op_overrides=PLAIN, keep_stored=keep)
        for keep in (True, False)
    )
    assert logits(stored).equal(logits(converted))


def test_without_quantisation_there_is_nothing_to_keep(tmp_path: Path):
    write_tiny(tmp_path / "m", preset="tiny-8", seed=4, quantised=False)
    numerics = Numerics("float32")
    stored = load_model(tmp_path / "m", numerics, op_overrides=PLAIN, keep_stored=True)
    converted = load_model(tmp_path / "m", numerics, op_overrides=PLAIN)
    assert not isinstance(stored._layers[0].moe.w2, StoredWeight)
    assert logits(stored).equal(logits(converted))
