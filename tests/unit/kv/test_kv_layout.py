"""Byte layouts: the published sizes of DeepSeek-V4.1-Flash and V4 come out by computation."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from headrace.core.kv import GroupKind, KVGroupSpec, Movement, RecordFormat
from headrace.errors import ConfigError
from headrace.kv.layout import BlockLayout, Item, SlotLayout

PAGED, RING, STATE = GroupKind.PAGED, GroupKind.RING, GroupKind.STATE
FP4, FP8 = RecordFormat.FP4_E4M3_16, RecordFormat.FP8_UE8M0_32
INDEX, PLAIN = RecordFormat.FP4_UE8M0_32, RecordFormat.PLAIN


def released(main: RecordFormat = FP4, producer_rows: int = 134) -> tuple[KVGroupSpec, ...]:
    """Groups of DeepSeek-V4.1-Flash: window 128, backtrack 6, three draft layers."""

    def paged(name: str, layers: tuple[int, ...], width: int, kind: RecordFormat, ratio: int):
        return KVGroupSpec(name, PAGED, layers, width, kind, ratio, movement=Movement.PERSIST)

    def ring(name: str, layers: range, movement: Movement, rows: int = 134):
        return KVGroupSpec(
            name, RING, tuple(layers), 512, FP8, rows=rows, window=128, movement=movement
        )

    return (
        paged("main_c2", (2, 8, 14), 512, main, 2),
        paged("main_c1", (20,), 512, main, 1),
        paged("index_c2", (2, 8, 14), 128, INDEX, 2),
        paged("index_c1", (20,), 128, INDEX, 1),
        # Out of order on purpose: producers come first whatever the order of the specs.
        ring("swa_consumer", range(20, 40), Movement.HANDOFF),
        ring("swa_producer", range(20), Movement.PERSIST, producer_rows),
        ring("swa_draft", range(3), Movement.HANDOFF),
        KVGroupSpec("compressor", STATE, (2, 8, 14), 1024, PLAIN, rows=7),
    )


def items_of(layout: SlotLayout, name: str) -> list[Item]:
    return [item for item in layout.items if item.group.name == name]


def test_released_block_sizes():
    layout = BlockLayout.build(released())
    assert layout.bytes_per_token == 890
    assert layout.used_bytes == 113_920
    assert layout.stride_bytes == 114_048


def test_released_block_sizes_with_mxfp8():
    layout = BlockLayout.build(released(main=FP8))
    assert layout.bytes_per_token == 1490
    assert layout.used_bytes == 190_720
    assert layout.stride_bytes == 194_304


def test_released_slot_sizes():
    layout = SlotLayout.build(released())
    windows = [item for item in layout.items if item.group.kind is RING]
    assert len(windows) == 43
    assert sum(item.used_bytes for item in windows) == 3_042_336
    assert layout.persist_bytes == 1_415_040
    assert sum(item.used_bytes for item in items_of(layout, "compressor")) == 86_016
    assert layout.used_bytes == 3_128_352
    assert layout.stride_bytes == 3_128_928


def test_long_rings_of_stored_layers_only():
    layout = SlotLayout.build(released(producer_rows=402))
    assert layout.used_bytes - 86_016 == 5_872_416


def test_v4_bytes_per_token_and_record():
    groups = (
        KVGroupSpec(
            "main_c4", PAGED, tuple(range(21)), 512, RecordFormat.FP8_NOPE_64, 4, rope_width=64
        ),
        KVGroupSpec(
            "main_c128", PAGED, tuple(range(20)), 512, RecordFormat.FP8_NOPE_64, 128, rope_width=64
        ),
        KVGroupSpec("index_c4", PAGED, tuple(range(21)), 128, INDEX, 4),
    )
    layout = BlockLayout.build(groups)
    assert layout.bytes_per_token == Fraction(21 * 652, 4) + Fraction(20 * 584, 128)
    assert layout.stride_bytes % 584 == 0
    assert {item.rows for item in layout.items if item.group.name == "main_c128"} == {1}


def test_block_order_is_by_layer_and_index_keys_first():
    order = [(item.layer, item.group.name) for item in BlockLayout.build(released()).items]
    assert order == [
        (2, "index_c2"),
        (2, "main_c2"),
        (8, "index_c2"),
        (8, "main_c2"),
        (14, "index_c2"),
        (14, "main_c2"),
        (20, "index_c1"),
        (20, "main_c1"),
    ]


def test_slot_order_is_producers_consumers_drafts_states():
    names = [item.group.name for item in SlotLayout.build(released()).items]
    assert names == (
        ["swa_producer"] * 20 + ["swa_consumer"] * 20 + ["swa_draft"] * 3 + ["compressor"] * 3
    )


@pytest.mark.parametrize("layout", [BlockLayout.build(released()), SlotLayout.build(released())])
def test_items_are_aligned_and_do_not_overlap(layout):
    end = 0
    for item in layout.items:
        assert item.offset_bytes % 32 == 0
        assert item.offset_bytes >= end
        end = item.offset_bytes + item.used_bytes
    assert end <= layout.used_bytes <= layout.stride_bytes


def test_narrow_rows_are_padded_to_32_bytes():
    # 64 / ratio 2 rows of 9 bytes (width 16) are no multiple of 32.
    groups = (
        KVGroupSpec("a", PAGED, (0,), 16, FP4, 2),
        KVGroupSpec("b", PAGED, (0,), 16, FP4, 2),
    )
    layout = BlockLayout.build(groups, block_tokens=10)
    assert [item.offset_bytes for item in layout.items] == [0, 64]
    assert layout.stride_bytes == 1152  # lcm(128, 9)


def test_plain_rows_are_counted_in_numbers():
    groups = tuple(replace(group, format=PLAIN) for group in released())
    wide, narrow = (BlockLayout.build(groups, number_bytes=size) for size in (8, 2))
    assert wide.bytes_per_token == 4 * narrow.bytes_per_token
    assert narrow.bytes_per_token == Fraction(5, 2) * (512 + 128) * 2
    slot = SlotLayout.build(groups, number_bytes=2, state_bytes=8)
    assert items_of(slot, "swa_draft")[0].record_bytes == 1024
    assert items_of(slot, "compressor")[0].record_bytes == 8192


def test_a_model_without_paged_or_slot_groups_needs_no_bytes():
    groups = released()
    assert BlockLayout.build(groups[4:]).stride_bytes == 0
    assert SlotLayout.build(groups[:4]).stride_bytes == 0


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (0, {"ratio": 3}, "ratio"),
        (0, {"ratio": 0}, "ratio"),
        (0, {"rows": 5}, "rows 0"),
        (0, {"width": 24}, "multiple of 16"),
        (2, {"width": 48}, "multiple of 32"),
        (0, {"layers": (2, 2)}, "twice"),
        (0, {"name": "main_c1"}, "twice"),
        (5, {"rows": 100}, "window of 128"),
        (7, {"rows": 0}, "rows"),
        (7, {"format": FP8}, "plain"),
    ],
)
def test_impossible_groups_are_refused_by_name(index, change, words):
    groups = list(released())
    groups[index] = replace(groups[index], **change)
    with pytest.raises(ConfigError, match=words) as caught:
        BlockLayout.build(groups)
    assert groups[index].name in caught.value.message
    with pytest.raises(ConfigError):
        SlotLayout.build(groups)


def test_block_tokens_must_be_positive():
    with pytest.raises(ConfigError, match="positive"):
        BlockLayout.build(released(), block_tokens=0)
