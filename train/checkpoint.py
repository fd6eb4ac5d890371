"""Training checkpoints: small parts that travel, and a full one that stays on the machine.

parts (`save_parts`): masters as bf16 in safetensors files of <= 15 MiB and meta.json; without the
optimiser's state, which is warmed up again. full (`save_full`): everything, one file, for the next
call on a machine that is still warm. `load_latest` takes the newest of several directories.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.model.spec import ModelSpec
from train.parameters import Parameters, from_official, official

PART_BYTES = 15 * 2**20
FULL = "full.pt"
META = "meta.json"


@dataclass(slots=True)
class Saved:
    """masters, the run's counters, the optimiser's state (None where it did not travel)."""

    masters: Parameters
    meta: dict[str, Any] = field(default_factory=dict)
    optimiser: dict[str, Any] | None = None


def save_parts(
    directory: Path,
    masters: Mapping[str, Tensor],
    spec: ModelSpec,
    meta: Mapping[str, Any],
    draft: bool = False,
) -> None:
    """Write the parts; a directory without meta.json is none, so it is written last.

    draft: the masters are those of the draft module.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / META).unlink(missing_ok=True)
    f32 = ("hc_", "attn_sink", "gate.bias")
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, master in official(masters, spec, draft).items():
        keep = any(mark in name for mark in f32)
        tensor = master.detach().to("cpu", torch.float32 if keep else torch.bfloat16).contiguous()
        bytes_ = tensor.numel() * tensor.element_size()
        if size + bytes_ > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += bytes_
    for number, part in enumerate(parts):
        save_file(part, directory / f"part-{number}.safetensors")
    written = {**meta, "parts": len(parts)}
    (directory / META).write_text(json.dumps(written) + "\n", encoding="utf-8")


def save_full(
    directory: Path,
    masters: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    optimiser: Mapping[str, Any],
) -> None:
    """Write everything into one file, replaced in one step."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / (FULL + ".new")
    torch.save(
        {"masters": dict(masters), "meta": dict(meta), "optimiser": dict(optimiser)}, temporary
    )
    os.replace(temporary, directory / FULL)


def load_latest(directories: Sequence[Path], spec: ModelSpec, draft: bool = False) -> Saved | None:
    """The checkpoint with the most steps of those that exist; a full one wins a tie."""
    best: Saved | None = None
    for directory in directories:
        for load in (_load_full, _load_parts):
            found = load(directory, spec, draft)
            if found is not None and (best is None or _worth(found) > _worth(best)):
                best = found
    return best


def _worth(saved: Saved) -> tuple[int, bool]:
    return saved.meta["step"], saved.optimiser is not None


def _load_full(directory: Path, spec: ModelSpec, draft: bool) -> Saved | None:
    path = directory / FULL
    if not path.exists():
        return None
    read = torch.load(path, map_location="cpu", weights_only=True)
    return Saved(read["masters"], read["meta"], read["optimiser"])


def _load_parts(directory: Path, spec: ModelSpec, draft: bool) -> Saved | None:
    path = directory / META
    if not path.exists():
        return None
    meta = json.loads(path.read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for number in range(meta["parts"]):
        tensors |= load_file(directory / f"part-{number}.safetensors")
    return Saved(from_official(tensors, spec, draft), meta)
