"""The cache memory of an engine: one arena of blocks, one of slots, and views of their rows.

Both arenas are bytes; `view` cuts out the rows of one group in one layer as `kv/layout` places
them. Block 0 and slot 0 are the padding target. Content is never cleared between requests: masks
alone keep them apart, which tests prove by `poison`. Written and read by `ops`, owned by the
engine; the only module of `kv` that imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.core.kv import GroupKind, KVGroupSpec, RecordFormat
from headrace.errors import ConfigError, InternalError
from headrace.kv.layout import BLOCK_TOKENS, BlockLayout, Item, SlotLayout
from headrace.ops.records import RecordView

# Every bit set is a NaN in fp64, fp32, bf16, E4M3 and UE8M0: one byte poisons all formats.
_POISON = 0xFF
_ARENA_ALIGN_BYTES = 64


class KVCache:
    """blocks: uint8 [num_blocks, stride]; slots: uint8 [num_slots, stride], on one device."""

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        *,
        num_blocks: int,
        num_slots: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype | None = None,
        block_tokens: int = BLOCK_TOKENS,
        device: str = "cpu",
    ) -> None:
        """Reserve the memory; on a CPU pages cost nothing until they are written.

        dtype: of PLAIN paged and ring rows. state_dtype: of state rows; by default fp64 if `dtype`
        is, else fp32. Both counts include the reserved number 0. Raises ConfigError for groups that
        cannot be laid out and where the machine refuses the memory.
        """
        if state_dtype is None:
            state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.block_layout = BlockLayout.build(
            groups, block_tokens=block_tokens, number_bytes=dtype.itemsize
        )
        self.slot_layout = SlotLayout.build(
            groups, number_bytes=dtype.itemsize, state_bytes=state_dtype.itemsize
        )
        self.blocks = _reserve(num_blocks, self.block_layout.stride_bytes, device)
        self.slots = _reserve(num_slots, self.slot_layout.stride_bytes, device)
        self._views: dict[tuple[str, int], RecordView] = {}
        for arena, items in (
            (self.blocks, self.block_layout.items),
            (self.slots, self.slot_layout.items),
        ):
            for item in items:
                plain = state_dtype if item.group.kind is GroupKind.STATE else dtype
                self._views[item.group.name, item.layer] = _view(arena, item, plain)

    def view(self, group_name: str, layer: int) -> RecordView:
        """Rows of a group in one of its owner layers; majors are blocks or slots.

        Raises InternalError where the layer owns no such rows (sharers read their owner's).
        """
        try:
            return self._views[group_name, layer]
        except KeyError:
            raise InternalError(f"Layer {layer} owns no rows of KV group {group_name!r}.") from None

    @property
    def block_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks.numel()

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots.numel()

    @property
    def total_bytes(self) -> int:
        """Bytes of both arenas."""
        return self.block_bytes + self.slot_bytes

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each; all sources are read before any write."""
        _copy_rows(self.blocks, pairs)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole slots, (source, target) each; all sources are read before any write."""
        _copy_rows(self.slots, pairs)

    def poison(self) -> None:
        """Make every row NaN, the reserved ones too; touches all pages. For tests."""
        self.blocks.fill_(_POISON)
        self.slots.fill_(_POISON)


def _reserve(count: int, stride_bytes: int, device: str) -> Tensor:
    """Zeroed uint8 [count, stride_bytes]."""
    if torch.device(device).type != "cpu":
        try:
            return torch.zeros((count, stride_bytes), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            raise _refused(count, stride_bytes, device) from None
    # torch.zeros writes every page; NumPy asks the system for zero pages and touches none.
    size = count * stride_bytes
    try:
        memory = np.zeros(size + _ARENA_ALIGN_BYTES, dtype=np.uint8)
    except MemoryError:
        raise _refused(count, stride_bytes, "this machine") from None
    first = -memory.ctypes.data % _ARENA_ALIGN_BYTES
    return torch.from_numpy(memory[first : first + size]).view(count, stride_bytes)


def _refused(count: int, stride_bytes: int, where: str) -> ConfigError:
    return ConfigError(
        f"The KV cache needs {count * stride_bytes} bytes for {count} x {stride_bytes} B, which "
        f"{where} does not grant: configure fewer blocks or sequences."
    )


def _view(arena: Tensor, item: Item, plain_dtype: torch.dtype) -> RecordView:
    group = item.group
    if group.format is RecordFormat.PLAIN:
        numbers = arena.view(plain_dtype)
        first = item.offset_bytes // plain_dtype.itemsize
        data = _rows(numbers, first, item.rows, group.width)
        return RecordView(data, group.format, group.width, group.rope_width)
    if not item.planar:
        data = _rows(arena, item.offset_bytes, item.rows, item.record_bytes)
        return RecordView(data, group.format, group.width, group.rope_width)
    data_width = group.width // 2
    data = _rows(arena, item.offset_bytes, item.rows, data_width)
    scales_offset = item.offset_bytes + item.rows * data_width
    scales = _rows(arena, scales_offset, item.rows, item.record_bytes - data_width)
    return RecordView(data, group.format, group.width, group.rope_width, scales)


def _rows(arena: Tensor, first: int, rows: int, width: int) -> Tensor:
    """[majors, rows, width] over `rows * width` elements from `first` of every major."""
    return arena[:, first : first + rows * width].view(arena.shape[0], rows, width)


def _copy_rows(arena: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    if not pairs:
        return
    numbers = torch.tensor(pairs, dtype=torch.int64)
    if int(numbers.min()) < 1 or int(numbers.max()) >= arena.shape[0]:
        raise InternalError(f"Copies {list(pairs)[:8]} leave 1..{arena.shape[0] - 1}.")
    source, target = numbers.to(arena.device).unbind(1)
    arena.index_copy_(0, target, arena.index_select(0, source))
