"""The embedded model as a newcomer meets it: start to first token, tokens a second, memory.

    python bench/embedded.py [--runs 7] [--tokens 256] [--out FILE]

Every run is a process of its own that does what `headrace chat` does: import, load, encode a short
question, answer it, then decode `--tokens` tokens of a second answer, one request at a time. `ours`
is the median over the runs, `spread` the smallest and largest value, `limit` what is asked for
(seconds and megabytes at most, tokens a second at least), `met` whether the median keeps it. Time
by the clock suffers from whatever else runs: `cpu` and `met_cpu` say the same in CPU time (there is
one thread, so this is the clock of a quiet machine). A first run, which is not counted, compiles
the operators and warms the file cache. One JSON line per figure; exit code 1 where a limit is kept
in neither.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is 27 + 58?"
# name -> (limit, whether it is the most allowed, unit)
LIMITS = {
    "embedded.import": (None, True, "s"),
    "embedded.load": (None, True, "s"),
    "embedded.first_token_after_import": (2.0, True, "s"),
    "embedded.first_token_after_start": (None, True, "s"),
    "embedded.decode": (30.0, False, "tokens/s"),
    "embedded.peak_memory": (600.0, True, "MB"),
}


def one_run(tokens: int) -> dict[str, list[float]]:
    """All figures of this process: [by the clock, in CPU time]."""

    def now() -> tuple[float, float]:
        return time.time(), time.process_time()

    imported_from = now()
    from headrace.assets import embedded_model
    from headrace.config import EngineConfig
    from headrace.core.sampling import SamplingParams
    from headrace.engine.llm import LLM
    from headrace.recipe import Codec, Conversation, PromptText, UserMessage

    imported = now()
    codec = Codec.from_directory(embedded_model())
    with LLM(embedded_model(), EngineConfig()) as llm:
        loaded = now()
        question = UserMessage(PromptText.of(QUESTION))
        prompt = tuple(codec.encode(Conversation((question,), thinking=True)))
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        chunks = llm.stream(prompt, greedy)
        next(chunks)
        first = now()
        chunks.close()
        moments = [now() for _ in llm.stream(prompt, greedy)]

    def between(a: tuple[float, float], b: tuple[float, float]) -> list[float]:
        return [end - begin for begin, end in zip(a, b, strict=True)]

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {
        "embedded.import": between(imported_from, imported),
        "embedded.load": between(imported, loaded),
        "embedded.first_token_after_import": between(imported, first),
        # A moment of the clock, from which the caller takes its own; CPU time begins with us.
        "embedded.first_token_after_start": list(first),
        "embedded.decode": [(len(moments) - 1) / s for s in between(moments[0], moments[-1])],
        "embedded.peak_memory": [peak, peak],
    }


def measured(tokens: int) -> dict[str, list[float]]:
    """The figures of a fresh process."""
    started = time.time()
    command = [sys.executable, __file__, "--one", "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    found["embedded.first_token_after_start"][0] -= started
    return found


def main() -> int:
    """Command line; 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256, help="decoded in each run")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.one:
        print(json.dumps(one_run(given.tokens)))
        return 0
    from headrace.platforms.cpu import CpuPlatform

    measured(8)
    runs = [measured(given.tokens) for _ in range(given.runs)]
    env = {**asdict(CpuPlatform().fingerprint()), "cores": CpuPlatform().cores()}
    lines = []
    for name, (limit, at_most, unit) in LIMITS.items():
        wall, cpu = ([run[name][kind] for run in runs] for kind in (0, 1))
        met = [
            None if limit is None else (found <= limit if at_most else found >= limit)
            for found in (median(wall), median(cpu))
        ]
        lines.append(
            {
                "name": name,
                "ours": round(median(wall), 2),
                "unit": unit,
                "spread": [round(min(wall), 2), round(max(wall), 2)],
                "cpu": round(median(cpu), 2),
                "limit": limit,
                "met": met[0],
                "met_cpu": met[1],
                "n": len(runs),
                "env": env,
            }
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if given.out is not None:
        with given.out.open("a", encoding="utf-8") as file:
            file.write(text)
    return 0 if all(line["met"] is not False or line["met_cpu"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
