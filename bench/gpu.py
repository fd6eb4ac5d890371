"""First figures of an engine on a card: load, memory, prompt, decode, where the time goes.

    python bench/gpu.py [--model DIR] [--device cuda] [--dtype float32] [--tokens 32] [--out FILE]

One JSON line a figure (`name`, `ours`, `unit`), written as soon as it is known; a figure that fails
is a line with `error`, and the exit code is 1. `gpu.load`: checkpoint to card. `gpu.weights` and
`gpu.cache`: bytes that torch holds, and `planned`, what was counted before. `gpu.prompt`: tokens a
second of one prompt of 512. `gpu.decode.B`: median seconds of a step of B requests, of
`--tokens`. `gpu.profile`: of decode steps of one request, operators by time on the card and how
often they are called. `gpu.invariant.IMPLEMENTATION`: operators whose rows have, bit for bit, the
same results in every batch here, in fp32 and bf16, on the cases of the conformance table, and those
whose rows have not: what may be declared for this platform. `gpu.attention.IMPLEMENTATION.ROWS`:
median seconds of the sparse attention of a released layer over FP4 records, bf16, and its largest
difference to the reference. `gpu.OPERATOR.IMPLEMENTATION.ROWSxENTRIES`: those of the indexer's
operators, bf16, FP4 keys. `--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 512
BATCHES = (1, 8, 32)
PROFILED_STEPS = 4
Line = dict[str, Any]


class Card:
    """The device to measure, as torch sees it."""

    def __init__(self, device: str) -> None:
        from headrace.platforms import platform_for

        self.platform = platform_for(device)
        self.is_cuda = self.platform.name == "cuda"

    def used_bytes(self) -> int:
        """What tensors take on it; 0 on a CPU."""
        import torch

        return torch.cuda.memory_allocated(self.platform.device) if self.is_cuda else 0

    def wait(self) -> None:
        """Until it has done all that was asked of it."""
        import torch

        if self.is_cuda:
            torch.cuda.synchronize(self.platform.device)


class Engines:
    """A loaded model and engines of it."""

    def __init__(self, card: Card, folder: Path, dtype: str, tokens: int) -> None:
        self.card, self.folder, self.dtype, self.tokens = card, folder, dtype, tokens

    def load(self) -> Iterator[Line]:
        """Figures of loading."""
        from headrace.model.loader import load_model
        from headrace.model.memory import weight_memory
        from headrace.ops.numerics import Numerics

        before, start_s = self.card.used_bytes(), time.perf_counter()
        self.model = load_model(self.folder, Numerics(self.dtype), platform=self.card.platform)
        self.card.wait()
        planned = weight_memory(self.model.spec, self.dtype, with_draft=False).device_bytes
        yield {"name": "gpu.load", "ours": round(time.perf_counter() - start_s, 2), "unit": "s"}
        used = self.card.used_bytes() - before
        yield {"name": "gpu.weights", "ours": used, "planned": planned, "unit": "bytes"}

    def engine(self, requests: int) -> Any:
        """An engine that takes all prompts in one step."""
        from headrace.config import EngineConfig
        from headrace.engine.engine import Engine

        config = EngineConfig(
            dtype=self.dtype,
            max_num_seqs=requests,
            max_num_batched_tokens=max(PROMPT_TOKENS, 16 * requests),
            max_model_len=PROMPT_TOKENS + 128,
            num_blocks=5 * requests + 1,
            prefix_cache=False,
        )
        return Engine(config, self.model, platform=self.card.platform)

    def cache(self) -> Iterator[Line]:
        """Bytes of a cache, counted and taken."""
        before = self.card.used_bytes()
        engine = self.engine(32)
        planned = engine.capacity.num_blocks * engine.capacity.block_bytes
        planned += engine.capacity.num_slots * engine.capacity.slot_bytes
        used = self.card.used_bytes() - before
        yield {"name": "gpu.cache", "ours": used, "planned": planned, "unit": "bytes"}

    def steps(self, requests: int, prompt: int, tokens: int) -> Iterator[float]:
        """Seconds of each step of so many equal requests."""
        from headrace.core.request import Request
        from headrace.core.sampling import SamplingParams

        engine = self.engine(requests)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        rng = np.random.default_rng(1)
        for number in range(requests):
            ids = rng.integers(3, self.model.spec.vocab_size, prompt).tolist()
            engine.add(Request(str(number), tuple(ids), params))
        while engine.has_work():
            start_s = time.perf_counter()
            engine.step()
            yield time.perf_counter() - start_s

    def prompt(self) -> Iterator[Line]:
        """Tokens a second of a prompt alone, the third time."""
        seconds = [sum(self.steps(1, PROMPT_TOKENS, 1)) for _ in range(3)][-1]
        yield {"name": "gpu.prompt", "ours": round(PROMPT_TOKENS / seconds), "unit": "tokens/s"}

    def decode(self, requests: int) -> Iterator[Line]:
        """Median of the steps behind the first four, which warm up and hold the prompts."""
        times = list(self.steps(requests, 16, self.tokens))[4:]
        yield {
            "name": f"gpu.decode.{requests}",
            "ours": round(median(times), 5),
            "spread": [round(min(times), 5), round(max(times), 5)],
            "unit": "s",
        }

    def profile(self) -> Iterator[Line]:
        """Shares of a decode step of one request."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.card.is_cuda:
            activities.append(ProfilerActivity.CUDA)
        steps = self.steps(1, 16, PROFILED_STEPS + 4)
        for _ in range(4):
            next(steps)
        with profile(activities=activities) as found:
            for _ in range(PROFILED_STEPS):
                next(steps, None)
            self.card.wait()
        key = "self_device_time_total" if self.card.is_cuda else "self_cpu_time_total"
        rows = sorted(found.key_averages(), key=lambda row: -getattr(row, key))
        total = sum(getattr(row, key) for row in rows) or 1
        yield {
            "name": "gpu.profile",
            "ours": round(total / PROFILED_STEPS / 1e6, 6),
            "unit": "s of the card a step",
            "launches": round(
                sum(r.count for r in rows if "aunchKernel" in r.key) / PROFILED_STEPS
            ),
            "shares": {r.key[:80]: round(getattr(r, key) / total, 3) for r in rows[:15]},
        }


def invariance(card: Card, name: str) -> Iterator[Line]:
    """Which operators of an implementation are batch-invariant on the card."""
    import torch

    from headrace.ops import cases
    from headrace.ops.catalogue import IMPLEMENTATIONS
    from tests.conformance.test_operators import check_rows, outputs, selections
    from tests.gpu.test_gpu_operators import on_device

    yes, no = [], {}
    for impl in IMPLEMENTATIONS:
        if impl.name != name or impl.op == "write_records":
            continue
        found = ""
        for variant in cases.CASES[impl.op]:
            if (impl.op, variant) == ("entry_scores", "sequences"):
                continue  # its rows are not all in dim 0
            for dtype in (torch.float32, torch.bfloat16):
                case = on_device(cases.build(impl.op, variant, 96, dtype), card.platform.device)
                try:
                    total = outputs(impl, case)[0].shape[0]
                    check_rows(impl, case, selections(total))
                except AssertionError as error:
                    found = found or f"{variant}, {dtype}: {error}"[:200]
                except Exception as error:
                    found = found or f"{variant}, {dtype}: {type(error).__name__} {error}"[:200]
        if found:
            no[impl.op] = found
        else:
            yes.append(impl.op)
    yield {"name": f"gpu.invariant.{name}", "ours": len(yes), "unit": "ops", "yes": yes, "no": no}


ATTENTION_ROWS = (1, 48, 192)
HEADS, WIDTH, WINDOW, TOP_K, BLOCKS, BLOCK_ROWS = 64, 512, 128, 512, 256, 64


def attention(card: Card) -> Iterator[Line]:
    """Times of sparse attention at released sizes, by implementation and rows."""
    import torch

    from headrace.core.kv import RecordFormat
    from headrace.ops.catalogue import IMPLEMENTATIONS
    from headrace.ops.records import RecordView
    from headrace.ops.reference.quant import encode_rows

    device = card.platform.device
    generator = torch.Generator().manual_seed(1)
    found = [i for i in IMPLEMENTATIONS if i.op == "sparse_attention" and i.name != "fixed_tile"]
    found = [i for i in found if {"*", card.platform.name}.intersection(i.platforms)]
    found = [i for i in found if "*" in i.dtypes or "bfloat16" in i.dtypes]
    empty = RecordView(torch.zeros(0), RecordFormat.FP4_E4M3_16, WIDTH, 64)
    numbers = torch.randn((BLOCKS * BLOCK_ROWS, WIDTH), generator=generator)
    data = encode_rows(numbers, empty)[0].view(BLOCKS, BLOCK_ROWS, -1).to(device)
    view = RecordView(data, RecordFormat.FP4_E4M3_16, WIDTH, 64)
    for rows in ATTENTION_ROWS:
        q = torch.randn((rows, HEADS, WIDTH), generator=generator).to(device, torch.bfloat16)
        window = torch.randn((rows + WINDOW, WIDTH), generator=generator)
        window = window.to(device, torch.bfloat16)
        index = (torch.arange(rows)[:, None] + torch.arange(WINDOW)).to(device)
        place = torch.rand((rows, BLOCKS * BLOCK_ROWS), generator=generator).argsort(-1)
        place = place[:, :TOP_K].sort(-1)[0].to(device)
        sink = torch.zeros(HEADS, device=device)
        where = place // BLOCK_ROWS, place % BLOCK_ROWS
        call = (q, window, index, view, *where, sink, WIDTH**-0.5)
        expected = None
        for impl in found:
            times = []
            for _ in range(8):
                watch = card.platform.stopwatch()
                out = impl.function(*call)
                watch.stop()
                times.append(watch.seconds())
            expected = out if expected is None else expected
            yield {
                "name": f"gpu.attention.{impl.name}.{rows}",
                "ours": round(median(times[3:]), 7),
                "unit": "s",
                "difference": float((out.float() - expected.float()).abs().max()),
                "largest": float(expected.float().abs().max()),
            }


# Sequences, rows of each, blocks of 128 entries: one long context, and many of middle length.
INDEXED = ((1, 6, 1024), (32, 6, 128))
INDEX_HEADS, INDEX_WIDTH, CANDIDATE_BLOCK, CANDIDATE_BLOCKS = 32, 128, 8, 2048


def indexer(card: Card) -> Iterator[Line]:
    """Times of the indexer's operators at released sizes, by implementation, rows and entries."""
    import torch

    from headrace.ops.cases import Inputs, written_view
    from headrace.ops.catalogue import IMPLEMENTATIONS
    from headrace.ops.records import RecordView

    device, i = card.platform.device, Inputs(1, torch.bfloat16)
    written = written_view(i, "fp4_ue8m0_planar", 257, 128)
    assert written.scales is not None
    scales = written.scales.to(device)
    view = RecordView(written.data.to(device), written.format, INDEX_WIDTH, scales=scales)
    for sequences, each, blocks in INDEXED:
        rows, n = sequences * each, 128 * (blocks if card.is_cuda else 4)
        q, weights = i.normal(rows, INDEX_HEADS, INDEX_WIDTH), i.normal(rows, INDEX_HEADS)
        table = i.integers(0, 256, sequences, n // 128).to(device)
        visible = torch.full((rows,), n, device=device)
        scores = i.normal(rows, n).to(device)
        calls: dict[str, tuple[Any, ...]] = {
            "entry_scores": (q.to(device), weights.to(device), view, table, visible),
            "candidate_mask": (scores, visible, CANDIDATE_BLOCK, CANDIDATE_BLOCKS),
            "select_top_k": (scores, TOP_K),
        }
        for impl in IMPLEMENTATIONS:
            if impl.op not in calls or impl.name == "fixed_tile":
                continue
            if not {"*", card.platform.name}.intersection(impl.platforms):
                continue
            if not {"*", "bfloat16"}.intersection(impl.dtypes):
                continue
            times = []
            for _ in range(8):
                watch = card.platform.stopwatch()
                impl.function(*calls[impl.op])
                watch.stop()
                times.append(watch.seconds())
            name = f"gpu.{impl.op}.{impl.name}.{rows}x{n}"
            yield {"name": name, "ours": round(median(times[3:]), 7), "unit": "s"}


def main() -> int:
    """Command line; 1 where a figure failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the embedded model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    from headrace.assets import embedded_model

    card = Card(given.device)
    env = {**asdict(card.platform.fingerprint()), "cores": card.platform.cores()}
    run = Engines(card, given.model or embedded_model(), given.dtype, given.tokens)
    figures: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("load", run.load),
        ("cache", run.cache),
        ("prompt", run.prompt),
        *((f"decode.{count}", lambda count=count: run.decode(count)) for count in BATCHES),
        ("profile", run.profile),
        ("attention", lambda: attention(card)),
        ("indexer", lambda: indexer(card)),
        ("invariant.reference", lambda: invariance(card, "reference")),
        ("invariant.fixed_tile", lambda: invariance(card, "fixed_tile")),
    ]
    failed = 0
    for name, figure in figures:
        try:
            lines = [{**line, "dtype": given.dtype} for line in figure()]
        except Exception:
            failed += 1
            lines = [{"name": f"gpu.{name}", "error": traceback.format_exc()[-1500:]}]
        for line in lines:
            text = json.dumps({**line, "env": env})
            print(json.dumps(line), flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
