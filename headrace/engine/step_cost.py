"""What a step costs on this machine, measured before the first request.

Contract: `measure_cost` runs the model on a small cache of its own: forward passes by rows and
draft passes by requests, from one up, until all sizes or a time budget are used up; beyond the last
size the curves go on as they ended. Only `adaptive` speculation needs it. Called by
`engine/load.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from headrace.engine.graphs import DecodeGraphs
from headrace.engine.inputs import INVARIANT_ROW_MULTIPLE
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Curve, default_sizes, measure
from headrace.kv.cache import KVCache
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.platforms import CpuPlatform, Platform

CONTEXT_TOKENS = 100  # of each request in the measured steps
REPEATS = 3
# Of each curve: as long as this many steps of one row take, so that a start is not felt where steps
# are short and large steps are reached where they are hardly dearer, but never more than MOST_S.
BUDGET_STEPS = 40
MOST_S = 2.0


def measure_cost(
    model: Model,
    draft_length: int,
    max_num_seqs: int,
    max_rows: int,
    platform: Platform | None = None,
    *,
    recorded: bool = False,
) -> StepCost:
    """Curves of a model with its draft module.

    draft_length: drafts of a block. max_num_seqs: requests of a step at most. max_rows: its rows.
    platform: that the model is loaded for, None: the CPU. recorded: whether steps are graphs.
    """
    platform = CpuPlatform() if platform is None else platform
    stopwatch = platform.stopwatch
    each = draft_length + 1
    requests = min(max_num_seqs, -(-max_rows // each))
    blocks = -(-(CONTEXT_TOKENS + each) // BLOCK_TOKENS)  # of a request
    cache = KVCache(
        model.kv_groups(),
        num_blocks=requests * blocks + 1,
        num_slots=requests + 1,
        dtype=model.numerics.torch_dtype,
        device=model.device,
    )
    graphs = None
    if recorded:
        graphs = DecodeGraphs(
            model, cache, platform, max_sequences=requests, max_rows=each, max_blocks=blocks
        )
    tile = INVARIANT_ROW_MULTIPLE if model.numerics.batch_invariant else 1
    ids = np.zeros(CONTEXT_TOKENS + max(each, tile), dtype=np.int64)

    def timed(run: Callable[[], object]) -> float:
        watch = stopwatch()
        run()
        watch.stop()
        return watch.seconds()

    def forward(rows: int) -> float:
        shares = []
        for slot in range(1, -(-rows // each) + 1):
            count = min(each, rows - (slot - 1) * each)
            table = range(1 + (slot - 1) * blocks, 1 + slot * blocks)
            shares.append(BatchRow(ids, CONTEXT_TOKENS, count, table, slot, "all"))
        if padding := -rows % tile:
            shares.append(BatchRow(ids, 0, padding, [0], 0, "none"))
        batch = Batch.build(shares, model.max_ngram)
        run: Callable[[], object] = partial(model.forward, batch, cache)
        if graphs is not None:
            run = partial(graphs.run, batch)
            timed(run)  # records its shape, if it is new; inputs hold until the device has run
        return timed(run)

    def draft(count: int) -> float:
        slots = torch.arange(1, count + 1)
        newest = torch.zeros(count, dtype=torch.int64)
        places = torch.full_like(newest, CONTEXT_TOKENS)
        return timed(partial(model.draft, newest, places, slots, cache, length=draft_length))

    with torch.inference_mode():
        verify = _measured(forward, min(max_rows, requests * each))
        return StepCost(verify, _measured(draft, requests))


def _measured(run: Callable[[int], float], most: int) -> Curve:
    budget_s = min(MOST_S, BUDGET_STEPS * run(1))
    return measure(run, default_sizes(most), repeats=REPEATS, warmup=0, budget_s=budget_s)
