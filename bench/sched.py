"""CPU time of the scheduler per step in steady decode, beside vLLM 0.33.0's own scheduler.

    python bench/sched.py [--peer-dir DIR] [--n 1,16,64,256,1024] [--pairs 15] [--steps 24]

Ours is `plan` + `commit` with all that a step needs: growth of the block tables with binding of the
full blocks to their keys, stop tokens, length limits, log probability rows, output assembly. The
peer's is `schedule` + `update_from_output`, synchronous and asynchronous. Both have prefix caching
on, prompts of 512 tokens, no model, no garbage collection, and take turns of `--steps` steps. Times
are CPU seconds of the process (mean of a turn), so other processes matter little. `ours` and `peer`
are microseconds a step (medians over the turns), `ratio` is the median of peer / ours over the
pairs, `spread` its smallest and largest value. One JSON line per measurement. The peer is fetched
by peer_vllm.py, which lists what it needs.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np
from peer_vllm import DEFAULT_DIR, Peer, VllmScheduler

from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.plan import StepResult
from headrace.engine.scheduler import NewRequest, Scheduler, SchedulerLimits
from headrace.kv.layout import BLOCK_TOKENS
from headrace.kv.manager import KVManager
from headrace.kv.pool import BlockPool
from headrace.kv.resume import ResumeRules
from headrace.platforms import CpuPlatform

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 4096
VOCABULARY = 129280
EOS, DRAWN = 1, 17
TOP_LOGPROBS = 5


class Ours:
    """Our scheduler in steady decode of `n` requests."""

    def __init__(self, n: int) -> None:
        length = PROMPT_TOKENS + OUTPUT_TOKENS
        blocks = -(-length // BLOCK_TOKENS)
        self.scheduler = Scheduler(
            KVManager(BlockPool(n * blocks + 64), n + 1, blocks),
            SchedulerLimits(
                max_num_seqs=n,
                max_num_batched_tokens=max(8192, n),
                max_waiting=n,
                max_tokens=length,
            ),
            resume=ResumeRules("bounded", keep=140, replay_rows=128, windows_suffice=True),
            root_key=bytes(32),
        )
        generator = np.random.default_rng(n)
        for i in range(n):
            prompt = generator.integers(2, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
            request = NewRequest(
                request_id=f"request-{i}", prompt=prompt, length_limit=length, stop_ids=(EOS,)
            )
            self.scheduler.enqueue(request, 0.0)
        self._result = StepResult(
            tokens=np.full(n, DRAWN, dtype=np.int64),
            logprobs=LogprobRows(
                index=np.arange(n),
                logprobs=np.zeros(n),
                top_ids=np.zeros((n, TOP_LOGPROBS), dtype=np.int64),
                top_logprobs=np.zeros((n, TOP_LOGPROBS)),
                top_counts=np.full(n, TOP_LOGPROBS),
            ),
        )
        while self._prefill() < n:
            pass

    def _prefill(self) -> int:
        plan = self.scheduler.plan(0.0)
        assert plan is not None
        tokens = np.full(plan.sampling_rows.size, DRAWN, dtype=np.int64)
        self.scheduler.commit(plan, StepResult(tokens), 0.0)
        return plan.decodes

    def steps(self, count: int) -> list[float]:
        """CPU seconds of each of `count` steps."""
        scheduler, result = self.scheduler, self._result
        seconds = []
        for _ in range(count):
            begin = time.process_time()
            plan = scheduler.plan(0.0)
            assert plan is not None
            output = scheduler.commit(plan, result, 0.0)
            seconds.append(time.process_time() - begin)
            assert len(output) == result.tokens.size
        return seconds


def compare(
    peer: Peer, n: int, asynchronous: bool, options: argparse.Namespace
) -> dict[str, object]:
    """One line: both schedulers with n requests, taking turns."""
    theirs = VllmScheduler(peer, n, PROMPT_TOKENS, asynchronous=asynchronous)
    ours = Ours(n)
    gc.collect()
    gc.freeze()
    ours.steps(options.steps)
    theirs.steps(options.steps)
    pairs = []
    for turn in range(options.pairs):
        both = [(0, ours.steps), (1, theirs.steps)]
        means = [0.0, 0.0]
        for side, steps in both if turn % 2 else both[::-1]:
            means[side] = 1e6 * sum(steps(options.steps)) / options.steps
        pairs.append(means)
    theirs.close()
    gc.unfreeze()
    ratios = [peer_us / ours_us for ours_us, peer_us in pairs]
    ours_us = median(pair[0] for pair in pairs)
    return {
        "name": f"sched-step{'-async' if asynchronous else ''}-{n}",
        "ours": round(ours_us, 2),
        "peer": round(median(pair[1] for pair in pairs), 2),
        "ratio": round(median(ratios), 2),
        "spread": [round(min(ratios), 2), round(max(ratios), 2)],
        "n": options.pairs,
        "unit": "us of CPU time a step",
        "ours_per_request": round(ours_us / n, 3),
    }


def measurements(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """All lines."""
    env = {**asdict(CpuPlatform().fingerprint()), "cores": CpuPlatform().cores()}
    with Peer(options.peer_dir) as peer:
        env |= {f"peer_{name}": version for name, version in peer.versions.items()}
        for n in map(int, options.n.split(",")):
            for asynchronous in (False, True):
                yield {**compare(peer, n, asynchronous, options), "env": env}


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--n", default="1,16,64,256,1024", help="numbers of requests")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn")
    options = parser.parse_args()
    gc.disable()
    for line in measurements(options):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
