"""Training checkpoints: a folder of safetensors files of at most 16 MiB and a meta.json.

One format, two contents. Without the optimiser's state (`--out`): masters in bf16, which travel and
are what is exported; a resume from them warms the optimiser up again. With it (`--local`): masters
in fp32 and the optimiser's tensors, from which training goes on as if it had not stopped.

meta.json names the files and is replaced in one step after all of them are written: until then the
folder is what it was before, a checkpoint or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.spec import ModelSpec
from train.parameters import Parameters, from_official, official
from train.parts import PART_BYTES, parts

META = "meta.json"
# Before the names of the optimiser's tensors; official names have no slash.
_OPTIMISER = "optimiser/"
# Masters that stay fp32: the released checkpoints store them so.
_WIDE = ("hc_", "attn_sink", "gate.bias")


@dataclass(slots=True)
class Saved:
    """masters (fp32), the run's counters, the optimiser's state (None where it did not travel)."""

    masters: Parameters
    meta: dict[str, Any] = field(default_factory=dict)
    optimiser: Parameters | None = None


def save(
    directory: Path,
    masters: Mapping[str, Tensor],
    spec: ModelSpec,
    meta: Mapping[str, Any],
    optimiser: Mapping[str, Tensor] | None = None,
    limit: int = PART_BYTES,
    draft: bool = False,
) -> None:
    """Write a checkpoint; one that the folder holds is kept until this one is complete.

    meta: JSON values, among them "step". optimiser: `Optimiser.state`; masters are fp32 with it
    and bf16 without. limit: bytes of tensors in a file. draft: the masters are those of the draft
    module alone. Raises ValueError for a tensor larger than the limit.
    """
    directory.mkdir(parents=True, exist_ok=True)
    old = _files(_read_meta(directory) or {})
    stem = f"step-{meta['step']:07d}-{'full' if optimiser is not None else 'bf16'}"
    # Saved twice at the same step: never write into a file that the present meta.json names.
    if any(name.startswith(stem + "-part") for name in old):
        stem += "-again"
    files = []
    for number, part in enumerate(
        parts(_tensors(official(masters, spec, draft), optimiser), limit)
    ):
        files.append(f"{stem}-part-{number:02d}.safetensors")
        save_file(part, directory / files[-1])
    written = {**meta, "optimiser": optimiser is not None, "files": files}
    temporary = directory / (META + ".new")
    temporary.write_text(json.dumps(written) + "\n", encoding="utf-8")
    os.replace(temporary, directory / META)
    for path in directory.glob("*part-*.safetensors"):
        if path.name not in files:
            path.unlink()


def _tensors(
    masters: Mapping[str, Tensor], optimiser: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    for name, master in masters.items():
        wide = optimiser is not None or any(mark in name for mark in _WIDE)
        dtype = torch.float32 if wide else torch.bfloat16
        # Copied: experts are views of one tensor, which the file format refuses.
        yield name, master.detach().to("cpu", dtype, copy=True).contiguous()
    for name, tensor in (optimiser or {}).items():
        yield _OPTIMISER + name, tensor.detach().to("cpu", copy=True).contiguous()


def load(directory: Path, spec: ModelSpec, draft: bool = False) -> Saved | None:
    """The checkpoint of a folder; None where there is none. draft: of the spec's draft module.

    Raises CheckpointError where meta.json is there and what it names is not, or not of this model.
    """
    meta = _read_meta(directory)
    if meta is None:
        return None
    tensors: dict[str, Tensor] = {}
    for name in _files(meta):
        try:
            tensors |= load_file(directory / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory / name}, which {META} names, cannot be read: {error}. Copy the "
                "checkpoint again, or leave the folder out."
            ) from error
    own = {n: t for n, t in tensors.items() if not n.startswith(_OPTIMISER)}
    state = {n.removeprefix(_OPTIMISER): t for n, t in tensors.items() if n not in own}
    try:
        masters = from_official(own, spec, draft)
    except KeyError as missing:
        raise CheckpointError(
            f"{directory} lacks {missing.args[0]}: it was written for another config."
        ) from missing
    return Saved(masters, meta, state if meta.get("optimiser") else None)


def load_latest(directories: Sequence[Path], spec: ModelSpec, draft: bool = False) -> Saved | None:
    """The checkpoint with the most steps; of equals one with the optimiser's state, then the first.

    draft and errors as in `load`.
    """
    metas = [(directory, _read_meta(directory)) for directory in directories]
    known = [(directory, meta) for directory, meta in metas if meta is not None]
    if not known:
        return None
    best, _ = max(known, key=lambda one: (one[1]["step"], bool(one[1].get("optimiser"))))
    return load(best, spec, draft)


def _read_meta(directory: Path) -> dict[str, Any] | None:
    path = directory / META
    if not path.exists():
        return None
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("step"), int):
        raise CheckpointError(f"{path} is no meta.json of a training checkpoint: it has no step.")
    return meta


def _files(meta: Mapping[str, Any]) -> list[str]:
    """Names of the files; checkpoints made before 0.1 count them instead."""
    return meta.get("files") or [f"part-{n}.safetensors" for n in range(meta.get("parts", 0))]
