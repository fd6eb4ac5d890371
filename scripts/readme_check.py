"""Run the README as a newcomer would: fresh clone, empty HOME, its code blocks in order.

    python scripts/readme_check.py [--source REPOSITORY] [--out docs/bench/readme.json]

Blocks are the fenced ones marked `sh` or `python`. The block with `make serve` runs in the
background until the server is ready; blocks with `curl` must stream an answer; before the block
with `make test` the server gets SIGTERM and must leave quietly. Times and exit codes go to the JSON
file; exit code 1 if a block failed or a limit (first answer in 6 minutes, tests in 12) was passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIRST_ANSWER_LIMIT_S = 360.0
TEST_LIMIT_S = 720.0
STOP_LIMIT_S = 60.0
POLL_S = 0.2
# Characters of the log shown when a block failed.
LOG_TAIL = 8000
# make re-raises the signal it was stopped with; a shell reports that as 128 + 15.
STOPPED_CODES = (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def code_blocks(readme: str) -> list[str]:
    """The fenced blocks marked `sh` or `python`, in order, as shell commands."""
    fence = re.compile(r"^```(sh|python)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    return [
        body if language == "sh" else f".venv/bin/python - <<'END'\n{body}END\n"
        for language, body in fence.findall(readme)
    ]


def kind(block: str) -> str:
    """What a block is for: serve, request, test or command."""
    for name, mark in (("serve", "make serve"), ("test", "make test"), ("request", "curl ")):
        if mark in block:
            return name
    return "command"


def streamed_chunks(stream: str) -> int:
    """Number of chunks in a streamed chat completion; ValueError if it is not a whole one."""
    data = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise ValueError(
            f"the stream does not end with [DONE], perhaps an error: {stream[-500:]!r}"
        )
    chunks = [json.loads(line) for line in data[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    if not choices or not choices[-1].get("finish_reason"):
        raise ValueError("the last choice of the stream has no finish_reason")
    return len(choices)


@dataclass
class Newcomer:
    """A clone, an empty HOME and what happened so far."""

    clone: Path
    environment: dict[str, str]
    log: Path
    server: subprocess.Popen[bytes] | None = None
    blocks: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def start(self, block: str) -> subprocess.Popen[bytes]:
        """The block in bash, in a process group of its own, its output in the log."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["bash", "-ec", block],
                cwd=self.clone,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def record(self, block: str, began: float, exit_code: int | None, **more: Any) -> None:
        """One entry of the report."""
        seconds = round(time.monotonic() - began, 1)
        entry = {"kind": kind(block), "command": block.strip(), "seconds": seconds}
        self.blocks.append({**entry, "exit_code": exit_code, **more})
        print(f"{entry['kind']:8} {seconds:7.1f} s  exit code {exit_code}", flush=True)

    def run(self, block: str, limit_s: float) -> None:
        """A block in the foreground."""
        began = time.monotonic()
        process = self.start(block)
        try:
            exit_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            exit_code = None
            self.problems.append(f"{block.strip()!r} took more than {limit_s:.0f} s")
        if exit_code:
            self.problems.append(f"{block.strip()!r} ended with exit code {exit_code}")
            print(self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:])
        self.record(block, began, exit_code)

    def serve(self, block: str, ready_url: str) -> None:
        """Start the server and wait until it answers at `ready_url`."""
        began = time.monotonic()
        self.server = self.start(block)
        while not _is_ready(ready_url):
            exit_code = self.server.poll()
            late = time.monotonic() - began > FIRST_ANSWER_LIMIT_S
            if exit_code is not None or late:
                self.problems.append("the server was not ready in time" if late else "no server")
                print(self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:])
                self.record(block, began, exit_code)
                return
            time.sleep(POLL_S)
        self.record(block, began, None, ready=True)

    def request(self, block: str) -> None:
        """Run a block with curl and look at the streamed answer."""
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-ec", block],
            cwd=self.clone,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=FIRST_ANSWER_LIMIT_S,
        )
        chunks = 0
        try:
            chunks = streamed_chunks(done.stdout)
        except ValueError as error:
            self.problems.append(f"no streamed answer: {error} {done.stderr}")
        self.record(block, began, done.returncode, chunks=chunks)

    def stop_server(self) -> None:
        """SIGTERM, as a supervisor sends it; the server finishes what runs and leaves."""
        if self.server is None or self.server.poll() is not None:
            return
        began = time.monotonic()
        self.server.terminate()
        try:
            exit_code: int | None = self.server.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
            exit_code = None
        if exit_code not in STOPPED_CODES:
            self.problems.append(f"the server left with exit code {exit_code}")
        if "Traceback" in self.log.read_text(encoding="utf-8", errors="replace"):
            self.problems.append("there is a traceback in the log of the server")
        self.record("make serve", began, exit_code, signal="SIGTERM")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def follow(newcomer: Newcomer, readme: str) -> None:
    """Run all blocks of the README."""
    blocks = code_blocks(readme)
    address = re.search(r"http://[\w.]+:\d+", "".join(blocks))
    if address is None:
        raise ValueError("no block of the README names the address of the server")
    ready_url = f"{address.group()}/health/ready"
    if _is_ready(ready_url):
        raise ValueError(f"a server is already running at {address.group()}: stop it first")
    for block in blocks:
        match kind(block):
            case "serve":
                newcomer.serve(block, ready_url)
            case "request":
                newcomer.request(block)
            case "test":
                newcomer.stop_server()
                newcomer.run(block, TEST_LIMIT_S)
            case _:
                newcomer.run(block, TEST_LIMIT_S)


def report(newcomer: Newcomer, commit: str) -> dict[str, Any]:
    """What goes to the JSON file."""
    seconds = {"serve": 0.0, "request": 0.0, "test": 0.0}
    for block in newcomer.blocks:
        if "signal" not in block and block["kind"] in seconds:
            seconds[block["kind"]] += block["seconds"]
    first_answer_s = round(seconds["serve"] + seconds["request"], 1)
    if first_answer_s > FIRST_ANSWER_LIMIT_S:
        newcomer.problems.append(f"install and first answer took {first_answer_s} s")
    return {
        "commit": commit,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "install_and_first_answer_s": first_answer_s,
        "install_and_first_answer_limit_s": FIRST_ANSWER_LIMIT_S,
        "test_s": seconds["test"],
        "test_limit_s": TEST_LIMIT_S,
        "blocks": newcomer.blocks,
        "problems": newcomer.problems,
    }


def main() -> int:
    """Clone, follow the README, write the report."""
    parser = argparse.ArgumentParser(description="Run the README on a fresh clone.")
    parser.add_argument("--source", default=str(ROOT), help="repository to clone")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "bench" / "readme.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-readme-") as scratch:
        clone, home = Path(scratch, "headrace"), Path(scratch, "home")
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", options.source, str(clone)], check=True)
        head = ["git", "-C", str(clone), "rev-parse", "HEAD"]
        commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
        own = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL")
        environment = {k: v for k, v in os.environ.items() if k not in own}
        newcomer = Newcomer(clone, {**environment, "HOME": str(home)}, Path(scratch, "log"))
        try:
            follow(newcomer, (clone / "README.md").read_text(encoding="utf-8"))
        finally:
            newcomer.stop_server()
        result = report(newcomer, commit)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for problem in result["problems"]:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
