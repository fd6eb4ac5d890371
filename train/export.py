"""Masters -> a checkpoint directory in the official quantised layout, in files of <= 15 MiB.

`python -m train.export CHECKPOINT OUT` writes config.json, tokenizer.json and the weight files that
`headrace` loads like any other checkpoint. `python -m train.export TARGET DRAFT OUT` adds a trained
draft module to an exported checkpoint (OUT may be TARGET). Both print the sizes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.core.files import INDEX_FILE, SINGLE_FILE
from headrace.model.spec import ModelSpec, QuantSpec
from headrace.model.stored_formats import GROUP, encode_fp4, encode_fp8
from headrace.model.weight_plan import TensorSpec, effective_kind, scale_name
from train.checkpoint import Saved, load_latest
from train.config import with_draft, without_draft
from train.parameters import official, plan

PART_BYTES = 15 * 2**20


def stored(tensor: TensorSpec, numbers: Tensor, quant: QuantSpec | None) -> dict[str, Tensor]:
    """What goes into the file for one tensor."""
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


def encoded(
    masters: Mapping[str, Tensor], spec: ModelSpec, draft: bool = False
) -> dict[str, Tensor]:
    """The masters of the model or of its draft module in their stored formats, by stored name."""
    numbers = official(masters, spec, draft)
    tensors: dict[str, Tensor] = {}
    for tensor in plan(spec, draft):
        tensors |= stored(tensor, numbers[tensor.name].detach().cpu(), spec.quant)
    return tensors


def export(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], tokenizer_json: Path, directory: Path
) -> list[Path]:
    """Write the checkpoint of stored tensors; returns its files."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    files = _write(directory, tensors)
    if tokenizer_json.resolve() != (directory / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer_json, directory / "tokenizer.json")
    write_config(config, directory)
    return [*files, directory / "tokenizer.json", directory / "config.json"]


def write_config(config: Mapping[str, Any], directory: Path) -> None:
    """config.json."""
    text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def read_stored(directory: Path) -> dict[str, Tensor]:
    """The stored tensors of an exported checkpoint without its draft module, in memory."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(file)
    # Copies: the files may be written over.
    return {name: x.clone() for name, x in tensors.items() if not name.startswith("mtp.")}


def add_draft(target: Path, draft: Path, out: Path) -> list[Path]:
    """Write `target` with the draft module of the training checkpoint `draft` to `out`.

    Confidence temperatures are left to `train.draft_eval --calibrate`.
    """
    tokenizer = target / "tokenizer.json"
    stored_config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config = with_draft(stored_config, tokenizer)
    spec = ModelSpec.from_config(config)
    found = _loaded(draft, spec, draft=True)
    tensors = read_stored(target) | encoded(found.masters, spec, draft=True)
    return export(tensors, config, tokenizer, out)


def _loaded(directory: Path, spec: ModelSpec, draft: bool = False) -> Saved:
    found = load_latest([directory], spec, draft)
    if found is None:
        raise SystemExit(f"{directory} holds no checkpoint.")
    return found


def _write(directory: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
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
    parser.add_argument("source", type=Path, help="CHECKPOINT, or TARGET where DRAFT follows")
    parser.add_argument("draft", type=Path, nargs="?")
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default=Path("headrace/assets/tiny/config.json"))
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("headrace/assets/tiny/tokenizer.json")
    )
    given = parser.parse_args()
    if given.draft is not None:
        files = add_draft(given.source, given.draft, given.out)
    else:
        config = without_draft(json.loads(given.config.read_text(encoding="utf-8")))
        spec = ModelSpec.from_config(config)
        tensors = encoded(_loaded(given.source, spec).masters, spec)
        files = export(tensors, config, given.tokenizer, given.out)
    for file in files:
        print(f"{file.stat().st_size:>10} {file}")
    print(f"{sum(file.stat().st_size for file in files):>10} in all")


if __name__ == "__main__":
    main()
