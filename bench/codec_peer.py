"""deepseek-recipe 0.2.0 and our codec as two processes that take turns.

`prepare(peer_dir)` fetches the wheel into a virtual environment of its own. `Side` runs
codec_worker.py for one side, "ours" with the Python that runs this script, "peer" with the Python
of that environment; every call is answered before the next thing runs here.

    python bench/codec_peer.py [--peer-dir DIR]      # fetch, then show that it works
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

PEER = "deepseek-recipe==0.2.0"
ROOT = Path(__file__).resolve().parents[1]
DEFAULT_DIR = ROOT / ".cache" / "peers" / "deepseek-recipe-0.2.0"
WORKER = Path(__file__).with_name("codec_worker.py")


def prepare(peer_dir: Path = DEFAULT_DIR) -> Path:
    """Make `peer_dir` complete, if it is not yet; returns its Python.

    An environment that has the package already is taken as it is.
    """
    for python in (peer_dir / "bin" / "python", peer_dir / "venv" / "bin" / "python"):
        if python.exists() and _has_peer(python):
            return python
    shutil.rmtree(peer_dir / "venv", ignore_errors=True)
    venv.create(peer_dir / "venv", with_pip=True)
    python = peer_dir / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--only-binary", ":all:", PEER], check=True)
    return python


def _has_peer(python: Path) -> bool:
    version = "import deepseek_recipe; print(deepseek_recipe.__version__)"
    found = subprocess.run(
        [str(python), "-c", version], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() == PEER.split("==")[1]


class Side:
    """One side in a process of its own. Use as a context manager."""

    def __init__(
        self, name: str, tokenizer: Path, level: str, peer_dir: Path = DEFAULT_DIR
    ) -> None:
        python = Path(sys.executable) if name == "ours" else prepare(peer_dir)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [str(python), str(WORKER), name, str(tokenizer), level],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(ROOT) if name == "ours" else ""},
            text=True,
        )
        self.versions: dict[str, str] = self._answer()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes stdin, on which the worker ends
        self._log.close()

    def call(self, name: str, **arguments: object) -> dict[str, Any]:
        """Run a call of the worker. Raises RuntimeError with its error, or with its last words."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError("a side ended:\n" + self._log.read()[-3000:])
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result


def main() -> None:
    """Fetch the peer and print what it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-dir", type=Path, default=DEFAULT_DIR)
    python = prepare(parser.parse_args().peer_dir)
    print(f"{PEER} is ready in {python}")


if __name__ == "__main__":
    main()
