"""Random steps on caches of random numbers: fixed shapes write and give what `forward` does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace.engine.graphs import DecodeGraphs
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics
from headrace.platforms import CpuPlatform

# Blocks of the longest table: around a rung of the ladder too.
BLOCKS = (1, 3, 8, 9, 20)
SEQUENCES = (1, 2, 3, 5, 9)
BLOCK_TOKENS = 128


@pytest.fixture(scope="module", params=["tiny-8", "v4-tiny"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("steps") / "m"
    write_tiny(folder, preset=request.param, seed=3)
    return load_model(folder, Numerics("float64", kv_quant=False), with_draft=True)


def cache_of(model: Model, blocks: int, slots: int, seed: int) -> KVCache:
    """Random numbers in all that requests may own, NaN in block 0 and slot 0."""
    made = KVCache(
        model.kv_groups(), num_blocks=blocks, num_slots=slots, dtype=model.numerics.torch_dtype
    )
    made.poison()
    generator = torch.Generator().manual_seed(seed)
    for arena in (made.blocks, made.slots):
        arena[1:].view(torch.float64).normal_(generator=generator)
    return made


def random_row(
    r: random.Random, window: int, most: int, longest: int, free: list[int], slot: int
) -> BatchRow:
    """A sequence's share, often at the border of a window, a block or the longest table."""
    q_len = r.randrange(1, most + 1)
    end = longest * BLOCK_TOKENS
    borders = (0, 1, window - 1, window, BLOCK_TOKENS - q_len, BLOCK_TOKENS, end - q_len)
    start = max(0, min(r.choice((*borders, r.randrange(end))), end - q_len))
    count = min(longest, -(-(start + q_len) // BLOCK_TOKENS) + r.randrange(2))
    return BatchRow(
        np.array([r.randrange(3, 500) for _ in range(start + q_len)]),
        start,
        q_len,
        [free.pop() for _ in range(count)],
        slot,
        r.choice(("all", "last", "none")),
        window_floor=r.choice((0, max(0, start - r.randrange(2 * window)), start)),
        write_from=r.choice((0, start)),
        keep_from=r.choice((0, max(0, start - window + 1), max(0, start - 2 * window))),
    )


@pytest.mark.parametrize("seed", range(15))
def test_random_steps(model: Model, seed: int):
    r = random.Random(seed)
    longest, sequences = r.choice(BLOCKS), r.choice(SEQUENCES)
    most = 1 + (model.spec.draft.block_size if model.spec.draft is not None else 0)
    blocks = 1 + longest * sequences
    ours, theirs = (cache_of(model, blocks, sequences + 1, seed) for _ in range(2))
    graphs = DecodeGraphs(
        model,
        ours,
        CpuPlatform(),
        max_sequences=sequences + r.randrange(8),
        max_rows=most,
        max_blocks=longest + r.randrange(30),
    )
    for _ in range(3):
        free = r.sample(range(1, blocks), blocks - 1)
        slots = r.sample(range(1, sequences + 1), r.randrange(1, sequences + 1))
        rows = [random_row(r, model.spec.window, most, longest, free, slot) for slot in slots]
        batch = Batch.build(rows, model.max_ngram)
        with torch.inference_mode():
            found = graphs.run(batch)
            if found is None:
                assert not len(batch.logit_rows)
                continue
            expected = model.forward(batch, theirs)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
        for arena in ("blocks", "slots"):
            a, b = (getattr(cache, arena)[1:].view(torch.float64) for cache in (ours, theirs))
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)
