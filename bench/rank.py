"""One rank of DeepSeek-V4.1-Flash on one card: load, memory, a prompt, decode steps, a profile.

    python bench/rank.py [--experts 48] [--layers 40] [--requests 1 32 128] [--rows 6]
        [--prompt 8192] [--chunk 4096] [--device cuda] [--out FILE]

The model has the released widths and depth, `--experts` of its 384 routed experts (48: a rank of
eight) and random weights, drawn on the card in the checkpoint's formats (FP4 experts, FP8 dense,
FP4 cache). No draft module, no exchange with other ranks. One JSON line a figure, written as soon
as it is known; a figure that fails is a line with `error`, and the exit code is 1.

`rank.load`: seconds. `rank.weights`, `rank.cache`, `rank.total`: bytes that the card shows
(`cudaMemGetInfo`) and what `headrace plan memory` counted. `rank.prefill`: seconds of a prompt, the
second time, through the engine. `rank.decode.B`: seconds of a replayed step of B sequences of
`--rows` rows behind that prompt, on the card (events) and as the host sees it with its inputs.
`rank.profile.B`: kernels of such a step by their share. `--tiny` takes tiny-8: to try the script
out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
REPLAYS = 15
PROFILED = 3
KERNELS = 40
Line = dict[str, Any]


class Rank:
    """The card, its model, and a cache that holds a prompt for every sequence."""

    def __init__(self, given: argparse.Namespace) -> None:
        import torch

        from headrace.model.spec import ModelSpec
        from headrace.ops.numerics import Numerics
        from headrace.platforms import platform_for

        self.given = given
        self.platform = platform_for(given.device)
        self.is_cuda = self.platform.name == "cuda"
        self.spec = ModelSpec.from_config(config(given))
        self.numerics = Numerics("bfloat16" if self.is_cuda else "float32")
        if self.is_cuda:
            torch.zeros(1, device=self.platform.device)
        self.sampled = self.used_bytes()

    def used_bytes(self) -> int:
        """What the card shows as taken; 0 on a CPU."""
        import torch

        if not self.is_cuda:
            return 0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(self.platform.device)
        return total - free

    def load(self) -> Iterator[Line]:
        """Draw the weights."""
        from headrace.engine.memory_plan import plan_memory
        from headrace.model.loader import random_model

        start_s = time.perf_counter()
        self.model = random_model(self.spec, self.numerics, self.platform, keep_stored=self.is_cuda)
        used = self.used_bytes()
        yield {"name": "rank.load", "ours": round(time.perf_counter() - start_s, 2), "unit": "s"}
        total = self.platform.memory(self.platform.device).total_bytes
        self.plan = plan_memory(
            self.spec, gpus=1, gpu_bytes=total, with_draft=False, context=self.given.prompt
        )
        row = self.plan.rows[0]
        planned = row.experts_bytes + row.dense_bytes
        yield bytes_line("rank.weights", used - self.sampled, planned)
        yield bytes_line("rank.loaded", used, planned + context_bytes())
        yield {"name": "rank.context", "ours": self.sampled, "unit": "bytes"}

    def engine(self, blocks: int | None) -> Any:
        """An engine of this model."""
        from headrace.config import EngineConfig
        from headrace.engine.engine import Engine

        limits = {} if blocks is None else {"max_model_len": self.given.prompt + 256}
        settings = EngineConfig(
            dtype=self.numerics.dtype,
            device=self.given.device,
            max_num_seqs=max(self.given.requests),
            max_num_batched_tokens=max(self.given.chunk, max(self.given.requests)),
            num_blocks=blocks,
            prefix_cache=False,
            **limits,
        )
        return Engine(settings, self.model, platform=self.platform)

    def cache(self) -> Iterator[Line]:
        """The cache of an engine that takes all that is left."""
        before = self.used_bytes()
        engine = self.engine(None)
        used = self.used_bytes()
        yield bytes_line("rank.cache", used - before, self.plan.rows[0].kv_bytes)
        row = self.plan.rows[0]
        planned = row.experts_bytes + row.dense_bytes + row.kv_bytes + context_bytes()
        yield bytes_line("rank.total", used, planned)
        yield {
            "name": "rank.blocks",
            "ours": engine.capacity.num_blocks,
            "planned": row.blocks,
            "unit": "blocks",
        }
        del engine
        self.free()

    def free(self) -> None:
        """Give back what nobody uses."""
        import gc

        import torch

        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def prefill(self) -> Iterator[Line]:
        """A prompt alone, the first time (kernels are compiled) and again."""
        import torch

        from headrace.core.request import Request
        from headrace.core.sampling import SamplingParams

        engine = self.engine(2 * (-(-self.given.prompt // 128) + 3))
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        before = self.used_bytes()
        rng = np.random.default_rng(1)
        seconds = []
        for number in range(3):
            ids = rng.integers(3, self.spec.vocab_size, self.given.prompt).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            engine.add(Request(str(number), tuple(ids), params))
            start_s = time.perf_counter()
            while engine.has_work():
                engine.step()
            seconds.append(time.perf_counter() - start_s)
        line = {
            "name": "rank.prefill",
            "ours": round(min(seconds[1:]), 4),
            "first": round(seconds[0], 2),
            "tokens": self.given.prompt,
            "chunk": self.given.chunk,
            "unit": "s",
        }
        if self.is_cuda:
            line["scratch_bytes"] = self.used_bytes() - before  # what torch keeps for the next one
            line["peak_bytes"] = torch.cuda.max_memory_reserved()
        yield line
        del engine
        self.free()

    def filled(self, sequences: int) -> Any:
        """A cache in which every sequence holds a prompt: one is computed, the others copied."""
        from headrace.kv.cache import KVCache
        from headrace.model.batch import Batch, BatchRow

        each = -(-(self.given.prompt + self.given.rows) // 128)
        cache = KVCache(
            self.model.kv_groups(),
            num_blocks=1 + sequences * each,
            num_slots=1 + sequences,
            dtype=self.numerics.torch_dtype,
            device=self.platform.device,
        )
        ids = np.random.default_rng(2).integers(3, self.spec.vocab_size, self.given.prompt)
        for start in range(0, len(ids), self.given.chunk):
            count = min(self.given.chunk, len(ids) - start)
            row = BatchRow(ids, start, count, list(range(1, 1 + each)), 1, "none")
            self.model.forward(Batch.build([row], self.model.max_ngram), cache)
        for number in range(1, sequences):
            cache.copy_blocks([(1 + n, 1 + number * each + n) for n in range(each)])
        cache.copy_slots([(1, 1 + number) for number in range(1, sequences)])
        return cache, each

    def batch(self, sequences: int, rows: int, each: int) -> Any:
        """A decode step behind the prompts."""
        from headrace.model.batch import Batch, BatchRow

        rng = np.random.default_rng(3)
        length = self.given.prompt + rows
        shares = [
            BatchRow(
                rng.integers(3, self.spec.vocab_size, length),
                self.given.prompt,
                rows,
                list(range(1 + n * each, 1 + (n + 1) * each)),
                1 + n,
                "all",
            )
            for n in range(sequences)
        ]
        return Batch.build(shares, self.model.max_ngram)

    def decode(self, sequences: int, rows: int) -> Iterator[Line]:
        """Times of a recorded step, and its kernels."""
        import torch

        from headrace.engine.graphs import DecodeGraphs

        with torch.inference_mode():
            cache, each = self.filled(sequences)
            graphs = DecodeGraphs(
                self.model,
                cache,
                self.platform,
                max_sequences=sequences,
                max_rows=rows,
                max_blocks=each,
                guarded=True,
            )
            batch = self.batch(sequences, rows, each)
            start_s = time.perf_counter()
            logits = graphs.run(batch)
            finite = bool(logits.isfinite().all())
            recorded_s = time.perf_counter() - start_s
            device, host = [], []
            for _ in range(REPLAYS):
                start_s = time.perf_counter()
                watch = self.platform.stopwatch()
                graphs.run(batch)
                watch.stop()
                host.append(time.perf_counter() - start_s)
                device.append(watch.seconds())
            name = f"rank.decode.{sequences}x{rows}"
            yield {
                "name": name,
                "ours": round(median(device), 6),
                "spread": [round(min(device), 6), round(max(device), 6)],
                "host": round(median(host), 6),
                "recorded": round(recorded_s, 2),
                "finite": finite,
                "prompt": self.given.prompt,
                "n": REPLAYS,
                "unit": "s",
            }
            yield from self.profile(name.replace("decode", "profile"), partial(graphs.run, batch))
        del graphs, cache
        self.free()

    def profile(self, name: str, step: Callable[[], Any]) -> Iterator[Line]:
        """Kernels of a step by their share of its time on the card."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CUDA] if self.is_cuda else [ProfilerActivity.CPU]
        with profile(activities=kinds) as found:
            for _ in range(PROFILED):
                step()
                if self.is_cuda:  # the next one's inputs take the place of these
                    torch.cuda.synchronize()
        key = "self_device_time_total" if self.is_cuda else "self_cpu_time_total"
        rows = sorted(found.key_averages(), key=lambda row: -getattr(row, key))
        rows = [row for row in rows if getattr(row, key) > 0]
        total = sum(getattr(row, key) for row in rows) or 1
        yield {
            "name": name,
            "ours": round(total / PROFILED / 1e6, 6),
            "unit": "s of kernels a step",
            "launches": round(sum(row.count for row in rows) / PROFILED),
            "kernels": [
                [r.key[:70], round(getattr(r, key) / total, 4), round(r.count / PROFILED)]
                for r in rows[:KERNELS]
            ],
        }


def context_bytes() -> int:
    """What the plan counts for CUDA and torch."""
    from headrace.engine.memory_plan import CONTEXT_BYTES

    return CONTEXT_BYTES


def bytes_line(name: str, used: int, planned: int) -> Line:
    """A figure beside its plan."""
    ratio = round(used / planned, 4) if planned else 0.0
    return {"name": name, "ours": used, "planned": planned, "ratio": ratio, "unit": "bytes"}


def config(given: argparse.Namespace) -> dict[str, Any]:
    """config.json of the rank."""
    from headrace.model.tiny_presets import preset_config
    from tests.unit.model.released_configs import v41_flash

    if given.tiny:
        return preset_config("tiny-8", quantised=True, compressed_vocab=300)
    found = v41_flash()
    found["text_config"]["n_routed_experts"] = given.experts
    return found


def main() -> int:
    """Command line; 1 where a figure failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    rank = Rank(given)
    env = {**asdict(rank.platform.fingerprint()), "date": time.strftime("%Y-%m-%d")}
    figures: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("load", rank.load),
        ("cache", rank.cache),
        ("prefill", rank.prefill),
        *((f"decode.{n}", lambda n=n: rank.decode(n, given.rows)) for n in given.requests),
        ("decode.plain", lambda: rank.decode(given.requests[0], 1)),
    ]
    failed = 0
    for name, figure in figures:
        lines = figure()
        while True:
            try:
                line = next(lines, None)
            except Exception:
                failed += 1
                line = {"name": f"rank.{name}", "error": traceback.format_exc()[-3000:]}
                lines = iter(())
            if line is None:
                break
            print(json.dumps(line), flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, "env": env}) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
