"""Decode speed of the engine on a CPU, beside batched `generate` of transformers 5.24.

    python bench/cpu_engine.py [--peer-dir DIR] [--pairs 9] [--tokens 48] [--threads 1]

Both sides run the golden V4 model in fp32 without cache quantisation, greedy, on the same prompts
and the same torch; each in a process of its own, taking turns, so that a slow moment of the machine
hits both. Timed is decoding only: from the first token of all requests to the last one. `ours` and
`peer` are tokens per second (medians), `ratio` is the median over the pairs, `spread` its smallest
and largest value, `cpu_ratio` the same from CPU time, which other processes lengthen less,
`fastest_ratio` that of the fastest steps, which they lengthen least. Then the engine's default
numerics (quantised cache) beside the same peer, the model alone, and a V4.1 tiny: seconds per step
and calls per step. One JSON line per measurement.

Needs `pip install transformers==5.24.0 --target DIR`; without --peer-dir this is done in a folder
that is deleted at the end. torch is the one that runs this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

PEER = "transformers==5.24.0"
REQUESTS = (1, 8, 32)
PROMPT_TOKENS = 256
ROOT = Path(__file__).resolve().parents[1]
Reply = dict[str, Any]


def prompts(count: int, vocab_size: int) -> np.ndarray:
    """Token ids [count, PROMPT_TOKENS] without the special ids 0, 1 and 2."""
    return np.random.default_rng(5).integers(3, vocab_size, (count, PROMPT_TOKENS))


def now() -> tuple[float, float]:
    """Seconds by the clock and of CPU time."""
    return time.perf_counter(), time.process_time()


def per_step(times: list[tuple[float, float]]) -> Reply:
    """Seconds of each step between the moments `times`."""
    wall, cpu = np.diff(np.array(times), axis=0).T.tolist()
    return {"wall_s": wall, "cpu_s": cpu}


# --- our side ----------------------------------------------------------------------------------


class Ours:
    """The engine on one checkpoint; `kv_quant` as in EngineConfig."""

    def __init__(self, directory: Path, kv_quant: bool) -> None:
        from headrace.model.loader import load_model
        from headrace.ops.numerics import Numerics

        self.model = load_model(directory, Numerics("float32", kv_quant=kv_quant))
        self.kv_quant = kv_quant

    def engine(self, count: int, tokens: int) -> Any:
        """An engine in which one step takes all prompts."""
        from headrace.config import EngineConfig
        from headrace.engine.engine import Engine

        blocks = -(-(PROMPT_TOKENS + tokens) // 128)
        config = EngineConfig(
            kv_quant=self.kv_quant,
            max_num_seqs=count,
            max_num_batched_tokens=count * PROMPT_TOKENS,
            max_model_len=128 * blocks,
            num_blocks=2 * count * blocks + 1,
        )
        return Engine(config, self.model)

    def decode(self, count: int, tokens: int) -> Reply:
        """Decode `tokens` tokens for each of `count` requests."""
        from headrace.core.request import Request
        from headrace.core.sampling import SamplingParams

        engine = self.engine(count, tokens)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for number, ids in enumerate(prompts(count, self.model.spec.vocab_size).tolist()):
            engine.add(Request(str(number), tuple(ids), params))
        outputs = [engine.step()]
        times = [now()]
        while engine.has_work():
            outputs.append(engine.step())
            times.append(now())
        if len(outputs) != tokens:
            raise RuntimeError(f"{len(outputs)} steps for {tokens} tokens: not all ran at once")
        found: dict[str, list[int]] = {str(number): [] for number in range(count)}
        for output in outputs:
            for chunk in output:
                found[chunk.request_id] += chunk.tokens
        ids = [found[str(number)] for number in range(count)]
        return {**per_step(times), "ids": ids}

    def forward(self, count: int, steps: int) -> Reply:
        """Seconds of decode steps of the model alone, and its calls in one step."""
        from headrace.kv.cache import KVCache

        blocks = -(-(PROMPT_TOKENS + steps + 2) // 128)
        dtype = self.model.numerics.torch_dtype
        cache = KVCache(
            self.model.kv_groups(), num_blocks=count * blocks + 1, num_slots=count + 1, dtype=dtype
        )
        ids = prompts(count, self.model.spec.vocab_size)
        ids = np.concatenate((ids, np.roll(ids, 7, axis=1), np.roll(ids, 9, axis=1)), axis=1)
        wall: list[float] = []
        cpu: list[float] = []
        with torch.inference_mode():
            self.model.forward(self._batch(ids, 0, PROMPT_TOKENS, blocks), cache)
            for position in range(PROMPT_TOKENS, PROMPT_TOKENS + steps):
                batch = self._batch(ids, position, 1, blocks)
                start = now()
                self.model.forward(batch, cache)
                end = now()
                wall.append(end[0] - start[0])
                cpu.append(end[1] - start[1])
            batch = self._batch(ids, PROMPT_TOKENS + steps, 1, blocks)
            calls = self._calls(lambda: self.model.forward(batch, cache))
        return {"wall_s": wall, "cpu_s": cpu, **calls}

    def _batch(self, ids: np.ndarray, start: int, length: int, blocks: int) -> Any:
        from headrace.model.batch import Batch, BatchRow

        rows = [
            BatchRow(
                token_ids=row,
                q_start=start,
                q_len=length,
                block_table=list(range(1 + number * blocks, 1 + (number + 1) * blocks)),
                slot=number + 1,
            )
            for number, row in enumerate(ids)
        ]
        return Batch.build(rows, self.model.max_ngram)

    def _calls(self, step: Callable[[], object]) -> Reply:
        """Calls of operators of the table, and of torch by the dispatcher, in one step."""
        table = self.model.ops
        counted: Counter[str] = Counter()

        def counting(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                counted[name] += 1
                return getattr(table, name)(*args, **kwargs)

            return call

        with torch_calls() as dispatched:
            step()
        self.model.ops = type(table)(**{f.name: counting(f.name) for f in fields(table)})
        step()
        self.model.ops = table
        return {"operator_calls": counted.total(), "torch_calls": dispatched.count}


def torch_calls() -> AbstractContextManager[Any]:
    """Counts in `.count` what reaches torch's dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    return Counting()


# --- the peer ----------------------------------------------------------------------------------


class Peer:
    """transformers' own V4 class, which reads the official tensor names."""

    def __init__(self, directory: Path) -> None:
        from transformers import DeepseekV4ForCausalLM, LogitsProcessor

        self.model = DeepseekV4ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        # Neither side looks for the end of an answer.
        self.model.generation_config.eos_token_id = None

        class Clock(LogitsProcessor):
            """Notes when the logits of each step are there."""

            def __init__(self) -> None:
                self.times: list[tuple[float, float]] = []

            def __call__(self, input_ids: Any, scores: Any) -> Any:
                self.times.append(now())
                return scores

        self.clock: Callable[[], Any] = Clock

    def decode(self, count: int, tokens: int) -> Reply:
        """Decode `tokens` tokens for each of `count` requests."""
        ids = torch.from_numpy(prompts(count, self.model.config.vocab_size))
        clock = self.clock()
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=2,
            logits_processor=[clock],
        )
        return {**per_step(clock.times), "ids": found[:, PROMPT_TOKENS:].tolist()}


# --- processes ---------------------------------------------------------------------------------


class Worker:
    """One side in a process of its own: a line of JSON in, a line of JSON out."""

    def __init__(self, side: str, directory: Path, threads: int, path: Path | None = None) -> None:
        extra = [str(ROOT)] if path is None else [str(path)]
        known = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(extra + ([known] if known else [])),
            "OMP_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": str(threads),
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", side, "--model", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, what: str, count: int, amount: int) -> Reply:
        """Run `decode` (amount: tokens) or `forward` (amount: steps) there."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self._process.stdin.write(json.dumps([what, count, amount]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                reply: Reply = json.loads(line)
                return reply
        raise RuntimeError(f"the worker ended with exit code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def serve(side: str, directory: Path) -> None:
    """The worker process: answer until stdin ends."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    there = Peer(directory) if side == "peer" else Ours(directory, kv_quant=side == "quantised")
    for line in sys.stdin:
        what, count, amount = json.loads(line)
        print(json.dumps(getattr(there, what)(count, amount)), flush=True)


# --- measurements ------------------------------------------------------------------------------


def compare(
    name: str, ours: Worker, peer: Worker, count: int, options: argparse.Namespace
) -> Reply:
    """Tokens per second of both, taking turns."""
    for side in (ours, peer):
        side.ask("decode", count, 8)
    found = []
    for number in range(options.pairs):
        order = (ours, peer) if number % 2 == 0 else (peer, ours)
        replies = {side: side.ask("decode", count, options.tokens) for side in order}
        found.append((replies[ours], replies[peer]))
    same = np.array(found[0][0]["ids"]) == np.array(found[0][1]["ids"])
    wall = np.array([[sum(reply["wall_s"]) for reply in pair] for pair in found])
    cpu = np.array([[sum(reply["cpu_s"]) for reply in pair] for pair in found])
    fastest = np.array([[min(reply["wall_s"]) for reply in pair] for pair in found]).min(0)
    made = count * (options.tokens - 1)
    return {
        "name": f"{name}, {count} requests",
        "ours": round(made / float(np.median(wall[:, 0])), 1),
        "peer": round(made / float(np.median(wall[:, 1])), 1),
        "unit": "tokens/s",
        **_ratio("ratio", "spread", wall),
        **_ratio("cpu_ratio", "cpu_spread", cpu),
        # The fastest step of each side: what other processes disturbed least.
        "fastest_step_s": [round(float(seconds), 6) for seconds in fastest],
        "fastest_ratio": round(float(fastest[1] / fastest[0]), 2),
        "same_tokens": round(float(same.mean()), 4),
        "n": options.pairs,
    }


def _ratio(name: str, spread: str, seconds: np.ndarray) -> Reply:
    """Median and range of peer / ours over pairs of seconds [n, (ours, peer)]."""
    ratios = seconds[:, 1] / seconds[:, 0]
    lowest, highest = float(ratios.min()), float(ratios.max())
    middle = round(float(np.median(ratios)), 2)
    return {name: middle, spread: [round(lowest, 2), round(highest, 2)]}


def steps(name: str, ours: Worker, count: int, options: argparse.Namespace) -> Reply:
    """Seconds of one decode step of the model alone, and calls in it."""
    ours.ask("forward", count, 8)
    reply = ours.ask("forward", count, options.tokens)
    return {
        "name": f"{name}, {count} requests",
        "ours": median(reply["wall_s"]),
        "unit": "s",
        "peer": None,
        "ratio": None,
        "spread": [min(reply["wall_s"]), max(reply["wall_s"])],
        "cpu_s": median(reply["cpu_s"]),
        "operator_calls": reply["operator_calls"],
        "torch_calls": reply["torch_calls"],
        "n": options.tokens,
    }


def measurements(options: argparse.Namespace, scratch: Path, peer_dir: Path) -> Iterator[Reply]:
    """All measurements in turn."""
    from headrace.model.tiny import write_tiny

    v4 = options.model or _golden(scratch)
    tiny = scratch / "tiny-8"
    write_tiny(tiny, preset="tiny-8", quantised=False)
    peer = Worker("peer", v4, options.threads, peer_dir)
    for name, side in (("decode V4", "plain"), ("decode V4, quantised cache", "quantised")):
        ours = Worker(side, v4, options.threads)
        for count in REQUESTS:
            yield compare(name, ours, peer, count, options)
        for count in REQUESTS:
            yield steps(name.replace("decode", "model step"), ours, count, options)
        ours.close()
    peer.close()
    ours = Worker("quantised", tiny, options.threads)
    for count in REQUESTS:
        yield steps("model step V4.1 tiny-8, quantised cache", ours, count, options)
    ours.close()


def _golden(scratch: Path) -> Path:
    """The golden V4 model, unpacked."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from pack_golden import unpack

    return unpack("v4_tiny", scratch)


def fetch(target: Path) -> None:
    """Install the peer and what it needs besides torch."""
    numpy = f"numpy=={np.__version__}"  # torch was built against ours
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
    subprocess.run([*command, PEER, numpy], check=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9, help="measured pairs (default 9)")
    parser.add_argument("--tokens", type=int, default=48, help="per request (default 48)")
    parser.add_argument("--threads", type=int, default=1, help="of both sides (default 1)")
    parser.add_argument("--peer-dir", type=Path, help=f"folder with {PEER} installed")
    parser.add_argument("--model", type=Path, help="V4 checkpoint (default: the golden v4_tiny)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker, options.model)
        return
    sys.path.insert(0, str(ROOT))
    from headrace.platforms import CpuPlatform

    env = {**asdict(CpuPlatform().fingerprint()), "threads": options.threads, "peer": PEER}
    env["cores"] = CpuPlatform().cores()
    with tempfile.TemporaryDirectory() as scratch:
        peer_dir = options.peer_dir or Path(scratch) / "peer"
        if not (peer_dir / "transformers").is_dir():
            fetch(peer_dir)
        for line in measurements(options, Path(scratch), peer_dir):
            print(json.dumps({**line, "env": env}), flush=True)


if __name__ == "__main__":
    main()
