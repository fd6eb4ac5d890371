"""Tokens per second of the embedded model with its own draft module, beside the same without.

    python bench/speculation.py [--chats 3] [--rounds 5] [--requests 1,8] [--out FILE]

Held-out chats of the task families are answered by engines with the settings of `headrace serve`,
greedily and at temperature 0.7 with seeds, so that every policy gives the same tokens (checked). A
batch of `requests` chats starts together; time counts from the step in which the last of them has
its first token, so that prompts and tokens before that step stay out. `ours` and `peer`: decoded
tokens per second by the clock with a policy and with `off`, sums over all batches of a round. Both
take turns in one process; `ratio` is the median over the rounds of ours / peer, `spread` its range,
`cpu_ratio` the same in CPU time. `steps_ratio`: engine steps of `off` over those of the policy.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace.assets import embedded_model
from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.load import load_engine
from headrace.eval.families import FAMILIES, draw
from headrace.eval.items import FIRST_TEST_SEED, Draw
from headrace.platforms import CpuPlatform
from headrace.recipe import Codec

POLICIES = ("adaptive", "fixed:5")
TEMPERATURES = (0.0, 0.7)
RECALL_TOKENS = 700
MAX_TOKENS = 200


@dataclass(slots=True)
class Timed:
    """Decoding, summed over batches: tokens, seconds by the clock and of CPU, engine steps."""

    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0


def prompts(count: int) -> list[tuple[int, ...]]:
    """`count` chats of every family, in an order that mixes them; every second one thinks."""
    codec = Codec.from_directory(embedded_model())
    found = []
    for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + count):
        for number, family in enumerate(FAMILIES):
            thinking = (seed + number) % 2 == 0
            item = draw(family, seed, Draw(thinking=thinking, tokens=RECALL_TOKENS))[-1]
            found.append(tuple(codec.encode(item.conversation)))
    return found


def answer(engine: Engine, batch: Sequence[Request], timed: Timed) -> dict[str, list[int]]:
    """Run a batch to its end; adds its decoding to `timed`."""
    for request in batch:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in batch}

    def step() -> int:
        made = 0
        for chunk in engine.step().chunks():
            tokens[chunk.request_id] += chunk.tokens
            made += len(chunk.tokens)
        return made

    while not all(tokens.values()):
        step()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    while engine.has_work():
        timed.tokens += step()
        timed.steps += 1
    timed.wall_s += time.perf_counter() - wall_s
    timed.cpu_s += time.process_time() - cpu_s
    return tokens


def one_round(
    engine: Engine, chats: Sequence[tuple[int, ...]], size: int, temperature: float
) -> tuple[Timed, dict[str, list[int]]]:
    """All chats in batches of `size`."""
    timed, answers = Timed(), {}
    for begin in range(0, len(chats), size):
        batch = [
            Request(
                f"r{begin + place}",
                chat,
                SamplingParams(
                    temperature=temperature, seed=begin + place + 1, max_tokens=MAX_TOKENS
                ),
            )
            for place, chat in enumerate(chats[begin : begin + size])
        ]
        answers.update(answer(engine, batch, timed))
    return timed, answers


def compare(
    engines: dict[str, Engine],
    chats: Sequence[tuple[int, ...]],
    size: int,
    temperature: float,
    rounds: int,
) -> list[dict[str, object]]:
    """One line per policy."""
    found: dict[str, list[Timed]] = {name: [] for name in engines}
    for number in range(rounds + 1):  # the first one warms up
        wanted = None
        for name, engine in engines.items():
            gc.collect()
            timed, answers = one_round(engine, chats, size, temperature)
            if wanted is not None and answers != wanted:
                differing = sum(answers[key] != wanted[key] for key in wanted)
                raise SystemExit(f"{name}: {differing} of {len(wanted)} answers differ from off.")
            wanted = answers
            if number:
                found[name].append(timed)
    off = found["off"]
    lines: list[dict[str, object]] = []
    for name in engines:
        if name == "off":
            continue
        pairs = list(zip(found[name], off, strict=True))
        ratios = [(a.tokens / a.wall_s) / (b.tokens / b.wall_s) for a, b in pairs]
        cpu = [(a.tokens / a.cpu_s) / (b.tokens / b.cpu_s) for a, b in pairs]
        lines.append(
            {
                "name": f"speculation-{name}-t{temperature}-{size}",
                "ours": round(median(a.tokens / a.wall_s for a, _ in pairs), 1),
                "peer": round(median(b.tokens / b.wall_s for _, b in pairs), 1),
                "unit": "tokens/s",
                "ratio": round(median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
                "cpu_ratio": round(median(cpu), 3),
                "steps_ratio": round(median(b.steps / a.steps for a, b in pairs), 2),
                "n": rounds,
            }
        )
    return lines


def main() -> None:
    """Print one JSON line per policy, temperature and batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=3, help="of each task family")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", default="1,8", help="batch sizes, by commas")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    chats = prompts(options.chats)
    engines = {
        policy: load_engine(embedded_model(), EngineConfig(speculation=policy))
        for policy in ("off", *POLICIES)
    }
    env = {**asdict(CpuPlatform().fingerprint()), "cores": CpuPlatform().cores()}
    for size in (int(word) for word in options.requests.split(",")):
        for temperature in TEMPERATURES:
            for line in compare(engines, chats, size, temperature, options.rounds):
                text = json.dumps({**line, "env": env})
                print(text, flush=True)
                if options.out is not None:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(text + "\n")


if __name__ == "__main__":
    main()
