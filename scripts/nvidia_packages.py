"""Names of CUDA packages in what pip says: `pip list --format json` or a `--report`, on stdin.

Prints them on one line, separated by commas, or nothing. `scripts/install` uses it to refuse a CUDA
build of torch where a CPU build was asked for: once before the download, once after it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PREFIXES = ("nvidia", "cuda")


def cuda_packages(report: Any) -> list[str]:
    """Sorted names in a report of `pip install --dry-run` (a dict) or of `pip list` (a list)."""
    entries = [e["metadata"] for e in report["install"]] if isinstance(report, dict) else report
    return sorted(e["name"] for e in entries if e["name"].lower().startswith(PREFIXES))


if __name__ == "__main__":
    print(", ".join(cuda_packages(json.load(sys.stdin))))
