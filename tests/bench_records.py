"""Records of sweeps below docs/bench, written by the sweeps themselves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.platforms import CpuPlatform

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "bench"


def write_record(file: str, name: str, **facts: Any) -> None:
    """Put a line into docs/bench/`file` (JSON lines), in place of the one of the same name."""
    platform = CpuPlatform()
    env = {**asdict(platform.fingerprint()), "cores": platform.cores()}
    path = FOLDER / file
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["name"] != name]
    kept.append(json.dumps({"name": name, **facts, "env": env}, ensure_ascii=False))
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
