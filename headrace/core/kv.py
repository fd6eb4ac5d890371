"""What a model keeps per request: groups of cache rows, described without torch.

Made by `model` (ModelSpec.kv_groups), laid out in bytes by `kv/layout`, written and read by `ops`.
Kinds: `paged` rows are addressed through the block table (one block id covers all groups), `ring`
and `state` rows live in a per-request slot at row `position % rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GroupKind(StrEnum):
    """How rows of a group are addressed."""

    PAGED = "paged"
    RING = "ring"
    STATE = "state"


class RecordFormat(StrEnum):
    """How one row is stored. Bytes are those of `width` = 512 (index keys: 128)."""

    PLAIN = "plain"  # `width` numbers in the compute dtype: the exact modes
    FP4_E4M3_16 = "fp4_e4m3_16"  # e2m1 + one e4m3 scale per 16: compressed KV, 288 B
    FP8_UE8M0_32 = "fp8_ue8m0_32"  # e4m3 + one ue8m0 scale per 32: window KV, 528 B
    FP4_UE8M0_32 = "fp4_ue8m0_32"  # e2m1 + one ue8m0 scale per 32: index keys, 68 B
    FP8_NOPE_64 = "fp8_nope_64"  # V4: e4m3 per 64 without rope dims, bf16 rope dims, 584 B


class Movement(StrEnum):
    """Where rows may go: to the store, only along with the request, or nowhere."""

    PERSIST = "persist"
    HANDOFF = "handoff-only"


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """One group of layers that store rows of the same kind, width, ratio and format.

    layers: the owners. ratio: tokens per row (paged groups; 1 otherwise). rows: ring length of
    `ring` and `state` groups, 0 for `paged`. rope_width: trailing dims kept in bf16 by FP8_NOPE_64.
    window: tokens visible through a ring, 0 for others.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    width: int
    format: RecordFormat
    ratio: int = 1
    rows: int = 0
    window: int = 0
    rope_width: int = 0
    movement: Movement = Movement.HANDOFF

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one stored row; PLAIN counts 4 bytes a number (fp32)."""
        w = self.width
        match self.format:
            case RecordFormat.PLAIN:
                return 4 * w
            case RecordFormat.FP4_E4M3_16:
                return w // 2 + w // 16
            case RecordFormat.FP8_UE8M0_32:
                return w + w // 32
            case RecordFormat.FP4_UE8M0_32:
                return w // 2 + w // 32
            case RecordFormat.FP8_NOPE_64:
                nope = w - self.rope_width
                # One pad byte keeps the record even: 448 + 7 + 128 + 1 = 584 for V4.
                size = nope + -(-nope // 64) + 2 * self.rope_width
                return size + size % 2
