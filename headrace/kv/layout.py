"""Where every cache row lies, in bytes: one block of tokens, one slot of a request.

Computed from the model's `KVGroupSpec`s alone, without torch. A block holds all paged groups of all
owner layers (one block id covers every layer); a slot holds the rings and states of one request.
`kv/cache` turns the items into tensor views; planning (bytes per token, per request) reads the
totals. Only quantised records have a size of their own: PLAIN rows are counted in numbers of
`number_bytes` bytes, states in numbers of `state_bytes` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from headrace.core.kv import GroupKind, KVGroupSpec, Movement, RecordFormat
from headrace.errors import ConfigError

BLOCK_TOKENS = 128
# Every item starts at a multiple of this, so that vector loads and wider dtypes are aligned.
ITEM_ALIGN_BYTES = 32
BLOCK_ALIGN_BYTES = 128
# Numbers that share one scale, per format: widths must be whole groups.
_SCALE_GROUP = {
    RecordFormat.PLAIN: 1,
    RecordFormat.FP4_E4M3_16: 16,
    RecordFormat.FP8_UE8M0_32: 32,
    RecordFormat.FP4_UE8M0_32: 32,
    RecordFormat.FP8_NOPE_64: 2,
}


@dataclass(frozen=True, slots=True)
class Item:
    """Rows of one group in one layer, inside a block or a slot.

    offset_bytes counts from the start of the block or slot. planar: all data of the rows come
    first, then all scales (index keys in blocks); otherwise each row is data followed by scales.
    """

    group: KVGroupSpec
    layer: int
    offset_bytes: int
    rows: int
    record_bytes: int
    planar: bool

    @property
    def interleaved(self) -> bool:
        """Whether a row is data followed by its scales: such rows set the unit of the stride."""
        return not self.planar and self.group.format is not RecordFormat.PLAIN

    @property
    def used_bytes(self) -> int:
        """Bytes that rows occupy, without padding."""
        return self.rows * self.record_bytes


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block: per owner layer (ascending) first index keys, then main KV.

    used_bytes ends at the last item's padding; stride_bytes is the distance between blocks;
    bytes_per_token counts records only and may be a fraction (ratios above 1).
    """

    items: tuple[Item, ...]
    block_tokens: int
    used_bytes: int
    stride_bytes: int
    bytes_per_token: Fraction

    @classmethod
    def build(
        cls,
        groups: Sequence[KVGroupSpec],
        *,
        block_tokens: int = BLOCK_TOKENS,
        number_bytes: int = 4,
    ) -> BlockLayout:
        """Lay out the paged groups; others are ignored. Raises ConfigError on impossible specs."""
        check_groups(groups, block_tokens)
        placed = [
            (layer, not _is_index_key(group), group)
            for group in groups
            if group.kind is GroupKind.PAGED
            for layer in group.layers
        ]
        placed.sort(key=lambda entry: entry[:2])  # stable: equal ones keep the order of the specs
        items: list[Item] = []
        end = 0
        per_token = Fraction(0)
        for layer, _, group in placed:
            record = record_bytes(group, number_bytes)
            item = Item(
                group, layer, end, block_tokens // group.ratio, record, _is_index_key(group)
            )
            items.append(item)
            end += _round_up(item.used_bytes, ITEM_ALIGN_BYTES)
            per_token += Fraction(record, group.ratio)
        # Kernels that address main records by a row number need a stride of whole records.
        mains = (item.record_bytes for item in items if item.interleaved)
        stride = _round_up(end, lcm(BLOCK_ALIGN_BYTES, *mains))
        return cls(tuple(items), block_tokens, end, stride, per_token)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One slot: windows of producer layers, of consumer and draft layers, compressor states.

    persist_bytes is the leading part that window records of the store are made of.
    """

    items: tuple[Item, ...]
    persist_bytes: int
    used_bytes: int
    stride_bytes: int

    @classmethod
    def build(
        cls, groups: Sequence[KVGroupSpec], *, number_bytes: int = 4, state_bytes: int = 4
    ) -> SlotLayout:
        """Lay out rings and states; paged groups are ignored. Raises ConfigError."""
        check_groups(groups, BLOCK_TOKENS)
        placed = [
            (group.kind is GroupKind.STATE, group.movement is not Movement.PERSIST, layer, group)
            for group in groups
            if group.kind is not GroupKind.PAGED
            for layer in group.layers
        ]
        placed.sort(key=lambda entry: entry[:2])  # draft windows follow consumers as specified
        items: list[Item] = []
        end = persist_end = 0
        for is_state, dropped, layer, group in placed:
            record = record_bytes(group, state_bytes if is_state else number_bytes)
            item = Item(group, layer, end, group.rows, record, planar=False)
            items.append(item)
            end += _round_up(item.used_bytes, ITEM_ALIGN_BYTES)
            if not (is_state or dropped):
                persist_end = end
        windows = (item.record_bytes for item in items if item.interleaved)
        stride = _round_up(end, lcm(ITEM_ALIGN_BYTES, *windows))
        return cls(tuple(items), persist_end, end, stride)


def record_bytes(group: KVGroupSpec, number_bytes: int) -> int:
    """Bytes of one stored row; `number_bytes` is the size of a number of PLAIN rows."""
    if group.format is RecordFormat.PLAIN:
        return group.width * number_bytes
    return group.bytes_per_row


def check_groups(groups: Sequence[KVGroupSpec], block_tokens: int) -> None:
    """Raise ConfigError, naming the group, where specs cannot be laid out."""
    if block_tokens < 1:
        raise ConfigError(f"block_tokens must be positive, got {block_tokens}.")
    names = [group.name for group in groups]
    for group in groups:
        if names.count(group.name) > 1 or len(set(group.layers)) != len(group.layers):
            raise _impossible(group, "its name, or one of its layers, appears twice")
        if group.width < 1 or group.width % _SCALE_GROUP[group.format]:
            raise _impossible(
                group,
                f"width {group.width} is not a multiple of {_SCALE_GROUP[group.format]}, "
                f"which {group.format} needs",
            )
        if group.kind is GroupKind.PAGED:
            if group.rows or group.ratio < 1 or block_tokens % group.ratio:
                raise _impossible(
                    group,
                    f"a paged group needs rows 0 and a ratio that divides {block_tokens}, "
                    f"got rows {group.rows}, ratio {group.ratio}",
                )
        elif group.rows < max(1, group.window):
            raise _impossible(group, f"{group.rows} rows do not hold a window of {group.window}")
        if group.kind is GroupKind.STATE and group.format is not RecordFormat.PLAIN:
            raise _impossible(group, f"states are stored plain, not as {group.format}")


def _is_index_key(group: KVGroupSpec) -> bool:
    """Whether a paged group holds index keys: they have a format of their own."""
    return group.format is RecordFormat.FP4_UE8M0_32


def _impossible(group: KVGroupSpec, why: str) -> ConfigError:
    return ConfigError(f"KV group {group.name!r} cannot be laid out: {why}.", param=group.name)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
