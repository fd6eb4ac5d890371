"""Masters -> a checkpoint directory in the official layout, in files of at most 16 MiB.

`python -m train.export CHECKPOINT OUT` writes config.json, tokenizer.json and the weight files that
`headrace` loads like any other checkpoint. With `--bf16` nothing is quantised: what
`headrace eval tiny --model OUT` then loses is not the stored formats' doing.
`python -m train.export TARGET DRAFT OUT` adds a trained draft module to an exported checkpoint (OUT
may be TARGET). Both print the sizes.
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
from headrace.errors import CheckpointError, HeadraceError
from headrace.model.spec import ModelSpec, QuantSpec
from headrace.model.stored_formats import GROUP, encode_fp4, encode_fp8
from headrace.model.weight_plan import TensorSpec, effective_kind, scale_name
from train.checkpoint import Saved, load_latest
from train.config import with_draft, without_draft
from train.parameters import official, plan
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
    masters: Mapping[str, Tensor], config: Mapping[str, Any], tokenizer_json: Path, directory: Path
) -> list[Path]:
    """Write the checkpoint of the model without draft module; returns its files.

    config: config.json; its quantization_config says what is stored, none is bf16.
    """
    alone = without_draft(config)
    tensors = encoded(masters, ModelSpec.from_config(alone))
    return write_checkpoint(tensors, alone, tokenizer_json, directory)


def add_draft(target: Path, draft: Path, out: Path, stages: int = 2) -> list[Path]:
    """Write `target` with the draft module of the training checkpoint `draft` to `out`.

    stages: layers that the draft module was trained with. Confidence temperatures are left to
    `train.draft_eval --calibrate`.
    """
    tokenizer = target / "tokenizer.json"
    stored_config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config = with_draft(stored_config, tokenizer, num_nextn_predict_layers=stages)
    spec = ModelSpec.from_config(config)
    found = _loaded(draft, spec, draft=True)
    tensors = read_stored(target) | encoded(found.masters, spec, draft=True)
    return write_checkpoint(tensors, config, tokenizer, out)


def read_stored(directory: Path) -> dict[str, Tensor]:
    """The stored tensors of an exported checkpoint without its draft module, in memory."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(file)
    # Copies: the files may be written over.
    return {name: x.clone() for name, x in tensors.items() if not name.startswith("mtp.")}


def _loaded(directory: Path, spec: ModelSpec, draft: bool = False) -> Saved:
    found = load_latest([directory], spec, draft)
    if found is None:
        raise CheckpointError(f"{directory} holds no checkpoint (no meta.json).")
    return found


def write_checkpoint(
    tensors: dict[str, Tensor], config: Mapping[str, Any], tokenizer_json: Path, directory: Path
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
    parser.add_argument("source", type=Path, help="CHECKPOINT, or TARGET where DRAFT follows")
    parser.add_argument("draft", type=Path, nargs="?")
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default=Path("headrace/assets/tiny/config.json"))
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("headrace/assets/tiny/tokenizer.json")
    )
    parser.add_argument("--bf16", action="store_true", help="quantise nothing")
    parser.add_argument("--stages", type=int, default=2, help="layers of DRAFT")
    given = parser.parse_args(words)
    if given.bf16 and given.draft:
        parser.error("a draft module is stored as its TARGET is: --bf16 goes to TARGET's export.")
    try:
        files = _run(given)
    except HeadraceError as error:
        raise SystemExit(f"error: {error.message}") from error
    for file in files:
        print(f"{file.stat().st_size:>10} {file}")
    print(f"{sum(file.stat().st_size for file in files):>10} in all")


def _run(given: argparse.Namespace) -> list[Path]:
    if given.draft is not None:
        return add_draft(given.source, given.draft, given.out, given.stages)
    config = without_draft(json.loads(given.config.read_text(encoding="utf-8")))
    if given.bf16:
        config = unquantised(config)
    found = _loaded(given.source, ModelSpec.from_config(config))
    return export(found.masters, config, given.tokenizer, given.out)


if __name__ == "__main__":
    main()
