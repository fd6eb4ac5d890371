"""Cost of batch invariance on a CPU: fixed-tile operators against the reference.

    python bench/fixed_tile.py [--pairs 15] [--model DIR]

Measures a linear layer, sparse attention and a whole decode step at 1, 8 and 32 rows, one thread.
Both sides run in turn, so that a slow moment of the machine hits both. Times are medians in seconds
of CPU time, which other processes lengthen less than the clock; `ratio` is the median of ours /
peer over the pairs, `spread` the smallest and the largest. One JSON line per measurement. Without
--model a tiny random checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch

from headrace.engine.inputs import INVARIANT_ROW_MULTIPLE
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops import cases
from headrace.ops.cpu import fixed_tile
from headrace.ops.numerics import Numerics
from headrace.ops.reference import attention, norm

ROWS = (1, 8, 32)
CONTEXT = 120  # tokens before the decode step: one block, which also holds the step itself
# Released shapes: q_lora_rank -> a slice of the query heads; head_dim, window + top-k keys.
LINEAR = (1280, 4096)
HEADS, TOP_K = 64, 512

Call = Callable[[], object]


def compare(ours: Call, peer: Call, pairs: int) -> dict[str, object]:
    """Median times, median ratio and its range over `pairs` interleaved calls."""
    ours()
    peer()
    found = []
    for number in range(pairs):
        # The order alternates: neither side always runs on the other's warm caches.
        order = (ours, peer) if number % 2 == 0 else (peer, ours)
        seconds = {call: _seconds(call) for call in order}
        found.append((seconds[ours], seconds[peer]))
    ratios = [a / b for a, b in found]
    return {
        "ours": median(a for a, _ in found),
        "peer": median(b for _, b in found),
        "ratio": round(median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "n": pairs,
    }


def _seconds(call: Call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def linear(rows: int) -> tuple[Call, Call]:
    """Activations [rows, 1280] times a weight [4096, 1280], fp32."""
    i = cases.Inputs(1, torch.float32)
    x, weight = i.normal(rows, LINEAR[0]), i.weight(LINEAR[1], LINEAR[0])
    return lambda: fixed_tile.linear(x, weight), lambda: norm.linear(x, weight)


def sparse_attention(rows: int) -> tuple[Call, Call]:
    """64 heads of 512 over 128 window keys and 512 entries in FP4, fp32."""
    i = cases.Inputs(2, torch.float32)
    view = cases.written_view(i, "fp4_e4m3_released", 9, 128)
    q, window = i.normal(rows, HEADS, 512), i.normal(rows + 128, 512)
    index = torch.arange(rows).unsqueeze(-1) + torch.arange(128)
    place = i.distinct(rows, TOP_K, 1024).sort()[0]
    args = (q, window, index, view, place // 128, place % 128, i.wide(HEADS), 512**-0.5)
    return lambda: fixed_tile.sparse_attention(*args), lambda: attention.sparse_attention(*args)


def step(directory: Path, rows: int, batch_invariant: bool) -> Call:
    """A decode step of `rows` sequences as the engine runs it (fp32, quantised KV)."""
    model = load_model(directory, Numerics(batch_invariant=batch_invariant))
    cache = KVCache(
        model.kv_groups(),
        num_blocks=rows + 1,
        num_slots=rows + 1,
        dtype=model.numerics.torch_dtype,
    )
    ids = np.random.default_rng(3).integers(0, model.spec.vocab_size, (rows, CONTEXT + 1))

    def batch(start: int, length: int) -> Batch:
        found = [BatchRow(ids[b], start, length, [b + 1], b + 1) for b in range(rows)]
        padding = -rows * length % INVARIANT_ROW_MULTIPLE if batch_invariant else 0
        if padding:
            found.append(BatchRow(np.zeros(padding, np.int64), 0, padding, [0], 0, "none"))
        return Batch.build(found, model.max_ngram)

    model.forward(batch(0, CONTEXT), cache)
    decode = batch(CONTEXT, 1)
    return lambda: model.forward(decode, cache)


def measurements(directory: Path, pairs: int) -> Iterator[dict[str, object]]:
    """All measurements, each ready to print."""
    env = {
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    for rows in ROWS:
        sides = {
            "linear": linear(rows),
            "sparse_attention": sparse_attention(rows),
            "step": (step(directory, rows, True), step(directory, rows, False)),
        }
        for name, (ours, peer) in sides.items():
            yield {"name": f"{name}, {rows} rows", **compare(ours, peer, pairs), "env": env}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="measured pairs (default 15)")
    parser.add_argument("--model", type=Path, help="checkpoint of the whole step (default tiny-8)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model
        if directory is None:
            directory = Path(scratch) / "tiny-8"
            write_tiny(directory, preset="tiny-8", quantised=False)
        for line in measurements(directory, arguments.pairs):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
