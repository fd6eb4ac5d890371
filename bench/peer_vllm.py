"""vLLM 0.33.0's own scheduler and KV cache manager as measured peers, without a model.

`prepare(peer_dir)` fetches the wheel (its Python files only) and the packages that importing the
two classes needs (peer_vllm_packages.txt) into a virtual environment of its own; torch and what
comes with it are those of the environment that runs this script. `Peer` runs peer_vllm_worker.py
there; `VllmScheduler` and `VllmKvManager` are handles of objects in that process. Every call is
answered before the next thing runs here, so that both sides of a benchmark can take turns.

    python bench/peer_vllm.py [--peer-dir DIR]      # fetch, then show that it works
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VLLM = "vllm==0.33.0"
DEFAULT_DIR = Path(__file__).resolve().parents[1] / ".cache" / "peers" / "vllm-0.33.0"
WORKER = Path(__file__).with_name("peer_vllm_worker.py")
PACKAGES = Path(__file__).with_name("peer_vllm_packages.txt")
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


# Lies in every folder that this script makes.
MARKER = "headrace_peer"


def prepare(peer_dir: Path = DEFAULT_DIR) -> Path:
    """Make `peer_dir` complete, if it is not yet; returns the Python that runs the worker.

    A folder that holds something else is refused, because its content would be deleted.
    """
    python = peer_dir / "venv" / "bin" / "python"
    done = peer_dir / "complete"
    if done.exists() and done.read_text() == _contents():
        return python
    if peer_dir.exists() and any(peer_dir.iterdir()) and not (peer_dir / MARKER).exists():
        raise SystemExit(f"{peer_dir} is not empty and was not made by this script.")
    shutil.rmtree(peer_dir, ignore_errors=True)
    peer_dir.mkdir(parents=True)
    (peer_dir / MARKER).touch()
    venv.create(peer_dir / "venv", with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "-r", str(PACKAGES)], check=True)
    with tempfile.TemporaryDirectory(dir=peer_dir) as folder:
        subprocess.run([*pip, "download", "-q", "--no-deps", "-d", folder, VLLM], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n]
            archive.extractall(peer_dir / "source", names)
    # torch and what it needs: looked up after the packages above.
    (packages,) = (peer_dir / "venv" / "lib").glob("python*/site-packages")
    (packages / "torch_of_caller.pth").write_text(sysconfig.get_path("platlib") + "\n")
    done.write_text(_contents())
    return python


def _contents() -> str:
    return "\n".join([VLLM, PACKAGES.read_text(), sys.prefix])


class Peer:
    """A process with vLLM's classes in it. Use as a context manager."""

    def __init__(self, peer_dir: Path = DEFAULT_DIR) -> None:
        python = prepare(peer_dir)
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(peer_dir / "source")}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [str(python), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        self._keys = 0
        self.versions: dict[str, str] = {"vllm": VLLM.split("==")[1], **self._answer()}

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes stdin, on which the worker ends
        self._log.close()

    def new_key(self) -> str:
        """A name for one more object in the process."""
        self._keys += 1
        return str(self._keys)

    def call(self, name: str, key: str, **arguments: object) -> Any:
        """Run a call of the worker. Raises RuntimeError with its error, or with its last words."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, "key": key, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError("the peer ended:\n" + self._log.read()[-2000:])
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"peer: {answer['error']}")
        return answer["result"]


class VllmScheduler:
    """vLLM's Scheduler in steady decode of `n` requests; construction runs their prefill."""

    def __init__(
        self,
        peer: Peer,
        n: int,
        prompt_tokens: int,
        *,
        asynchronous: bool = False,
        block_tokens: int = 64,
        hash_name: str = "sha256",
    ) -> None:
        self._peer, self._key = peer, peer.new_key()
        peer.call(
            "scheduler",
            self._key,
            n=n,
            prompt_tokens=prompt_tokens,
            asynchronous=asynchronous,
            block_tokens=block_tokens,
            hash_name=hash_name,
        )

    def step(self) -> float:
        """CPU seconds of schedule() and update_from_output() of one step."""
        return self.steps(1)[0]

    def steps(self, count: int) -> list[float]:
        """The same for `count` steps in one go; a request has 4,096 of them in all."""
        return [sum(pair) for pair in self.parts(count)]

    def parts(self, count: int) -> list[Sequence[float]]:
        """CPU seconds of (schedule, update_from_output) of `count` steps."""
        parts: list[Sequence[float]] = self._peer.call("steps", self._key, count=count)
        return parts

    def close(self) -> None:
        """Free it in the peer's process."""
        self._peer.call("drop", self._key)


class VllmKvManager:
    """vLLM's KVCacheManager with one group of full attention."""

    def __init__(
        self,
        peer: Peer,
        *,
        num_blocks: int,
        max_len: int,
        block_tokens: int = 64,
        hash_name: str = "sha256",
    ) -> None:
        self._peer, self._key = peer, peer.new_key()
        peer.call(
            "kv",
            self._key,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            hash_name=hash_name,
            max_len=max_len,
        )

    def measure(self, tokens: int, count: int, *, fresh: bool) -> dict[str, float]:
        """CPU seconds for `count` new prompts (cold_*) and for the same ones again (warm_*).

        Parts: hash, lookup, allocate (with caching the blocks), free, admission (the first three).
        fresh: the cache is emptied before, so that no allocation has to evict.
        """
        seconds: dict[str, float] = self._peer.call(
            "measure", self._key, tokens=tokens, count=count, fresh=fresh
        )
        return seconds

    def close(self) -> None:
        """Free it in the peer's process."""
        self._peer.call("drop", self._key)


def main() -> None:
    """Fetch the peer and print a few of its numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-dir", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args()
    with Peer(arguments.peer_dir) as peer:
        print(peer.versions)
        for asynchronous in (False, True):
            scheduler = VllmScheduler(peer, 16, 512, asynchronous=asynchronous)
            best_us = min(scheduler.steps(50)) * 1e6
            print(f"16 requests, asynchronous {asynchronous}: {best_us:.0f} us a step at best")
            scheduler.close()
        manager = VllmKvManager(peer, num_blocks=1000, max_len=1 << 20)
        print(manager.measure(4096, 1, fresh=True))


if __name__ == "__main__":
    main()
