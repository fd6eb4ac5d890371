"""Decoder truncation and replay after a prefix hit, on the model itself.

mask = compact; truncated prefill does not depend on chunking; `exact` replay equals a cold run;
`bounded` replay reads nothing below its start and never rewrites what other requests share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import ROW_TILE, Model
from headrace.model.loader import load_model
from headrace.ops.numerics import Numerics

EXACT = Numerics("float64", kv_quant=False)
BITWISE = Numerics("float32", kv_quant=True, batch_invariant=True)
TOTAL = 400
HIT = 256
BLOCKS = 4
TABLE = tuple(range(1, BLOCKS + 1))


@pytest.fixture(scope="module", params=["exact", "bitwise"])
def setting(request: pytest.FixtureRequest, tiny_dir: Path) -> tuple[Model, float]:
    numerics, atol = {"exact": (EXACT, 1e-10), "bitwise": (BITWISE, 0.0)}[request.param]
    return load_model(tiny_dir, numerics), atol


@pytest.fixture(scope="module")
def token_ids() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 512, size=TOTAL)


@dataclass(frozen=True)
class Plan:
    """How one sequence is run: chunks from `start`, in slot `slot`, and the positions of Batch."""

    chunks: Sequence[int]
    start: int = 0
    slot: int = 1
    window_floor: int = 0
    write_from: int = 0
    keep_from: int = 0


def new_cache(model: Model) -> KVCache:
    cache = KVCache(
        model.kv_groups(), num_blocks=BLOCKS + 1, num_slots=4, dtype=model.numerics.torch_dtype
    )
    cache.poison()
    return cache


def run(model: Model, token_ids: np.ndarray, cache: KVCache, plan: Plan) -> dict[int, Tensor]:
    """Logits by position of the rows at or after keep_from that are no replayed rows."""
    out: dict[int, Tensor] = {}
    position = plan.start
    for length in plan.chunks:
        end = position + length
        first = max(position, plan.keep_from, plan.write_from)
        row = BatchRow(
            token_ids,
            position,
            length,
            TABLE,
            plan.slot,
            "last" if first < end else "none",
            plan.window_floor,
            plan.write_from,
            plan.keep_from,
        )
        rows = [row]
        if padding := -length % model.row_tile:
            assert padding < ROW_TILE
            zeros = np.zeros(padding, dtype=np.int64)
            rows.append(BatchRow(zeros, 0, padding, [0], 0, "none"))
        logits = model.forward(Batch.build(rows, model.max_ngram), cache)
        if first < end:
            out[end - 1] = logits[0]
        position = end
    return out


def chunks(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


def assert_equal(a: dict[int, Tensor], b: dict[int, Tensor], atol: float) -> None:
    shared = sorted(a.keys() & b.keys())
    assert shared
    for position in shared:
        assert torch.isfinite(a[position]).all()
        if atol == 0:
            assert torch.equal(a[position], b[position]), position
        else:
            assert float((a[position] - b[position]).abs().max()) <= atol, position


def last(count: int, total: int) -> list[int]:
    """One chunk up to the last `count` tokens, then single tokens."""
    return [total - count] + [1] * count


def test_mask_equals_compact(setting, token_ids) -> None:
    model, atol = setting
    keep_from = TOTAL - model.spec.keep(True)
    results = []
    for by_mask in (True, False):
        model.truncate_by_mask = by_mask
        plan = Plan([*chunks(TOTAL - 8, 48), *[1] * 8], keep_from=keep_from)
        results.append(run(model, token_ids, new_cache(model), plan))
    model.truncate_by_mask = False
    assert_equal(*results, atol)


def test_truncation_is_an_approximation_that_is_seen(setting, token_ids) -> None:
    """With random weights the cut windows change the logits: the switch does something."""
    model, _ = setting
    keep_from = TOTAL - model.spec.keep(True)
    whole = run(model, token_ids, new_cache(model), Plan([TOTAL]))
    cut = run(model, token_ids, new_cache(model), Plan([TOTAL], keep_from=keep_from))
    assert not torch.equal(whole[TOTAL - 1], cut[TOTAL - 1])


@pytest.mark.parametrize("size", [7, 32, 130])
def test_truncated_prefill_does_not_depend_on_chunks(setting, token_ids, size: int) -> None:
    model, atol = setting
    keep_from = TOTAL - 20 - model.spec.keep(True)
    plans = [
        Plan(last(20, TOTAL), keep_from=keep_from),
        Plan([*chunks(TOTAL - 20, size), *[1] * 20], keep_from=keep_from),
    ]
    assert_equal(*(run(model, token_ids, new_cache(model), p) for p in plans), atol)


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("size", [64, 400])
def test_exact_replay_equals_a_cold_run(setting, token_ids, truncate: bool, size: int) -> None:
    model, atol = setting
    keep_from = TOTAL - model.spec.keep(True) if truncate else 0
    replay = model.spec.replay_rows("exact", truncate)
    cold = run(model, token_ids, new_cache(model), Plan(last(20, TOTAL), keep_from=keep_from))
    cache = new_cache(model)
    run(model, token_ids, cache, Plan([HIT]))  # another request filled the shared blocks
    start = HIT - replay
    warm = Plan(
        [*chunks(TOTAL - 20 - start, size), *[1] * 20],
        start=start,
        slot=2,
        window_floor=start,
        write_from=HIT,
        keep_from=keep_from,
    )
    assert_equal(run(model, token_ids, cache, warm), cold, atol)


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("hit", [128, 256])
def test_bounded_replay_reads_and_writes_only_its_own(
    setting, token_ids, truncate: bool, hit: int
) -> None:
    """The request's slot is all NaN before the replay; shared blocks keep every byte."""
    model, _ = setting
    keep_from = TOTAL - model.spec.keep(True) if truncate else 0
    cache = new_cache(model)
    run(model, token_ids, cache, Plan([hit]))
    shared = cache.blocks[1 : 1 + hit // 128].clone()
    start = hit - model.spec.replay_rows("bounded", truncate)
    warm = Plan(
        [*chunks(TOTAL - 20 - start, 61), *[1] * 20],
        start=start,
        slot=2,
        window_floor=start,
        write_from=hit,
        keep_from=keep_from,
    )
    logits = run(model, token_ids, cache, warm)
    assert all(torch.isfinite(x).all() for x in logits.values())
    assert torch.equal(cache.blocks[1 : 1 + hit // 128], shared)


def test_a_shorter_replay_than_exact_is_seen(setting, token_ids) -> None:
    """The `exact` length is needed: half of it changes the logits of a random model."""
    model, _ = setting
    if model.numerics != EXACT:
        return
    window, layers = model.spec.window, model.spec.replay_layers(False)
    needed = window + (layers - 1) * (window - 1)
    # The rows right behind the hit feel a short replay most.
    cold = run(model, token_ids, new_cache(model), Plan([HIT + 1, *[1] * 20]))
    errors = []
    for replay in (needed, needed // 4):
        cache = new_cache(model)
        run(model, token_ids, cache, Plan([HIT]))
        start = HIT - replay
        warm = Plan(
            [HIT + 1 - start, *[1] * 20], start=start, slot=2, window_floor=start, write_from=HIT
        )
        found = run(model, token_ids, cache, warm)
        errors.append(max(float((found[p] - cold[p]).abs().max()) for p in found))
    assert errors[0] <= 1e-10 < errors[1]
