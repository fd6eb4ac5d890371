"""Masters -> a checkpoint directory in the official layout, in files of at most 16 MiB.

`python -m train.export CHECKPOINT OUT` writes config.json, tokenizer.json and the weight files that
`headrace` loads like any other checkpoint, and prints their sizes. With `--bf16` nothing is
quantised: what `headrace eval tiny --model OUT` then loses is not the stored formats' doing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.core.files import INDEX_FILE, SINGLE_FILE
from headrace.errors import HeadraceError
from headrace.model.spec import ModelSpec, QuantSpec
from headrace.model.stored_formats import GROUP, encode_fp4, encode_fp8
from headrace.model.weight_plan import TensorSpec, effective_kind, scale_name
from train.checkpoint import load_latest
from train.parameters import backbone_plan, official
from train.parts import parts, size


def stored(tensor: TensorSpec, numbers: Tensor, quant: QuantSpec | None) -> dict[str, Tensor]:
    """What goes into the file for one tensor; without `quant` in bf16."""
    kind = effective_kind(tensor.kind, quant)
    if kind == "f32":
        return {tensor.name: numbers.to(torch.float32, copy=True).contiguous()}
    if quant is None or kind == "bf16":
        return {tensor.name: numbers.to(torch.bfloat16, copy=True).contiguous()}
    if kind == "expert":
        codes, scales = encode_fp4(numbers)
    else:
        codes, scales = encode_fp8(numbers, quant.weight_block if kind == "linear" else (1, GROUP))
    return {tensor.name: codes, scale_name(tensor.name): scales}


def unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config for weights in bf16."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def export(
    masters: Mapping[str, Tensor],
    config: Mapping[str, Any],
    tokenizer_json: Path,
    directory: Path,
    extra: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """Write the checkpoint; returns its files. extra: stored tensors to add (mtp.*).

    config: config.json; its quantization_config says what is stored, none is bf16.
    """
    spec = ModelSpec.from_config(config)
    numbers = official(masters, spec)
    tensors: dict[str, Tensor] = {}
    for tensor in backbone_plan(spec):
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
    split = list(parts(tensors.items()))
    count = len(split)
    files, weight_map = [], {}
    for number, part in enumerate(split, start=1):
        name = SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(part, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(0o644)
        weight_map.update(dict.fromkeys(part, name))
        files.append(directory / name)
    if count > 1:
        total = sum(map(size, tensors.values()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        files.append(directory / INDEX_FILE)
    return files


def main(words: Sequence[str] | None = None) -> None:
    """Command line; `words` instead of the program's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default=Path("headrace/assets/tiny/config.json"))
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("headrace/assets/tiny/tokenizer.json")
    )
    parser.add_argument("--extra", type=Path, help="safetensors with mtp.* tensors")
    parser.add_argument("--bf16", action="store_true", help="quantise nothing")
    given = parser.parse_args(words)
    if given.bf16 and given.extra:
        parser.error("--extra holds tensors in the quantised layout: it does not fit --bf16.")
    config = json.loads(given.config.read_text(encoding="utf-8"))
    if given.bf16:
        config = unquantised(config)
    try:
        found = load_latest([given.checkpoint], ModelSpec.from_config(config))
    except HeadraceError as error:
        raise SystemExit(f"error: {error.message}") from error
    if found is None:
        raise SystemExit(f"error: {given.checkpoint} holds no checkpoint (no meta.json).")
    extra = load_file(given.extra) if given.extra else None
    files = export(found.masters, config, given.tokenizer, given.out, extra)
    for file in files:
        print(f"{file.stat().st_size:>10} {file}")
    print(f"{sum(file.stat().st_size for file in files):>10} in all")


if __name__ == "__main__":
    main()
