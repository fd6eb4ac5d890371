"""Record the scheduler traces that tests replay, tests/golden/traces/*.jsonl.gz.

    python scripts/record_traces.py --reason "why the plans change"     # replay and record again
    python scripts/record_traces.py --reason "..." --make NAME          # a new load from its seed

Replaying keeps the inputs (calls, times, drawn tokens) and updates plans and hash: do it in the
commit that changes the policy on purpose. The format is described in headrace/engine/trace.py.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.engine.plan import StepPlan, StepResult
from headrace.engine.scheduler import NewRequest, SchedulerLimits
from headrace.engine.stops import Ended
from headrace.engine.trace import RecordingScheduler, Replay
from headrace.kv.manager import KVManager
from headrace.kv.pool import BlockPool
from headrace.kv.resume import ResumeRules

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / "traces"
BLOCK_TOKENS = 16
EOS = 1
VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """A random load. Probabilities are per step; lengths are upper bounds in tokens.

    families: prompts of one family begin alike. long_share: of prompts that are ten times as long.
    """

    seed: int
    blocks: int
    max_num_seqs: int
    budget: int
    ageing_steps: int
    arrivals: float
    prompt: int
    output: int
    families: int
    long_share: float = 0.0
    choices: float = 0.0
    events: float = 0.0
    cancels: float = 0.0
    small_budgets: float = 0.0
    keep: int = 0
    steps: int = 300


_CHAT = Load(1, 400, 12, 96, 64, 0.5, 60, 40, 4, choices=0.2, events=0.1, cancels=0.03, keep=20)
_TIGHT = Load(2, 18, 8, 48, 16, 0.3, 30, 90, 2, choices=0.1, cancels=0.02)
_LONG = Load(3, 300, 6, 64, 20, 0.3, 60, 30, 50, long_share=0.2, small_budgets=0.1)
LOADS = {"chat": _CHAT, "tight": _TIGHT, "long": _LONG}


def record(load: Load, sink: io.StringIO, reason: str) -> None:
    """Run a load on a recording scheduler."""
    max_tokens = min(11 * load.prompt + load.output, load.blocks * BLOCK_TOKENS)
    scheduler = RecordingScheduler(
        KVManager(
            BlockPool(load.blocks + 1),
            load.max_num_seqs + 1,
            -(-max_tokens // BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
        ),
        SchedulerLimits(
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.budget,
            max_waiting=10_000,
            max_tokens=max_tokens,
            ageing_steps=load.ageing_steps,
            keep=load.keep,
        ),
        sink=sink,
        reason=reason,
        resume=ResumeRules("bounded", max(load.keep, 1), 16, bool(load.keep), BLOCK_TOKENS),
        root_key=bytes(32),
    )
    driver = Driver(load, scheduler, max_tokens)
    for step in range(load.steps):
        driver.step(step)
    while len(scheduler):
        driver.finish()
    scheduler.finish()


class Driver:
    """Feeds a load to a scheduler."""

    def __init__(self, load: Load, scheduler: RecordingScheduler, max_tokens: int) -> None:
        self._load = load
        self._scheduler = scheduler
        self._max_tokens = max_tokens
        self._random = np.random.default_rng(load.seed)
        self._prefixes = self._random.integers(2, VOCABULARY, (load.families, 11 * load.prompt))
        self._held: list[str] = []
        self._count = 0
        self._now = 0.0

    def step(self, number: int) -> None:
        """What arrives, goes or happens, then one step."""
        load, random = self._load, self._random
        self._now = float(number)
        for _ in range(random.poisson(load.arrivals)):
            self._add()
        if self._held and random.random() < 0.2:
            self._scheduler.ready(self._held.pop(0), "image", self._now)
        ids = self._scheduler.request_ids
        if ids and random.random() < load.cancels:
            self._cancel(ids[int(random.integers(len(ids)))])
        small = random.random() < load.small_budgets
        self._run(int(random.integers(1, load.max_num_seqs + 2)) if small else None)

    def finish(self) -> None:
        """One step without arrivals."""
        self._now += 1.0
        while self._held:
            self._scheduler.ready(self._held.pop(), "image", self._now)
        self._run(None)

    def _add(self) -> None:
        load, random = self._load, self._random
        scale = 10 if random.random() < load.long_share else 1
        shared = int(random.integers(0, scale * load.prompt))
        own = random.integers(2, VOCABULARY, int(random.integers(1, 1 + load.prompt // 2)))
        prefix = self._prefixes[int(random.integers(load.families))][:shared]
        prompt = np.concatenate((prefix, own)).astype(np.int32)[: self._max_tokens - load.output]
        name = f"r{self._count}"
        self._count += 1
        waits = random.random() < load.events
        self._scheduler.enqueue(
            NewRequest(
                request_id=name,
                prompt=prompt,
                length_limit=len(prompt) + int(random.integers(1, load.output + 1)),
                stop_ids=(EOS, 5) if random.random() < 0.3 else (EOS,),
                min_tokens=int(random.integers(0, 4)),
                priority=int(random.integers(-1, 2)),
                choices=int(random.integers(2, 5)) if random.random() < load.choices else 1,
                waits_for=("image",) if waits else (),
            ),
            self._now,
        )
        if waits:
            self._held.append(name)

    def _cancel(self, name: str) -> None:
        self._scheduler.cancel(name, self._now)
        if name in self._held:
            self._held.remove(name)

    def _run(self, budget: int | None) -> None:
        plan = self._scheduler.plan(self._now, budget)
        if plan is not None:
            self._scheduler.commit(plan, self._drawn(plan), self._now + 0.5)

    def _drawn(self, plan: StepPlan) -> StepResult:
        random = self._random
        tokens = random.integers(2, VOCABULARY, plan.sampling_rows.size)
        luck = random.random(tokens.size)
        tokens[luck < 0.02] = EOS
        tokens[luck > 0.998] = -1
        ended = {place: Ended("stop", 3) for place in np.flatnonzero((luck > 0.4) & (luck < 0.405))}
        return StepResult(tokens, {int(place): end for place, end in ended.items()})


def main() -> None:
    """Record one new trace, or all that are there again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reason", required=True, help="one line, kept in the trace")
    parser.add_argument("--make", choices=LOADS, help="make this trace from its seed")
    options = parser.parse_args()
    for path in [FOLDER / f"{options.make}.jsonl.gz"] if options.make else FOLDER.glob("*.gz"):
        sink = io.StringIO()
        if options.make:
            record(LOADS[options.make], sink, options.reason)
        else:
            before = Replay(gzip.decompress(path.read_bytes()).decode().splitlines())
            before.run(sink, options.reason)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(sink.getvalue().encode(), mtime=0))
        print(f"{path.name}: {path.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
