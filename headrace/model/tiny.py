"""Tiny random checkpoints in the official layout, for tests and for trying the server out.

`write_tiny` makes a complete checkpoint directory from a preset and a seed: the same bytes for the
same arguments. The weights are random, so the text is noise; `headrace.json` says so and the server
repeats it. Called by `headrace tiny` and by tests.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.files import INDEX_FILE, SINGLE_FILE
from headrace.errors import OutputError
from headrace.model import tiny_tokenizer
from headrace.model.engram_tables import load_tokenizer, tokenizer_map
from headrace.model.spec import ModelSpec, QuantSpec
from headrace.model.stored_formats import GROUP, encode_fp4, encode_fp8
from headrace.model.tiny_presets import check_arguments, preset_config
from headrace.model.weight_plan import (
    TensorSpec,
    effective_kind,
    scale_name,
    weight_plan,
)

NOTE_FILE = "headrace.json"
# Logit spread: enough that greedy choices are clear, not so much that sampling is.
LOGIT_STD = 2.0
# Share of that spread for control tokens and bytes beyond ASCII: answers stay readable noise.
QUIET_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class TinySummary:
    """What was written. parameters: numbers; stored_bytes: of all weight files' tensors."""

    directory: Path
    layers: int
    parameters: int
    stored_bytes: int
    files: tuple[str, ...]


def write_tiny(
    directory: Path,
    *,
    preset: str = "tiny-8",
    seed: int = 1,
    quantised: bool = True,
    shards: int = 1,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> TinySummary:
    """Write a checkpoint into `directory`, which must be empty or absent unless `force`.

    progress: called with (tensors made, tensors in all). Raises ConfigError (arguments, directory
    not empty), OutputError (cannot be written).
    """
    check_arguments(directory, preset=preset, seed=seed, shards=shards, force=force)
    _prepare(directory)
    tokenizer_text = json.dumps(tiny_tokenizer.tiny_tokenizer(), ensure_ascii=False)
    _write_text(directory / "tokenizer.json", tokenizer_text)
    token_map = tokenizer_map(
        load_tokenizer(directory / "tokenizer.json"), tiny_tokenizer.VOCAB_SIZE
    )
    config = preset_config(preset, quantised=quantised, compressed_vocab=int(token_map.max()) + 1)
    spec = ModelSpec.from_config(config)
    plan = weight_plan(spec)
    tensors: dict[str, Tensor] = {}
    for done, tensor in enumerate(plan, start=1):
        tensors.update(_stored(tensor, random_tensor(spec, tensor, seed), spec.quant))
        if progress is not None:
            progress(done, len(plan))
    files = _write_weights(directory, tensors, shards)
    note = {"random": True, "preset": preset, "seed": seed, "quantised": quantised}
    _write_text(directory / NOTE_FILE, json.dumps(note) + "\n")
    # Last, so that a directory that was not finished is no checkpoint.
    _write_text(directory / "config.json", json.dumps(config, indent=1) + "\n")
    return TinySummary(
        directory=directory,
        layers=spec.num_layers,
        parameters=sum(math.prod(tensor.shape) for tensor in plan),
        stored_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
        files=("config.json", "tokenizer.json", NOTE_FILE, *files),
    )


# --- numbers -----------------------------------------------------------------------------------


def random_tensor(spec: ModelSpec, tensor: TensorSpec, seed: int) -> Tensor:
    """Initial numbers of one tensor, float32 (int64 for tables of ids).

    They depend on the name and the seed alone. Every kind of parameter differs from its neutral
    value (norms from 1, sinks and biases from 0), so that leaving one out shows in the logits.
    """
    name, shape = tensor.name, tensor.shape
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if tensor.kind == "i64":
        order = generator.random((shape[0], spec.num_experts)).argsort(axis=1)
        return torch.from_numpy(order[:, : shape[1]].copy())
    normal = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    last = name.rpartition(".")[2]
    if name.endswith("norm.weight") or last in ("q_weight", "k_weight"):
        return 1.0 + 0.1 * normal
    if last.startswith("hc_"):
        return _stream_parameter(spec, name, normal)
    if last == "attn_sink":
        return 0.2 * normal
    if last in ("bias", "bias_vl"):
        return 0.02 * normal
    if last == "ape":
        return 0.1 * normal
    if name.endswith("embed.weight"):
        return normal
    if name == "head.weight":
        return normal * (LOGIT_STD / math.sqrt(shape[-1])) * _loudness(shape[0])
    return normal / math.sqrt(shape[-1])


def _stream_parameter(spec: ModelSpec, name: str, normal: Tensor) -> Tensor:
    """Hyper-connection parameters near their training start: stream L mod hc carries layer L."""
    if name.endswith("_fn"):
        return 0.01 * normal
    if name.endswith("_scale"):
        return 0.5 + 0.05 * normal
    streams = spec.hc_mult
    base = 0.1 * normal
    if name == "hc_head_base":
        return base
    number = int(name.split(".")[1])
    base[:streams] -= 3.0
    base[number % streams] += 3.0
    mix = base[2 * streams :].view(streams, streams)
    mix -= 3.0
    mix.diagonal().add_(6.0)
    return base


def _loudness(vocab_size: int) -> Tensor:
    """[vocab, 1] factors of the head's rows: control tokens and bytes beyond ASCII are quiet."""
    loud = torch.full((vocab_size, 1), 1.0)
    for token in tiny_tokenizer.control_ids().values():
        loud[token] = QUIET_SHARE
    for offset, spelling in enumerate(tiny_tokenizer.byte_spellings()):
        if not spelling.isascii():
            loud[tiny_tokenizer.FIRST_BYTE + offset] = QUIET_SHARE
    return loud


def _stored(tensor: TensorSpec, numbers: Tensor, quant: QuantSpec | None) -> dict[str, Tensor]:
    """The tensors that go into the file for `numbers`."""
    name = tensor.name
    kind = effective_kind(tensor.kind, quant)
    if quant is None or kind in ("bf16", "f32", "i64"):
        return {name: numbers.to(torch.bfloat16) if kind == "bf16" else numbers}
    if kind == "expert":
        codes, scales = encode_fp4(numbers)
    else:
        codes, scales = encode_fp8(numbers, quant.weight_block if kind == "linear" else (1, GROUP))
    return {name: codes, scale_name(name): scales}


# --- files -------------------------------------------------------------------------------------


def _prepare(directory: Path) -> None:
    """Make the directory and remove old weight files that would shadow the new ones."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory / INDEX_FILE, *directory.glob("model-*-of-*.safetensors")):
            path.unlink(missing_ok=True)
        (directory / "config.json").unlink(missing_ok=True)
    except OSError as error:
        raise _output_error(directory, error) from error


def _output_error(path: Path, error: Exception) -> OutputError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return OutputError(f"{path} cannot be written: {reason}.")


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _output_error(path, error) from error


def _write_weights(directory: Path, tensors: dict[str, Tensor], shards: int) -> list[str]:
    """Write one file, or shards with their index; returns the names of the files."""
    if shards == 1:
        _save(directory / SINGLE_FILE, tensors)
        return [SINGLE_FILE]
    names, weight_map = [], {}
    for number, names_in_shard in enumerate(_split(tensors, shards), start=1):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        _save(directory / file_name, {name: tensors[name] for name in names_in_shard})
        weight_map.update(dict.fromkeys(names_in_shard, file_name))
        names.append(file_name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_text(directory / INDEX_FILE, json.dumps(index, indent=1) + "\n")
    return [*names, INDEX_FILE]


def _split(tensors: dict[str, Tensor], shards: int) -> Iterator[list[str]]:
    """Names in order, cut into `shards` runs of about equal bytes, none empty."""
    names = list(tensors)
    sizes = np.cumsum([t.numel() * t.element_size() for t in tensors.values()])
    begin = 0
    for shard in range(1, shards + 1):
        cut = int(np.searchsorted(sizes, sizes[-1] * shard / shards)) + 1
        end = (
            len(names) if shard == shards else min(max(cut, begin + 1), len(names) - shards + shard)
        )
        yield names[begin:end]
        begin = end


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        # The library makes files that only their owner may read.
        path.chmod(0o644)
    except (OSError, SafetensorError) as error:
        raise _output_error(path, error) from error
