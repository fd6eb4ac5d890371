"""Opening one .safetensors file: header checked against the file, data mapped, nothing copied.

The format has no checksum, so damage shows only in lengths and offsets; all of them are checked
before a byte of data is touched. Errors name the file. Called by `weights` only. The mapping is
read-only: writing to a tensor from it ends the process.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from headrace.core.files import open_regular
from headrace.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
# Multiplying out a shape of a hostile header must stay cheap.
MAX_RANK = 8
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. begin, end: absolute byte offsets."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A mapped file; `entries` lists its tensors by name."""

    def __init__(self, path: Path) -> None:
        """Open and check. Raises CheckpointError naming the file and what is wrong with it."""
        self.path = path
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                file.seek(0)
                self.entries = _read_header(path, file, size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise CheckpointError(f"{path.name} cannot be read ({reason}).") from error

    def tensor(self, name: str) -> Tensor:
        """The stored tensor as a read-only view of the mapping."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        with warnings.catch_warnings():
            # torch cannot express read-only tensors and warns about every one.
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def advise_random(self, name: str) -> None:
        """Tell the system that rows of this tensor are read here and there: no read-ahead."""
        entry = self.entries[name]
        first = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM, first, entry.end - first)


def _read_header(path: Path, file: BinaryIO, size: int) -> dict[str, Entry]:
    def damaged(problem: str) -> CheckpointError:
        return CheckpointError(f"{path.name} is damaged: {problem}.")

    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path.name} is truncated: {size} bytes, a header needs 8.")
    length = int(struct.unpack("<Q", prefix)[0])
    if length > MAX_HEADER_BYTES:
        raise damaged(f"header length {length} exceeds {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise CheckpointError(f"{path.name} is truncated: {size} bytes, header needs {8 + length}.")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise damaged("header is not JSON") from error
    if not isinstance(header, dict):
        raise damaged("header is not a JSON object")
    header.pop("__metadata__", None)
    base = 8 + length
    entries = {}
    for name, value in header.items():
        try:
            entries[name] = _entry(value, base)
        except (TypeError, ValueError, KeyError) as error:
            raise damaged(f"header entry {name[:80]!r} is malformed") from error
    _check_extents(path, entries, base, size)
    return entries


def _entry(value: dict[str, object], base: int) -> Entry:
    """Parse one entry; any of the three errors its caller expects means "malformed"."""
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError
    if len(shape) > MAX_RANK:
        raise ValueError
    begin, end = offsets
    numbers = (*shape, begin, end)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise ValueError
    if end - begin > 2**60 or any(n > 2**60 for n in numbers):
        raise ValueError
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError
    return Entry(dtype, tuple(shape), base + begin, base + end)


def _check_extents(path: Path, entries: dict[str, Entry], base: int, size: int) -> None:
    """Tensors must tile the data part exactly, in some order."""
    position = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position or entry.end < entry.begin:
            raise CheckpointError(
                f"{path.name} is damaged: data of {name[:80]!r} starts at byte {entry.begin}, "
                f"expected {position}."
            )
        position = entry.end
    if position > size:
        raise CheckpointError(
            f"{path.name} is truncated: {size} bytes, its header needs {position}."
        )
    if position < size:
        raise CheckpointError(
            f"{path.name} is damaged: {size - position} bytes follow the last tensor."
        )
