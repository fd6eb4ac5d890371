"""Decode steps of a fixed shape give what steps of the rows alone give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.decode_step import DecodeInputs
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics

EXACT = Numerics("float64", kv_quant=False)
QUANTISED = Numerics("float32")
# Prompt lengths: before the first window is full, at the border of a block, odd, behind it.
LENGTHS = (1, 7, 126, 131, 150)
BLOCKS = 3


@pytest.fixture(scope="module", params=["tiny-8", "v4-tiny"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("decode") / "m"
    write_tiny(found, preset=request.param, seed=2)
    return found


def prefilled(model: Model, ids: np.ndarray) -> KVCache:
    """A cache that holds `LENGTHS[n]` tokens of sequence n in slot n + 1, poisoned elsewhere."""
    cache = KVCache(
        model.kv_groups(),
        num_blocks=1 + BLOCKS * len(LENGTHS),
        num_slots=1 + len(LENGTHS),
        dtype=model.numerics.torch_dtype,
    )
    cache.poison()
    rows = [
        BatchRow(ids[n], 0, length, block_table(n), n + 1, "none")
        for n, length in enumerate(LENGTHS)
    ]
    model.forward(Batch.build(rows, model.max_ngram), cache)
    return cache


def block_table(sequence: int) -> list[int]:
    first = 1 + BLOCKS * sequence
    return list(range(first, first + BLOCKS))


def fixed(model: Model, batch: Batch, sequences: int, rows: int, blocks: int) -> DecodeInputs:
    """The batch in the shape [sequences, rows] with tables of `blocks`; what it lacks holds 0."""
    flat = batch.sequence * rows + batch.positions - torch.from_numpy(batch.q_start)[batch.sequence]

    def padded(values: torch.Tensor, size: int) -> torch.Tensor:
        out = torch.zeros((size, *values.shape[1:]), dtype=values.dtype)
        out[: len(values)] = values
        return out

    def spread(values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros((sequences * rows, *values.shape[1:]), dtype=values.dtype)
        out[flat] = values
        return out

    tables = torch.zeros((sequences, blocks), dtype=torch.int64)
    tables[: len(batch.slots), : batch.block_tables.shape[1]] = batch.block_tables
    return DecodeInputs(
        token_ids=spread(batch.token_ids),
        q_start=padded(torch.from_numpy(batch.q_start), sequences),
        q_len=padded(torch.from_numpy(batch.q_len), sequences),
        slots=padded(batch.slots, sequences),
        window_floor=padded(torch.from_numpy(batch.window_floor), sequences),
        block_tables=tables,
        embedded=tuple(spread(table) for table in model.gather_engram(batch)),
    )


@pytest.mark.parametrize("numerics", [EXACT, QUANTISED], ids=["exact", "quantised"])
@pytest.mark.parametrize(
    ("q_len", "rows"),
    [((1, 1, 1, 1, 1), 1), ((3, 1, 2, 3, 2), 3), ((2, 2, 2, 2, 2), 2), ((1, 1, 1, 1, 1), 4)],
    ids=["one", "mixed", "full", "short"],
)
@pytest.mark.parametrize("extra", [0, 3])
def test_fixed_shapes_change_nothing(
    folder: Path, numerics: Numerics, q_len: tuple[int, ...], rows: int, extra: int
):
    model = load_model(folder, numerics, with_draft=True)
    ids = np.random.default_rng(5).integers(3, 500, (len(LENGTHS), max(LENGTHS) + 8))
    floors = (0, 3, 120, 0, 149)
    batch = Batch.build(
        [
            BatchRow(ids[n], length, q_len[n], block_table(n), n + 1, "all", floors[n])
            for n, length in enumerate(LENGTHS)
        ],
        model.max_ngram,
    )
    expected_cache, cache = prefilled(model, ids), prefilled(model, ids)
    expected = model.forward(batch, expected_cache)
    inputs = fixed(model, batch, len(LENGTHS) + extra, rows, BLOCKS + extra)
    logits = model.decode(inputs, cache).unflatten(0, (-1, rows))
    found = torch.cat([logits[n, :count] for n, count in enumerate(q_len)])
    tolerance = 1e-10 if numerics is EXACT else 2e-4
    assert float((found - expected).abs().max()) <= tolerance
    if numerics is EXACT:
        same_rows(cache, expected_cache)


def same_rows(found: KVCache, expected: KVCache) -> None:
    """All that requests own, as numbers: block 0 and slot 0 are nobody's."""
    for arena, other in ((found.blocks, expected.blocks), (found.slots, expected.slots)):
        ours, theirs = arena[1:].view(torch.float64), other[1:].view(torch.float64)
        assert ours.isnan().equal(theirs.isnan())
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("overrides", [{}, {"candidate_mask": "reference"}], ids=str)
def test_rows_behind_the_end_of_a_table(folder: Path, overrides: dict[str, str]):
    """Drafts that a sequence does not have may lie where its table has no block."""
    model = load_model(folder, EXACT, op_overrides=overrides)
    ids = np.random.default_rng(6).integers(3, 500, 384)
    batch = Batch.build([BatchRow(ids, 383, 1, [1, 2, 3], 1)], model.max_ngram)
    caches = []
    for _ in range(2):
        cache = KVCache(model.kv_groups(), num_blocks=4, num_slots=2, dtype=torch.float64)
        cache.poison()
        prompt = BatchRow(ids, 0, 383, [1, 2, 3], 1, "none")
        model.forward(Batch.build([prompt], model.max_ngram), cache)
        caches.append(cache)
    expected = model.forward(batch, caches[0])
    logits = model.decode(fixed(model, batch, 1, 4, 3), caches[1])
    assert float((logits[:1] - expected).abs().max()) <= 1e-10
    same_rows(caches[1], caches[0])
