"""Official checkpoints: files -> tensors.

`Checkpoint.open` maps all files and compares every header with the weight plan, so that all faults
are reported together and before anything is loaded. Tensors are converted in row tiles into memory
of their own, on the model's device; Engram tables stay in the map and are gathered row by row. Used
by `model/loader`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headrace.core.files import INDEX_FILE, SINGLE_FILE, read_regular
from headrace.errors import CheckpointError
from headrace.model.safetensors_file import Entry, SafetensorsFile
from headrace.model.spec import ModelSpec, QuantSpec
from headrace.model.stored_formats import (
    GROUP,
    compute_dtype,
    decode_fp4,
    decode_fp8,
)
from headrace.model.weight_checks import (
    check_codes,
    check_expert_ids,
    check_finite,
    check_mapped_finite,
    check_scales,
)
from headrace.model.weight_plan import (
    Kind,
    StoredTensor,
    TensorSpec,
    effective_kind,
    planned_tensors,
    scale_name,
    skipped,
    stored_tensors,
    weight_plan,
)
from headrace.ops.stored_weights import StoredWeight, WeightFormat

MAX_INDEX_BYTES = 256 * 2**20
# Numbers converted at a time: small against every large tensor, large against call overhead.
TILE_NUMBERS = 2**16
# On another device a call costs more and memory moves faster.
DEVICE_TILE_NUMBERS = 2**24
# A report lists this many names of a kind and counts the rest.
MAX_LISTED = 20
# Once a checkpoint lacks this many tensors more than it has, the rest is not worth counting.
MAX_MISSING = 1000
# (bytes done, bytes in all)
Progress = Callable[[int, int], None]


class WeightSource(Protocol):
    """Where a model's weights come from: a `Checkpoint`, or `random_weights.RandomWeights`."""

    @property
    def device(self) -> str:
        """Where tensors are put."""
        ...

    def has(self, name: str, /) -> bool:
        """See `Checkpoint`, as for the others."""
        ...

    def shape(self, name: str, /) -> tuple[int, ...]:
        """See there."""
        ...

    def dequantised(self, name: str, dtype: torch.dtype, /, out: Tensor | None = None) -> Tensor:
        """See there."""
        ...

    def mapped(self, name: str, /) -> Tensor:
        """See there."""
        ...

    def stored_weight(self, name: str, /) -> StoredWeight | None:
        """See there."""
        ...

    def engram_rows(self, layer: int, /) -> EngramTable:
        """See there."""
        ...


class EngramTable:
    """One Engram table inside the map; only gathered rows are ever read or dequantised."""

    def __init__(self, codes: Tensor, scales: Tensor | None) -> None:
        self._codes = codes
        self._scales = scales

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return int(self._codes.shape[0])

    def gather(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows (int64 [...]) -> numbers [..., head_dim] in `dtype`.

        A damaged row comes out as NaN and raises nothing: it may end the request that reads it,
        not those beside it.
        """
        flat = rows.reshape(-1)
        width = self._codes.shape[1]
        if self._scales is None:
            numbers = self._codes.index_select(0, flat).to(dtype)
        else:
            codes = self._codes.view(torch.uint8).index_select(0, flat)
            scales = self._scales.view(torch.uint8).index_select(0, flat)
            numbers = decode_fp8(
                codes.view(torch.float8_e4m3fn), scales, GROUP, compute_dtype(dtype)
            ).to(dtype)
        return numbers.view(*rows.shape, width)

    def gather_stored(self, rows: Tensor) -> Tensor:
        """Rows (int64 [...]) as they are stored: numbers, or uint8 [.., codes and scales].

        Half of what numbers in bf16 take, and decoded by who gets them, see `numbers`.
        """
        flat = rows.reshape(-1)
        if self._scales is None:
            return self._codes.index_select(0, flat).view(*rows.shape, -1)
        parts = (self._codes.view(torch.uint8), self._scales.view(torch.uint8))
        found = torch.cat([part.index_select(0, flat) for part in parts], dim=1)
        return found.view(*rows.shape, -1)

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """What `gather_stored` gave, on any device -> numbers [.., head_dim] in `dtype`."""
        if self._scales is None:
            return stored.to(dtype)
        width = self._codes.shape[1]
        flat = stored.flatten(0, -2)
        codes, scales = flat[:, :width].contiguous(), flat[:, width:].contiguous()
        weight = StoredWeight(codes, scales, WeightFormat.FP8, (1, GROUP))
        return weight.numbers(dtype).view(*stored.shape[:-1], width)


@dataclass(frozen=True, slots=True)
class _Located:
    """Where a stored tensor lies; `stored_name` is its name in the file."""

    file: SafetensorsFile
    stored_name: str

    @property
    def entry(self) -> Entry:
        return self.file.entries[self.stored_name]


class Checkpoint:
    """An open checkpoint that fits its spec; make it with `Checkpoint.open`.

    total_bytes / loaded_bytes: stored size of all that loading a model reads (of Engram tables,
    which stay mapped, the scales) and of what has been read so far, for progress reports. device:
    where `mapped` and `dequantised` put tensors, and where they are decoded.
    """

    def __init__(
        self,
        spec: ModelSpec,
        located: Mapping[str, _Located],
        progress: Progress | None = None,
        device: str = "cpu",
    ) -> None:
        self.spec = spec
        self.device = device
        self._progress = progress
        self._located = located
        self._plan = {tensor.name: tensor for tensor in weight_plan(spec)}
        self._loaded: set[str] = set()
        self.loaded_bytes = 0
        self.total_bytes = sum(map(self._stored_bytes, self._plan))

    @classmethod
    def open(
        cls,
        directory: Path,
        spec: ModelSpec,
        *,
        progress: Progress | None = None,
        device: str = "cpu",
    ) -> Checkpoint:
        """Map and check all files of `directory`; `progress` hears of every tensor read later.

        Raises one CheckpointError that lists everything found: unreadable or damaged files, or
        missing, unexpected and misshapen tensors and wrong dtypes.
        """
        paths, index = _shards(directory)
        shards: list[SafetensorsFile] = []
        problems: list[str] = []
        for path in paths:
            try:
                shards.append(SafetensorsFile(path))
            except CheckpointError as error:
                problems.append(error.message)
        if problems:
            raise _report(directory, problems)
        located, problems = _locate(shards, index)
        problems += _compare(spec, located)
        if problems:
            raise _report(directory, problems)
        return cls(spec, located, progress, device)

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return name in self._plan

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a tensor (of numbers, however they are packed)."""
        return self._plan[name].shape

    def tensor(self, name: str) -> Tensor:
        """A stored tensor (or `x.scale`) as it stands in the file: mapped, read-only."""
        located = self._located[name]
        self._count(name)
        return located.file.tensor(located.stored_name)

    def mapped(self, name: str) -> Tensor:
        """As `tensor`, but refused like `dequantised` for what it holds, and on the device."""
        stored = self.tensor(name)
        if self._plan[name].kind == "i64":
            check_expert_ids(name, stored, self.spec.num_experts)
        else:
            check_mapped_finite(name, stored)
        return stored.to(self.device)

    def dequantised(self, name: str, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The numbers of a tensor in `dtype`, in memory of their own (or in `out`).

        Works in tiles, so that little more than the result is allocated. Integer tensors keep
        their dtype. Raises CheckpointError naming the tensor where a value is not finite or no
        expert of the model, or a scale is NaN.
        """
        plan = self._plan[name]
        kind = effective_kind(plan.kind, self.spec.quant)
        stored = self.tensor(name)
        dtype = stored.dtype if kind == "i64" else dtype
        result = torch.empty(plan.shape, dtype=dtype, device=self.device) if out is None else out
        if kind == "i64":
            return result.copy_(self.mapped(name))
        scales = self.tensor(scale_name(name)) if kind in ("linear", "expert", "engram") else None
        if scales is not None:
            check_scales(scale_name(name), scales)
            scales = scales.view(torch.uint8).to(self.device)
        rows = plan.shape[0]
        step = self._tile_rows(plan)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            part = self._placed(stored[begin:end])
            tile = self._decode(kind, part, scales, begin, end, compute_dtype(dtype))
            # Checked as they are kept: a narrower dtype may overflow.
            kept = tile.to(dtype)
            check_finite(name, kept)
            result[begin:end] = kept
        return result

    def stored_weight(self, name: str) -> StoredWeight | None:
        """A matrix in the format that it has in the file, on the device; None if it is numbers.

        Raises CheckpointError naming the tensor where a code or a scale is NaN.
        """
        form = weight_form(self._plan[name], self.spec.quant)
        if form is None:
            return None
        codes = self.tensor(name).view(torch.uint8).to(self.device)
        scales = self.tensor(scale_name(name))
        check_scales(scale_name(name), scales)
        if form[0] is WeightFormat.FP8:
            check_codes(name, codes)
        return StoredWeight(codes, scales.view(torch.uint8).to(self.device), *form)

    def engram_rows(self, layer: int) -> EngramTable:
        """The table of an Engram layer (its number in the model), left in the map.

        All scales are looked at (3 GB of a released table, in order); the codes would be 100 GB.
        Raises CheckpointError naming the scales where one is NaN.
        """
        name = f"layers.{layer}.engram.embed.weight"
        located = self._located[name]
        located.file.advise_random(located.stored_name)
        codes = located.file.tensor(located.stored_name)
        if self.spec.quant is None:
            return EngramTable(codes, None)
        place = self._located[scale_name(name)]
        scales = place.file.tensor(place.stored_name)
        if name not in self._loaded:
            check_scales(scale_name(name), scales, self._advance)
            self._loaded.add(name)
        place.file.advise_random(place.stored_name)
        return EngramTable(codes, scales)

    def _placed(self, stored: Tensor) -> Tensor:
        """Whole rows of a stored tensor on the device, as bytes: whatever their dtype."""
        return stored.view(torch.uint8).to(self.device).view(stored.dtype)

    def _tile_rows(self, plan: TensorSpec) -> int:
        """Rows per tile: whole blocks of scales."""
        block = self.spec.quant.weight_block[0] if self.spec.quant is not None else 1
        columns = math.prod(plan.shape[1:])
        numbers = TILE_NUMBERS if torch.device(self.device).type == "cpu" else DEVICE_TILE_NUMBERS
        return max(1, numbers // max(1, columns * block)) * block

    def _decode(
        self,
        kind: Kind,
        stored: Tensor,
        scales: Tensor | None,
        begin: int,
        end: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Numbers of the rows [begin, end), already cut out of `stored`."""
        quant = self.spec.quant
        if quant is None or scales is None:
            return stored
        if kind == "expert":
            return decode_fp4(stored, scales[begin:end], dtype)
        if kind == "engram":
            return decode_fp8(stored, scales[begin:end], GROUP, dtype)
        block_rows, block_columns = quant.weight_block
        blocks = scales.view(torch.uint8)[begin // block_rows : -(-end // block_rows)]
        per_row = blocks.repeat_interleave(block_rows, dim=0)[: end - begin]
        return decode_fp8(stored, per_row, block_columns, dtype)

    def _stored_bytes(self, name: str) -> int:
        """Bytes that loading the tensor `name` of the plan reads."""
        names = [name] if self._plan[name].kind != "engram" else []
        names += [scale_name(name)] if name.endswith(".weight") else []
        entries = [self._located[n].entry for n in names if n in self._located]
        return sum(entry.end - entry.begin for entry in entries)

    def _count(self, name: str) -> None:
        plan = self._plan.get(name)
        if plan is not None and plan.kind != "engram" and name not in self._loaded:
            self._loaded.add(name)
            self._advance(self._stored_bytes(name))

    def _advance(self, read_bytes: int) -> None:
        self.loaded_bytes += read_bytes
        if self._progress is not None:
            self._progress(self.loaded_bytes, self.total_bytes)


def weight_form(
    tensor: TensorSpec, quant: QuantSpec | None
) -> tuple[WeightFormat, tuple[int, int]] | None:
    """Format and block of a matrix that a checkpoint quantises; None for others and for tables."""
    kind = effective_kind(tensor.kind, quant)
    if quant is None or kind not in ("linear", "expert"):
        return None
    return (
        (WeightFormat.FP4, (1, GROUP))
        if kind == "expert"
        else (WeightFormat.FP8, quant.weight_block)
    )


def _report(directory: Path, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {directory} cannot be used:" + "".join(f"\n  {p}" for p in problems)
    )


def _shards(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Weight files of a checkpoint and its index (tensor -> file), if it has one."""
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        single = directory / SINGLE_FILE
        if not single.exists():
            raise CheckpointError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}.")
        return [single], None
    index = _read_index(index_path)
    names = sorted(set(index.values()))
    odd = [name for name in names if Path(name).name != name or name in ("", ".", "..")]
    if odd:
        raise CheckpointError(f"{INDEX_FILE} names files outside its folder: {_listed(odd)}.")
    # os.path: unlike Path it says False for a name that no file can have.
    absent = [name for name in names if not os.path.isfile(directory / name)]
    if absent:
        raise CheckpointError(f"{INDEX_FILE} names files that do not exist: {_listed(absent)}.")
    return [directory / name for name in names], index


def _read_index(path: Path) -> dict[str, str]:
    data = read_regular(path, MAX_INDEX_BYTES)
    try:
        index = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map object.")
    if not all(isinstance(name, str) and "\0" not in name for name in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names.")
    return weight_map


def _locate(
    shards: Iterable[SafetensorsFile], index: Mapping[str, str] | None
) -> tuple[dict[str, _Located], list[str]]:
    """Names (without the optional "model." prefix) -> places, and disagreements with the index."""
    located: dict[str, _Located] = {}
    problems: list[str] = []
    twice, elsewhere, unlisted = [], [], []
    nowhere = set() if index is None else set(index)
    for file in shards:
        nowhere.difference_update(file.entries)
        for stored_name in file.entries:
            name = stored_name.removeprefix("model.")
            if name in located:
                twice.append(name)
            located[name] = _Located(file, stored_name)
            if index is None:
                continue
            if stored_name not in index:
                unlisted.append(stored_name)
            elif index[stored_name] != file.path.name:
                elsewhere.append(stored_name)
    for text, names in (
        ("stored twice", twice),
        (f"in another file than {INDEX_FILE} says", elsewhere),
        (f"not listed in {INDEX_FILE}", unlisted),
        (f"listed in {INDEX_FILE}, but in no file", sorted(nowhere)),
    ):
        if names:
            problems.append(f"{text} ({len(names)}): {_listed(names)}")
    return located, problems


def _compare(spec: ModelSpec, located: Mapping[str, _Located]) -> list[str]:
    """Differences between the files and the weight plan, as lines of a report."""
    missing, shapes, dtypes = [], [], []
    known: set[str] = set()
    for stored in _stored_plan(spec):
        name = stored.name
        if name not in located:
            missing.append(name)
            if len(missing) > len(located) + MAX_MISSING:
                # The config may ask for far more tensors than there are files for.
                return [f"missing (more than {len(missing) - 1}): {_listed(missing)}"]
            continue
        known.add(name)
        entry = located[name].entry
        if entry.shape != stored.shape:
            shapes.append(f"{name} {list(entry.shape)}, expected {list(stored.shape)}")
        if entry.dtype != stored.dtype:
            dtypes.append(f"{name} {entry.dtype}, expected {stored.dtype}")
    kinds = (
        ("missing", missing, ", "),
        ("unexpected", [n for n in located if n not in known and not skipped(n, spec)], ", "),
        ("wrong shape", shapes, "; "),
        ("wrong dtype", dtypes, "; "),
    )
    return [f"{text} ({len(x)}): {_listed(x, between)}" for text, x, between in kinds if x]


def _stored_plan(spec: ModelSpec) -> Iterator[StoredTensor]:
    for tensor in planned_tensors(spec):
        yield from stored_tensors(tensor, spec.quant)


def _listed(names: Sequence[str], between: str = ", ") -> str:
    # Names come from the files: repr escapes what no terminal and no UTF-8 should carry.
    shown = between.join(repr(name[:200])[1:-1] for name in names[:MAX_LISTED])
    rest = len(names) - MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
