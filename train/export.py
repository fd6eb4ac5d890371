"""Masters -> a checkpoint directory in the official quantised layout, in files of <= 15 MiB.

`python -m train.export CHECKPOINT OUT` writes config.json, tokenizer.json and the weight files that
`headrace` loads like any other checkpoint, and prints their sizes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.core.files import INDEX_FILE, SINGLE_FILE
from headrace.model.spec import ModelSpec, QuantSpec
from headrace.model.stored_formats import GROUP, encode_fp4, encode_fp8
from headrace.model.weight_plan import TensorSpec, effective_kind, scale_name
from train.checkpoint import load_latest
from train.parameters import official, plan

PART_BYTES = 15 * 2**20


def stored(tensor: TensorSpec, numbers: Tensor, quant: QuantSpec | None) -> dict[str, Tensor]:
    """What goes into the file for one tensor."""
    import torch

    kind = effective_kind(tensor.kind, quant)
    if kind == "f32":
        return {tensor.name: numbers.float().contiguous()}
    if quant is None or kind == "bf16":
        return {tensor.name: numbers.to(torch.bfloat16).contiguous()}
    if kind == "expert":
        codes, scales = encode_fp4(numbers)
    else:
        codes, scales = encode_fp8(numbers, quant.weight_block if kind == "linear" else (1, GROUP))
    return {tensor.name: codes, scale_name(tensor.name): scales}


def export(
    masters: Mapping[str, Tensor],
    config: Mapping[str, Any],
    tokenizer_json: Path,
    directory: Path,
    extra: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """Write the checkpoint; returns its files. extra: stored tensors to add (mtp.*)."""
    spec = ModelSpec.from_config(config)
    numbers = official(masters, spec)
    tensors: dict[str, Tensor] = {}
    for tensor in plan(spec):
        tensors |= stored(tensor, numbers[tensor.name].detach().cpu(), spec.quant)
    tensors |= dict(extra or {})
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    files = _write(directory, tensors)
    if tokenizer_json.resolve() != (directory / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer_json, directory / "tokenizer.json")
    text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    return [*files, directory / "tokenizer.json", directory / "config.json"]


def _write(directory: Path, tensors: dict[str, Tensor]) -> list[Path]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if size + bytes_ > PART_BYTES and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += bytes_
    count = len(parts)
    files, weight_map = [], {}
    for number, part in enumerate(parts, start=1):
        name = SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(part, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(0o644)
        weight_map.update(dict.fromkeys(part, name))
        files.append(directory / name)
    if count > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        files.append(directory / INDEX_FILE)
    return files


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default=Path("headrace/assets/tiny/config.json"))
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("headrace/assets/tiny/tokenizer.json")
    )
    parser.add_argument("--extra", type=Path, help="safetensors with mtp.* tensors")
    given = parser.parse_args()
    config = json.loads(given.config.read_text(encoding="utf-8"))
    found = load_latest([given.checkpoint], ModelSpec.from_config(config))
    if found is None:
        raise SystemExit(f"{given.checkpoint} holds no checkpoint.")
    extra = load_file(given.extra) if given.extra else None
    files = export(found.masters, config, given.tokenizer, given.out, extra)
    for file in files:
        print(f"{file.stat().st_size:>10} {file}")
    print(f"{sum(file.stat().st_size for file in files):>10} in all")


if __name__ == "__main__":
    main()
