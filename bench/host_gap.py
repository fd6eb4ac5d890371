"""CPU time that the engine loop takes while the device has nothing to do.

    python bench/host_gap.py [--requests 256] [--step-ms 10] [--steps 300] [--rounds 5]

The engine is real (scheduler, loop, outputs); the executor is simulated: a step sleeps and gives
scripted tokens. At the end of a device step and at the start of the next, the device thread reads
the CPU clock of the loop thread; the difference is the gap. In the same run and in turns: the
overlapped loop (`ours`), the blocking loop (`peer`), a control, a loop that does nothing but hand
the device its next step, and the same loop spinning while it waits, which shows that the clock sees
a busy loop. Numbers are microseconds of CPU time of the loop thread per step: median of the gaps
less the median of the control of the same round, median over the rounds; `spread` is the lowest and
highest round, `p99` the 99th percentile of all gaps, `control` and `spin` the medians of those,
`idle` the median wall time for which the device stands still, `work` the loop's CPU time for a
whole step. `ratio` is None where the overlapped gap is 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
import torch

from headrace.config import EngineConfig
from headrace.core.kv import GroupKind, KVGroupSpec, RecordFormat
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.executor import Order
from headrace.engine.plan import DraftReport, StepResult
from headrace.engine.speculation.drafts import DraftRequest, Proposal
from headrace.kv.cache import KVCache
from headrace.ops.numerics import Numerics
from headrace.platforms import CpuPlatform

PROMPT_TOKENS = 16
MAX_MODEL_LEN = 8192
DRAFTS = 5
VOCABULARY = 64


class _Spec:
    vocab_size, hidden, bos_id, eos_id, max_position = VOCABULARY, 8, 0, 1, MAX_MODEL_LEN

    def truncation_refusal(self) -> str | None:
        return "simulated"

    def replay_refusal(self) -> str | None:
        return None

    def keep(self, truncate: bool) -> int:
        return 1

    def replay_rows(self, mode: str, truncate: bool) -> int:
        return 128


class _Model:
    """Sizes only: the simulated device never calls it."""

    spec = _Spec()
    numerics = Numerics(dtype="float32", kv_quant=False)
    max_ngram = 1

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return (KVGroupSpec("k", GroupKind.PAGED, (0,), 2, RecordFormat.PLAIN),)

    def forward(self, batch: Any, cache: KVCache) -> torch.Tensor:
        raise AssertionError("the device is simulated")


class _NoDrafter:
    length = DRAFTS

    def draft(self, request: DraftRequest, cache: KVCache) -> Proposal:
        raise AssertionError("the device is simulated")


class Device:
    """Sleeps for a step; reads the loop thread's clock when it stops and when it goes on."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._stopped: tuple[float, float] | None = None
        self._random = np.random.default_rng(1)
        self.gaps_us: list[float] = []
        self.idle_us: list[float] = []
        self.loop_us = 0.0

    def run(self, order: Order | None) -> StepResult | None:
        """One step; its result where there is a plan."""
        cpu_s, wall_s = time.clock_gettime(self._clock), time.perf_counter()
        if self._stopped is not None:
            self.gaps_us.append(1e6 * (cpu_s - self._stopped[0]))
            self.idle_us.append(1e6 * (wall_s - self._stopped[1]))
        result = None if order is None else self._result(order)
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - wall_s)))
        self._stopped = time.clock_gettime(self._clock), time.perf_counter()
        return result

    def _result(self, order: Order) -> StepResult:
        plan = order.plan
        count = plan.sampling_rows.size
        if plan.drafts is None:
            return StepResult(np.full(count, 17, dtype=np.int64))
        verified = np.zeros(count, dtype=np.int64)
        verified[: plan.decodes] = plan.drafts.most
        accepted = np.minimum(self._random.integers(0, DRAFTS + 1, count), verified)
        forced = np.zeros_like(verified)
        report = DraftReport(verified, accepted, np.zeros((count, DRAFTS)), forced)
        tokens = np.full(int((accepted + 1).sum()), 17, dtype=np.int64)
        return StepResult(tokens, counts=accepted + 1, drafts=report)


class _Executor:
    """What the engine needs of an executor."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def run(self, order: Order) -> StepResult | None:
        """Carry out a plan."""
        return self._device.run(order)


def engine_gaps(options: argparse.Namespace, policy: str, overlap: bool) -> Device:
    """One round of the engine's loop in steady decode."""
    engine = Engine(
        EngineConfig(
            max_num_seqs=options.requests,
            max_num_batched_tokens=max(8192, options.requests * (DRAFTS + 1)),
            max_model_len=MAX_MODEL_LEN,
            num_blocks=1 + options.requests * MAX_MODEL_LEN // 128,
            max_waiting=options.requests,
            speculation=policy,
            overlap=overlap,
        ),
        _Model(),
        drafter=None if policy == "off" else _NoDrafter(),
    )
    device = Device(options.step_ms / 1e3)
    engine._executor = _Executor(device)  # type: ignore[assignment]  # has what the loop calls
    for number in range(options.requests):
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        engine.add(Request(f"r{number}", (number % 50 + 2,) * PROMPT_TOKENS, params))
    for _ in range(5):
        engine.step()
    device.gaps_us.clear()
    device.idle_us.clear()
    begin_s = time.thread_time()
    for _ in range(options.steps):
        output = engine.step()
        assert len(output) >= options.requests
    device.loop_us = 1e6 * (time.thread_time() - begin_s)
    engine.abort_all()
    while engine.has_work():
        engine.step()
    return device


def control_gaps(options: argparse.Namespace, spin: bool) -> Device:
    """The same hand-over with nothing to do for the loop; spin: it is busy while it waits."""
    device = Device(options.step_ms / 1e3)
    with ThreadPoolExecutor(1) as pool:
        submit: Callable[[], Future[StepResult | None]] = lambda: pool.submit(device.run, None)  # noqa: E731
        flying = deque([submit()])
        for _ in range(options.steps):
            flying.append(submit())
            while spin and not flying[0].done():
                pass
            flying.popleft().result()
        flying.popleft().result()
    return device


def compare(options: argparse.Namespace, policy: str) -> dict[str, object]:
    """One line."""
    ours, peers, controls, spins, work = [], [], [], [], []
    gaps: list[float] = []
    idle: list[float] = []
    for _ in range(options.rounds):
        control = median(control_gaps(options, False).gaps_us)
        spins.append(median(control_gaps(options, True).gaps_us))
        overlapped = engine_gaps(options, policy, True)
        blocking = engine_gaps(options, policy, False)
        controls.append(control)
        ours.append(median(overlapped.gaps_us) - control)
        peers.append(median(blocking.gaps_us) - control)
        work.append(overlapped.loop_us / options.steps)
        gaps += overlapped.gaps_us
        idle += overlapped.idle_us
    pairs = list(zip(ours, peers, strict=True))
    ratio = median(peer / own for own, peer in pairs) if min(ours) > 0 else None
    return {
        "name": f"host-gap-{policy}-{options.requests}",
        "ours": round(median(ours), 2),
        "peer": round(median(peers), 2),
        "ratio": ratio,
        "spread": [round(min(ours), 2), round(max(ours), 2)],
        "n": options.rounds,
        "p99": round(float(np.percentile(gaps, 99)), 2),
        "control": round(median(controls), 2),
        "spin": round(median(spins), 2),
        "work": round(median(work), 2),
        "idle": round(median(idle), 2),
        "unit": "us of CPU time of the loop thread between two device steps",
        "step_ms": options.step_ms,
    }


def main() -> None:
    """Print one JSON line per policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    gc.disable()
    env = {**asdict(CpuPlatform().fingerprint()), "cores": CpuPlatform().cores()}
    for policy in ("off", "fixed:5"):
        print(json.dumps({**compare(options, policy), "env": env}), flush=True)


if __name__ == "__main__":
    main()
