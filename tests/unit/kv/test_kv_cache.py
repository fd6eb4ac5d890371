"""Cache views: shapes, dtypes, isolation of every view from every other, copies."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.core.kv import GroupKind, KVGroupSpec, Movement, RecordFormat
from headrace.errors import ConfigError, InternalError
from headrace.kv.cache import KVCache

PAGED, RING, STATE = GroupKind.PAGED, GroupKind.RING, GroupKind.STATE
PLAIN = RecordFormat.PLAIN

QUANTISED = (
    KVGroupSpec("main_c2", PAGED, (2, 3), 64, RecordFormat.FP4_E4M3_16, 2),
    KVGroupSpec("main_c1", PAGED, (4,), 64, RecordFormat.FP8_UE8M0_32, 1),
    KVGroupSpec("index_c2", PAGED, (2, 3), 32, RecordFormat.FP4_UE8M0_32, 2),
    KVGroupSpec("index_c1", PAGED, (4,), 32, RecordFormat.FP4_UE8M0_32, 1),
    KVGroupSpec("mixed", PAGED, (5,), 96, RecordFormat.FP8_NOPE_64, 4, rope_width=32),
    KVGroupSpec(
        "swa_producer",
        RING,
        (0, 1, 2, 3),
        64,
        RecordFormat.FP8_UE8M0_32,
        rows=11,
        window=8,
        movement=Movement.PERSIST,
    ),
    KVGroupSpec("swa_consumer", RING, (4, 5), 64, RecordFormat.FP8_UE8M0_32, rows=11, window=8),
    KVGroupSpec("compressor", STATE, (2, 3), 128, PLAIN, rows=5),
)
EXACT = tuple(replace(group, format=PLAIN) for group in QUANTISED)
MODES = [
    pytest.param(QUANTISED, torch.bfloat16, None, torch.float32, id="quantised"),
    pytest.param(QUANTISED, torch.float64, None, torch.float64, id="quantised-fp64"),
    pytest.param(EXACT, torch.bfloat16, torch.float32, torch.float32, id="plain-bf16"),
    pytest.param(EXACT, torch.float32, None, torch.float32, id="plain-fp32"),
    pytest.param(EXACT, torch.float64, None, torch.float64, id="plain-fp64"),
]


def make(groups=QUANTISED, dtype=torch.float32, state_dtype=None, **changes) -> KVCache:
    sizes = {"num_blocks": 4, "num_slots": 3, "block_tokens": 16} | changes
    return KVCache(groups, dtype=dtype, state_dtype=state_dtype, **sizes)


def tensors(cache: KVCache, groups) -> dict[tuple[str, int, str], torch.Tensor]:
    """Every tensor of every view, by (group, layer, part)."""
    found = {}
    for group in groups:
        for layer in group.layers:
            view = cache.view(group.name, layer)
            found[group.name, layer, "data"] = view.data
            if view.scales is not None:
                found[group.name, layer, "scales"] = view.scales
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize(("groups", "dtype", "state_dtype", "expected_state"), MODES)
def test_shapes_and_dtypes(groups, dtype, state_dtype, expected_state):
    cache = make(groups, dtype, state_dtype)
    for group in groups:
        majors = 4 if group.kind is PAGED else 3
        rows = 16 // group.ratio if group.kind is PAGED else group.rows
        for layer in group.layers:
            view = cache.view(group.name, layer)
            assert (view.format, view.width) == (group.format, group.width)
            assert view.rope_width == group.rope_width
            if group.format is PLAIN:
                number = expected_state if group.kind is STATE else dtype
                assert view.data.dtype == number
                assert view.data.shape == (majors, rows, group.width)
                assert view.scales is None
            elif group.format is RecordFormat.FP4_UE8M0_32:
                assert view.data.shape == (majors, rows, group.width // 2)
                assert view.scales.shape == (majors, rows, group.width // 32)
                assert view.scales.dtype == torch.uint8
            else:
                assert view.data.dtype == torch.uint8
                assert view.data.shape == (majors, rows, group.bytes_per_row)
                assert view.scales is None


@pytest.mark.parametrize(("groups", "dtype", "state_dtype", "expected_state"), MODES)
def test_every_byte_belongs_to_at_most_one_view(groups, dtype, state_dtype, expected_state):
    cache = make(groups, dtype, state_dtype)
    owners_blocks = torch.zeros(cache.blocks.shape, dtype=torch.int64)
    owners_slots = torch.zeros(cache.slots.shape, dtype=torch.int64)
    for tensor in tensors(cache, groups).values():
        cache.blocks.zero_()
        cache.slots.zero_()
        tensor.view(torch.uint8).fill_(1)
        owners_blocks += cache.blocks
        owners_slots += cache.slots
        assert int(cache.blocks.sum() + cache.slots.sum()) == tensor.nbytes
    assert int(owners_blocks.max()) == 1
    assert int(owners_slots.max()) == 1
    # What no view owns is padding only.
    padding_blocks = cache.block_layout.stride_bytes - sum(
        item.used_bytes for item in cache.block_layout.items
    )
    assert int((owners_blocks == 0).sum()) == 4 * padding_blocks


@pytest.mark.parametrize(("groups", "dtype", "state_dtype", "expected_state"), MODES)
def test_writing_one_row_of_a_poisoned_cache_changes_nothing_else(
    groups, dtype, state_dtype, expected_state
):
    cache = make(groups, dtype, state_dtype)
    cache.poison()
    parts = tensors(cache, groups)
    before = {key: as_bytes(tensor) for key, tensor in parts.items()}
    for written, tensor in parts.items():
        tensor[2, 1] = 0
        for key, other in parts.items():
            changed = as_bytes(other) != before[key]
            if key == written:
                assert changed[2, 1].all()
                changed[2, 1] = False
            assert not changed.any(), (written, key)
        tensor.view(torch.uint8)[2, 1] = 0xFF


def test_poison_is_nan_in_every_number_format():
    cache = make(EXACT, torch.bfloat16)
    cache.poison()
    for tensor in tensors(cache, EXACT).values():
        assert tensor.isnan().all()
    cache = make(QUANTISED)
    cache.poison()
    data = cache.view("swa_producer", 1).data
    assert data[..., :64].view(torch.float8_e4m3fn).float().isnan().all()
    assert data[..., 64:].view(torch.float8_e8m0fnu).float().isnan().all()
    assert cache.view("index_c1", 4).scales.view(torch.float8_e8m0fnu).float().isnan().all()


def test_planar_block_holds_all_data_then_all_scales():
    cache = make()
    view = cache.view("index_c2", 3)
    item = next(i for i in cache.block_layout.items if (i.group.name, i.layer) == ("index_c2", 3))
    view.data[1] = 7
    view.scales[1] = 9
    rows = 8
    start = item.offset_bytes
    assert (cache.blocks[1, start : start + rows * 16] == 7).all()
    assert (cache.blocks[1, start + rows * 16 : start + rows * 17] == 9).all()
    assert int(cache.blocks.sum()) == rows * 16 * 7 + rows * 9


def test_fresh_memory_is_zero_and_aligned():
    cache = make()
    assert not cache.blocks.any()
    assert not cache.slots.any()
    assert cache.blocks.data_ptr() % 64 == 0
    assert cache.slots.data_ptr() % 64 == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_untouched_pages_cost_nothing():
    one = make().block_layout.stride_bytes
    before = resident_bytes()
    cache = make(num_blocks=(1 << 30) // one)
    assert cache.block_bytes > (1 << 30) - one
    cache.view("main_c1", 4).data[-1, -1] = 1
    assert int(cache.blocks[-1].sum()) == cache.view("main_c1", 4).data.shape[-1]
    # One huge page would be 2 MiB; the rest is slack for the allocator and other threads.
    assert resident_bytes() - before < 64 << 20


def test_more_memory_than_the_machine_grants_is_a_config_error():
    with pytest.raises(ConfigError, match="fewer blocks"):
        make(num_blocks=(1 << 60) // make().block_layout.stride_bytes)


def test_totals_and_devices():
    cache = make(device="meta")
    assert cache.block_bytes == 4 * cache.block_layout.stride_bytes
    assert cache.slot_bytes == 3 * cache.slot_layout.stride_bytes
    assert cache.total_bytes == cache.block_bytes + cache.slot_bytes
    assert cache.view("compressor", 2).data.device.type == "meta"


def test_unknown_views_are_refused():
    cache = make()
    for name, layer in (("main_c2", 4), ("nothing", 2)):
        with pytest.raises(InternalError, match=name):
            cache.view(name, layer)


def test_copies_read_all_sources_first():
    cache = make()
    for block in range(4):
        cache.blocks[block] = block
    for slot in range(3):
        cache.slots[slot] = slot
    cache.copy_blocks([(1, 2), (2, 3)])
    assert cache.blocks[:, 0].tolist() == [0, 1, 1, 2]
    assert (cache.blocks[3] == 2).all()
    cache.copy_slots([(2, 1)])
    assert cache.slots[:, -1].tolist() == [0, 2, 2]
    cache.copy_blocks([])
    assert cache.blocks[:, 0].tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (1, 4), (-1, 1)])
def test_copies_stay_inside_and_off_the_reserved_number(pair):
    cache = make()
    cache.blocks[1] = 5
    with pytest.raises(InternalError, match="leave"):
        cache.copy_blocks([pair])
    assert (cache.blocks[1] == 5).all()
    assert not cache.blocks[[0, 2, 3]].any()


def test_impossible_groups_are_refused():
    with pytest.raises(ConfigError, match="main_c2"):
        make((replace(QUANTISED[0], ratio=5),))
