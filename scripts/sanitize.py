"""Run the Triton operators on a card under compute-sanitizer: memcheck, then racecheck.

`python scripts/sanitize.py [-k EXPRESSION]` runs the tests marked `sanitizer` (small cases, each
operator) three times: alone, which compiles the kernels and must pass, then under each tool with
torch's caching off, so that every tensor has bounds of its own. Prints a verdict per tool with the
number of errors; exit code 1 if there is an error or a test fails, 2 if a tool gave no verdict.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / ".cache" / "sanitize"
TOOLKIT = "/usr/local/cuda/bin"
# What ends a report, once for each process. Warnings of racecheck are hazards too.
SUMMARIES = {
    "memcheck": r"ERROR SUMMARY: (\d+) error",
    "racecheck": r"RACECHECK SUMMARY: (\d+) hazard",
}
TESTS = ("-m", "pytest", "-q", "-m", "gpu and sanitizer", "tests/gpu/test_gpu_operators.py")
TIMEOUT_S = 180
SHOWN_LINES = 40


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run said. errors: None where nothing can be said."""

    errors: int | None
    text: str


def passed(output: str) -> int:
    """How many tests passed, by the last line of pytest."""
    found = re.findall(r"(\d+) passed", output)
    return int(found[-1]) if found else 0


def verdict(tool: str, report: str, output: str, status: int) -> Verdict:
    """Of a run under `tool`: its report, pytest's output and exit code."""
    counts = [int(n) for n in re.findall(SUMMARIES[tool], report)]
    if sum(counts):
        return Verdict(sum(counts), f"{tool}: {sum(counts)} errors in {passed(output)} tests")
    if not counts:
        return Verdict(None, f"{tool}: no verdict, its report has no summary")
    if status or not passed(output):
        return Verdict(None, f"{tool}: no verdict, the tests did not pass (exit code {status})")
    return Verdict(0, f"{tool}: 0 errors in {passed(output)} tests")


def run(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output; 124 where it was stopped after TIMEOUT_S."""
    # With torch's caching, an access behind a tensor would hit the next one and go unseen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # The tests are a child of the sanitizer, and would go on without it.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 124, f"{output}\nstopped after {TIMEOUT_S} s"
    return process.returncode, output


def under(sanitizer: str, tool: str, tests: Sequence[str]) -> Verdict:
    """Run the tests under one tool and print what it found."""
    path = REPORTS / f"{tool}.log"
    path.unlink(missing_ok=True)
    # The sanitizer's own exit code would hide that of the tests; its summary counts.
    command = [sanitizer, "--tool", tool, "--log-file", str(path), "--target-processes", "all"]
    # Calls that fail on purpose, as when torch asks what a pointer is, are no faults of kernels.
    command += ["--report-api-errors", "no", *tests]
    start = time.monotonic()
    status, output = run(command)
    report = path.read_text(errors="replace") if path.exists() else ""
    found = verdict(tool, report, output, status)
    if found.errors != 0:
        print("\n".join(report.splitlines()[:SHOWN_LINES]))
        print("\n".join(output.splitlines()[-SHOWN_LINES:]))
    print(f"{found.text} ({time.monotonic() - start:.0f} s)", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description="Run the Triton operators under compute-sanitizer.", allow_abbrev=False
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only these tests, as pytest's -k")
    chosen = parser.parse_args(arguments)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    if sanitizer is None:
        print(
            f"error: compute-sanitizer is neither on the PATH nor in {TOOLKIT}; "
            "it comes with the CUDA toolkit."
        )
        return 2
    REPORTS.mkdir(parents=True, exist_ok=True)
    tests = [sys.executable, *TESTS, *(("-k", chosen.k) if chosen.k else ())]
    start = time.monotonic()
    status, output = run(tests)
    if status or not passed(output):
        print("\n".join(output.splitlines()[-SHOWN_LINES:]))
        print(f"the tests fail without a sanitizer too (exit code {status}): nothing was checked")
        return 1
    print(f"alone: {passed(output)} tests passed ({time.monotonic() - start:.0f} s)", flush=True)
    found = [under(sanitizer, tool, tests).errors for tool in SUMMARIES]
    if any(found):
        return 1
    return 2 if None in found else 0


if __name__ == "__main__":
    sys.exit(main())
