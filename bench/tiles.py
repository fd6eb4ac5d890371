"""Which tile each Triton kernel should take on a card: times of candidates at released sizes.

    python bench/tiles.py [--seconds 150] [--workers 15] [--only NAME ..] [--out FILE]
        [--compile-only]

Kernels of one EP8 rank of DeepSeek-V4.1-Flash: sparse attention over FP4 records (decode and
prefill), the routed experts (`activate`, `project`; 48 experts in FP4, top-6), the shared expert,
the projections in FP8 and the head, at decode and prefill row counts. Candidates are compiled
first, for the card but without it, by `--workers` processes that share Triton's cache. Then one
process checks each against the present choice (relative to the largest magnitude) and times it:
graphs of calls over input sets that together exceed the L2 cache, the median of replays.

One line a kernel and row count is printed: the best candidate, its time, the present time, and the
floor (bytes at 4241 GB/s or bf16 products at 768 TFLOP/s, measured on an H200). `--out` gets a JSON
line for every candidate. When `--seconds` are over, what was not timed is named.
`--compile-only` stops behind the compilation, which needs no card.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from headrace.core.kv import RecordFormat  # noqa: E402
from headrace.ops.records import RecordView  # noqa: E402
from headrace.ops.stored_weights import StoredWeight, Weight, WeightFormat  # noqa: E402

BYTES_PER_S, FLOPS = 4.241e12, 7.68e14
COLD_BYTES = 160 << 20  # three times the L2 cache
MOST_SETS = 64
HEADS, WIDTH, WINDOW, TOP_K = 64, 512, 128, 512
MODEL, INNER, EXPERTS, CHOSEN = 5120, 2304, 48, 6
LIMIT = 10.0
TOLERANCE = 2e-2
Line = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A kernel at a size. choices: the present one first.

    make(device, small): one set of inputs. call: what is timed. floor_s: its least time.
    """

    name: str
    rows: int
    choices: tuple[Any, ...]
    set_bytes: int
    floor_s: float
    make: Callable[[str, bool], Any]
    call: Callable[[Any, Any], Tensor]


def floor_s(moved_bytes: float, flops: float) -> float:
    """The least time of a card."""
    return max(moved_bytes / BYTES_PER_S, flops / FLOPS)


def random_weight(shape: tuple[int, ...], form: str, device: str) -> Weight:
    """Random codes and scales near 2^-6, or bf16 numbers; on a CPU zeros that take no memory."""
    if form == "bf16" and device == "cpu":
        return torch.zeros(shape, dtype=torch.bfloat16)
    if form == "bf16":
        return torch.randn(shape, device=device, dtype=torch.bfloat16) / 32
    *lead, rows, columns = shape
    fp4 = form == "fp4"
    block = (1, 32) if fp4 else (128, 128)
    size = (*lead, rows, columns // (2 if fp4 else 1))
    scale_size = (*lead, -(-rows // block[0]), columns // block[1])
    if device == "cpu":
        codes, scales = (torch.zeros(s, dtype=torch.uint8) for s in (size, scale_size))
    else:
        codes = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
        scales = torch.randint(118, 124, scale_size, dtype=torch.uint8, device=device)
    if not fp4 and device != "cpu":
        codes[(codes & 127) == 127] = 0
    return StoredWeight(codes, scales, WeightFormat.FP4 if fp4 else WeightFormat.FP8, block)


def random_rows(rows: int, columns: int, device: str) -> Tensor:
    """bf16 [rows, columns]."""
    return torch.randn((rows, columns), device=device).to(torch.bfloat16)


@cache
def pool(device: str, small: bool) -> RecordView:
    """FP4 records with finite scales: 2^20 of them, 288 MiB."""
    shape = (8 if small else 16384, 64, WIDTH // 2 + WIDTH // 16)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    data[..., WIDTH // 2 :] = data[..., WIDTH // 2 :] % 16 + 48
    return RecordView(data, RecordFormat.FP4_E4M3_16, WIDTH, 64)


def attention(rows: int, choices: tuple[Any, ...]) -> Problem:
    """Sparse attention of 64 heads over 128 window keys and 512 records a row."""
    from headrace.ops.triton import attention as kernels

    def make(device: str, small: bool) -> Any:
        count = 2 if small else rows
        view = pool(device, small)
        blocks, in_block = view.data.shape[:2]
        q = random_rows(count * HEADS, WIDTH, device).view(count, HEADS, WIDTH)
        window = random_rows(count + WINDOW, WIDTH, device)
        index = torch.arange(count, device=device)[:, None] + torch.arange(WINDOW, device=device)
        place = torch.randint(0, blocks * in_block, (count, TOP_K), device=device)
        place = place.sort(-1)[0]
        sink = torch.zeros(HEADS, device=device)
        where = place // in_block, place % in_block
        return q, window, index, view, *where, sink, WIDTH**-0.5

    records = rows * TOP_K * (WIDTH // 2 + WIDTH // 16)
    moved = records + rows * HEADS * WIDTH * 4 + (rows + WINDOW) * WIDTH * 2
    flops = 4 * rows * HEADS * (WINDOW + TOP_K) * WIDTH
    return Problem(
        "attention",
        rows,
        choices,
        int(moved),
        floor_s(moved, flops),
        make,
        lambda inputs, choice: kernels.attend(*inputs, choice),
    )


def experts_touched(places: int) -> float:
    """How many of the experts some place chose, on average."""
    return EXPERTS * (1 - (1 - 1 / EXPERTS) ** places)


def routed(name: str, rows: int, choices: tuple[Any, ...]) -> Problem:
    """`activate` (w1, w3 and SwiGLU) or `project` (w2) of the routed experts."""
    from headrace.ops.triton import moe

    first = name == "activate"
    shape = (2 * INNER, MODEL) if first else (MODEL, INNER)

    def make(device: str, small: bool) -> Any:
        count = 2 if small else rows
        scores = torch.rand((count, EXPERTS), device=device)
        chosen = scores.argsort(-1)[:, :CHOSEN].contiguous()
        x = random_rows(count * (1 if first else CHOSEN), shape[1], device)
        weights = torch.rand((count, CHOSEN), device=device)
        return x, chosen, weights, random_weight((EXPERTS, *shape), "fp4", device), {}

    def call(inputs: Any, tile: Any) -> Tensor:
        x, chosen, weights, weight, tables = inputs
        if tile.rows not in tables:
            tables[tile.rows] = moe._sorted_places(chosen, weight.shape[0], tile.rows)
        if first:
            return moe._activation(x, weight, weights, tables[tile.rows], tile, LIMIT, 0)
        y = moe._projection(x, weight, tables[tile.rows], tile)
        return y[0] if len(y) == 1 else y.sum(0)

    places = rows * CHOSEN
    moved = experts_touched(places) * shape[0] * shape[1] * 17 / 32
    moved += 2 * (rows * MODEL + places * INNER) if first else 2 * places * (MODEL + INNER)
    least = floor_s(moved, 2 * places * shape[0] * shape[1])
    return Problem(name, rows, choices, int(moved), least, make, call)


def shared(rows: int, choices: tuple[Any, ...]) -> Problem:
    """w1, w3 and SwiGLU of the shared expert, FP8."""
    from headrace.ops.triton import moe

    def make(device: str, small: bool) -> Any:
        count = 2 if small else rows
        return random_rows(count, MODEL, device), random_weight((2 * INNER, MODEL), "fp8", device)

    def call(inputs: Any, tile: Any) -> Tensor:
        x, weight = inputs
        tables = moe._Tables(None, None, -(-x.shape[0] // tile.rows))
        return moe._activation(x, weight, None, tables, tile, LIMIT, 0)

    size = 2 * INNER * MODEL
    least = floor_s(size + 2 * rows * (MODEL + INNER), 2 * rows * size)
    return Problem("shared", rows, choices, size, least, make, call)


# name -> groups, outputs of a group, columns of a group, format
PRODUCTS = {
    "qa_kv": (1, 1792, 5120, "fp8"),
    "q_b": (1, 32768, 1280, "fp8"),
    "o_b": (1, 5120, 8192, "fp8"),
    "o_a": (8, 1024, 4096, "fp8"),
    "shared_2": (1, 5120, 2304, "fp8"),
    "head": (1, 129280, 5120, "bf16"),
}


def multiplied(name: str, rows: int, choices: tuple[Any, ...]) -> Problem:
    """A linear layer, the grouped projection or the head."""
    from headrace.ops.triton import products

    groups, outputs, columns, form = PRODUCTS[name]
    dtype = torch.float32 if name == "head" else torch.bfloat16

    def make(device: str, small: bool) -> Any:
        count = 2 if small else rows
        weight = random_weight((groups * outputs, columns), form, device)
        return random_rows(count, groups * columns, device), weight

    def call(inputs: Any, tile: Any) -> Tensor:
        return products.multiply(*inputs, groups, dtype, tile=tile)

    size = groups * outputs * columns * (2 if form == "bf16" else 1)
    moved = size + rows * groups * (2 * columns + dtype.itemsize * outputs)
    least = floor_s(moved, 2 * rows * groups * outputs * columns)
    return Problem(name, rows, choices, size, least, make, call)


def attention_choices(rows: int) -> tuple[Any, ...]:
    """(heads, keys, stages, warps, parts, grouped)."""
    from headrace.ops.triton.attention import Choice

    present = Choice(16, 32, 2, 4, 8, True) if rows < 9 else Choice(64, 64, 2, 8, 1, True)
    kept = [(16, 32, 3, 4), (16, 32, 2, 4), (16, 64, 2, 4), (32, 32, 2, 4), (32, 32, 3, 8)]
    kept += [(64, keys, stages, 8) for keys in (16, 32, 64) for stages in (1, 2, 3)]
    kept = [c for c in kept if c != (64, 64, 3, 8)]
    parts = (1, 4, 5, 8, 10, 20) if rows < 48 else (1, 2) if rows < 1024 else (1,)
    found = [Choice(*c, p, True) for c in kept for p in parts]
    found = [c for c in found if c.parts < 2 or c.stages == 2 or (c.heads < 64 and c.keys == 32)]
    found = [c for c in found if c.keys * c.parts <= WINDOW + TOP_K]
    return (present, *found)


# Outputs, depth, warps, stages.
SHAPES = (
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 256, 4, 2),
    (64, 256, 4, 3),
    (128, 128, 4, 3),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 256, 8, 2),
    (128, 64, 8, 3),
)


def product_choices(
    rows: tuple[int, ...], per: int, present: Any, two: bool, form: str
) -> tuple[Any, ...]:
    """Tiles of so many rows for a kernel of `per` rows a weight; two: w1 and w3 at a time."""
    from headrace.ops.triton.products import Tile

    found = [present]
    parts = (1,) if per > 32 else (1, 2) if form == "fp4" or max(rows) > 16 else (1, 2, 4, 8)
    for count, (outputs, depth, warps, stages), part in product(rows, SHAPES, parts):
        sums = (2 if two else 1) * outputs * count // (32 * warps)
        if sums > (96 if warps == 4 else 128) or (warps == 8 and sums < 8):
            continue
        if stages * depth * (2 * count + 2 * outputs) > 220 << 10:
            continue
        packed = 2 if depth >= 128 and form != "bf16" else 1
        found.append(Tile(count, outputs, depth, warps, stages, part, packed))
    return tuple(dict.fromkeys(found))


def problems() -> Iterator[Problem]:
    """All of them, those that take most of a step first."""
    from headrace.ops.triton import product_tiles

    def present(rows: int, name: str, form: str) -> Any:
        if form == "fp4":
            table = product_tiles.ROUTED_1 if name == "activate" else product_tiles.ROUTED_2
        elif form == "bf16":
            table = product_tiles.WIDE
        else:
            few = name in ("qa_kv", "shared_2") and rows <= 16
            table = product_tiles.ANY if few else product_tiles.WORDS
        return product_tiles.choose_tile(table, rows, 512, 227 << 10)

    yield from (attention(rows, attention_choices(rows)) for rows in (6, 192, 768))
    tiles = {6: (16,), 192: (16, 32, 64), 768: (32, 64, 128), 4096: (64, 128)}
    for rows, name in product(tiles, ("activate", "project")):
        per = -(-rows * CHOSEN // EXPERTS)
        now = present(per, name, "fp4")
        counts = (64, 128) if rows == 4096 else tiles[rows]
        yield routed(name, rows, product_choices(counts, per, now, name == "activate", "fp4"))
    yield attention(4096, attention_choices(4096))
    counted = {6: (16,), 192: (64, 32), 768: (128, 64)}
    for rows in counted:
        now = present(rows, "shared", "fp8")._replace(parts=8 if rows == 6 else 1)
        two = product_choices(counted[rows], rows, now, True, "fp8")
        yield shared(rows, two)
        for name, size in PRODUCTS.items():
            now = present(rows, name, size[3])
            one = product_choices(counted[rows], rows, now, False, size[3])
            yield multiplied(name, rows, one)


@cache
def by_name() -> dict[tuple[str, int], Problem]:
    """Problems by name and rows."""
    return {(p.name, p.rows): p for p in problems()}


def compile_some(key: tuple[str, int], numbers: list[int], architecture: int) -> list[Line]:
    """In a process of its own: compile these choices for a card, without one."""
    import compile_kernels

    problem, capability, found = by_name()[key], divmod(architecture, 10), []
    inputs = problem.make("cpu", True)
    for number in numbers:
        start_s = time.perf_counter()
        compiled = compile_kernels.Compiled()
        line: Line = {"number": number}
        try:
            with compile_kernels.compiling_for(capability, compiled):
                problem.call(inputs, problem.choices[number])
            kernels = list(compiled.kernels.values())
            line["shared"] = max((k.metadata.shared for k in kernels), default=0)
            if line["shared"] > 227 << 10:
                line["failed"] = "shared memory"
            used = compile_kernels.registers_and_stack(kernels)
            line["registers"], line["stack"] = used or (None, None)
        except Exception as error:  # whatever a compiler raises
            line["failed"] = f"{type(error).__name__}: {error}"[-300:]
        line["compile_s"] = round(time.perf_counter() - start_s, 2)
        found.append(line)
    return found


def compile_all(keys: list[tuple[str, int]], workers: int, seconds: float) -> dict[Any, Line]:
    """(name, rows, number) -> what its compilation said, of those that were done in time."""
    known: dict[Any, tuple[str, int, int]] = {}
    tasks, alike = [], {}
    for key in keys:
        problem = by_name()[key]
        numbers = []
        for number, choice in enumerate(problem.choices):
            # Row counts share kernels.
            same = (problem.name, choice)
            if same in known:
                alike[(*key, number)] = known[same]
            else:
                known[same] = (*key, number)
                numbers.append(number)
        tasks += [(key, numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
    found: dict[Any, Line] = {}
    end = time.perf_counter() + seconds
    if not tasks:
        return found
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        running = [(key, executor.submit(compile_some, key, n, 90)) for key, n in tasks]
        for key, future in running:
            try:
                lines = future.result(timeout=max(0.0, end - time.perf_counter()))
            except Exception as error:
                print("not compiled:", key, type(error).__name__, error, flush=True)
                continue
            for line in lines:
                found[(*key, line["number"])] = line
        executor.shutdown(wait=False, cancel_futures=True)
    for key, other in alike.items():
        if other in found:
            found[key] = found[other]
    return found


def elapsed_s(work: Callable[[], Any]) -> float:
    """Of the card."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def seconds_of(problem: Problem, sets: list[Any], choice: Any, best_s: float) -> float:
    """Median time of a call, in graphs over all sets; a single call if far above the best."""
    calls = max(len(sets), 4)
    once_s = min(elapsed_s(lambda: problem.call(sets[0], choice)) for _ in range(2))
    if once_s > 3 * best_s + 3e-4:
        return once_s
    for inputs in sets:
        problem.call(inputs, choice)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            problem.call(sets[number % len(sets)], choice)
    graph.replay()
    times = []
    for _ in range(7):
        times.append(elapsed_s(graph.replay) / calls)
        if len(times) >= 3 and sum(times) * calls > 0.04:
            break
    return median(times)


def timed(problem: Problem, compiled: dict[Any, Line], end: float) -> Iterator[Line]:
    """A line for every choice that was compiled, until the time is over."""
    count = min(MOST_SETS, max(1, -(-COLD_BYTES // problem.set_bytes)))
    sets = [problem.make("cuda", False) for _ in range(count)]
    expected = problem.call(sets[0], problem.choices[0]).float()
    largest, best_s = expected.abs().max(), float("inf")
    for number, choice in enumerate(problem.choices):
        line: Line = {
            "kernel": problem.name,
            "rows": problem.rows,
            "choice": choice._asdict(),
            "present": number == 0,
            "floor_s": problem.floor_s,
            **compiled.get((problem.name, problem.rows, number), {"failed": "not compiled"}),
        }
        if "failed" not in line and time.perf_counter() > end:
            line["failed"] = "no time"
        if "failed" not in line:
            start_s = time.perf_counter()
            try:
                found = problem.call(sets[0], choice).float()
                line["error"] = float((found - expected).abs().max() / largest)
                del found
                line["first_s"] = round(time.perf_counter() - start_s, 2)
                if not line["error"] <= TOLERANCE:
                    line["failed"] = "wrong"
                line["s"] = seconds_of(problem, sets, choice, best_s)
                best_s = min(best_s, line["s"])
            except Exception as error:
                if "CUDA error" in str(error):
                    raise RuntimeError(f"{choice}: {error}"[:500]) from error
                line["failed"] = f"{type(error).__name__}: {error}"[-300:]
        yield line


def summary(lines: list[Line]) -> str:
    """The best choice of a problem beside the present one."""
    done = [line for line in lines if "failed" not in line]
    start = f"{lines[0]['kernel']:10} {lines[0]['rows']:5}"
    if not done:
        return f"{start} none of {len(lines)} ran: {lines[0].get('failed')}"
    best = sorted(done, key=lambda line: line["s"])[:3]
    present = next((line["s"] for line in done if line["present"]), float("nan"))
    failed = [line["failed"] for line in lines if "failed" in line]
    text = f"{start} now {present * 1e6:8.1f} us, floor {lines[0]['floor_s'] * 1e6:7.1f};"
    for line in best:
        text += f" {line['s'] * 1e6:.1f} {tuple(line['choice'].values())}"
    if failed:
        text += f"; {len(failed)} of {len(lines)} failed ({failed.count('no time')} no time)"
    return text


def others(given: argparse.Namespace, keys: list[tuple[str, int]], seconds: float) -> int:
    """The problems behind one that broke the process's hold of the card, in a new process."""
    command = [sys.executable, __file__, "--seconds", str(seconds), "--workers", str(given.workers)]
    if given.out is not None:
        command += ["--out", str(given.out)]
    command += ["--only", *(f"{name}:{rows}" for name, rows in keys)]
    subprocess.run(command, check=False)
    return 1


def main() -> int:
    """Command line; 1 where a kernel had no time at all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[], help="names, or NAME:ROWS")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    given = parser.parse_args()
    begin = time.perf_counter()
    keys = [
        key
        for key in by_name()
        if not given.only or {key[0], f"{key[0]}:{key[1]}"}.intersection(given.only)
    ]
    compiled = compile_all(keys, given.workers, 0.6 * given.seconds)
    failed = {key: line["failed"] for key, line in compiled.items() if "failed" in line}
    print(f"{len(compiled)} compiled, {len(failed)} not, {time.perf_counter() - begin:.0f} s")
    for key, why in failed.items():
        print("  not compiled:", key, by_name()[key[:2]].choices[key[2]], why[-150:])
    if given.compile_only:
        spilled = {k: v["stack"] for k, v in compiled.items() if v.get("stack")}
        for key, stack in spilled.items():
            print("  spills:", key[:2], by_name()[key[:2]].choices[key[2]], stack, "bytes")
        return 0
    idle = 0
    for number, key in enumerate(keys):
        left = given.seconds - (time.perf_counter() - begin)
        # What a problem leaves goes to the others.
        end = time.perf_counter() + max(0.0, left) * 2.0 / (len(keys) - number + 1)
        lines: list[Line] = []
        broken = ""
        try:
            lines.extend(timed(by_name()[key], compiled, end))
            torch.cuda.synchronize()
        except Exception as error:
            broken = f"{key}: {type(error).__name__} {error}"[:600]
            print(broken, flush=True)
        if lines:
            print(summary(lines), flush=True)
        idle += bool(broken) or all("failed" in line for line in lines)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        if "CUDA error" in broken:
            return others(given, keys[number + 1 :], left) if keys[number + 1 :] else 1
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s")
    return 1 if idle else 0


if __name__ == "__main__":
    sys.exit(main())
