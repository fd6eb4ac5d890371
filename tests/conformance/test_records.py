"""Cache rows of every format through real `KVCache` views: bytes, round trips, neighbours.

The views come from `headrace/kv`, the reading and writing from the reference operators: this is
where both must mean the same bytes.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace.core.kv import GroupKind, KVGroupSpec, RecordFormat
from headrace.kv.cache import KVCache
from headrace.ops.records import RecordView
from headrace.ops.reference import quant
from headrace.ops.reference.quant import read_records, round_rows, write_records

PAGED, RING, STATE = GroupKind.PAGED, GroupKind.RING, GroupKind.STATE
BLOCK_TOKENS, BLOCKS, SLOTS = 16, 5, 4

# Released widths (compressed KV, index keys, window, V4's record) and plain rows of exact modes.
GROUPS = {
    group.name: group
    for group in (
        KVGroupSpec("main", PAGED, (2, 3), 512, RecordFormat.FP4_E4M3_16, ratio=2),
        KVGroupSpec("main_fp8", PAGED, (4,), 512, RecordFormat.FP8_UE8M0_32),
        KVGroupSpec("main_v4", PAGED, (5,), 512, RecordFormat.FP8_NOPE_64, 4, rope_width=64),
        KVGroupSpec("index", PAGED, (2, 3), 128, RecordFormat.FP4_UE8M0_32, ratio=2),
        KVGroupSpec("index_plain", PAGED, (4,), 24, RecordFormat.PLAIN),
        KVGroupSpec("window", RING, (0, 1), 512, RecordFormat.FP8_UE8M0_32, rows=11, window=8),
        KVGroupSpec(
            "window_v4", RING, (5,), 96, RecordFormat.FP8_NOPE_64, rows=7, window=4, rope_width=48
        ),
        KVGroupSpec("window_plain", RING, (6,), 40, RecordFormat.PLAIN, rows=5, window=4),
        KVGroupSpec("compressor", STATE, (2, 3), 64, RecordFormat.PLAIN, rows=5),
    )
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
BYTES_PER_ROW = {"main": 288, "window": 528, "index": 68, "main_v4": 584}


@pytest.fixture
def cache() -> KVCache:
    made = KVCache(
        list(GROUPS.values()),
        num_blocks=BLOCKS,
        num_slots=SLOTS,
        dtype=torch.float32,
        block_tokens=BLOCK_TOKENS,
    )
    made.poison()
    return made


def view_of(cache: KVCache, name: str) -> RecordView:
    return cache.view(name, GROUPS[name].layers[0])


def rows_like(view: RecordView, dtype: torch.dtype, count: int) -> Tensor:
    """Rows of mixed magnitude, one of them zero."""
    g = torch.Generator().manual_seed(view.width)
    x = torch.randn((count, view.width), generator=g, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-6, 6, (count, 1), generator=g).double()
    x[0] = 0.0
    return x.to(dtype)


def places(view: RecordView, count: int) -> tuple[Tensor, Tensor]:
    """Distinct (major, minor), not in the reserved major 0."""
    majors, minors = view.data.shape[:2]
    g = torch.Generator().manual_seed(7)
    order = torch.randperm((majors - 1) * minors, generator=g)[:count]
    return order // minors + 1, order % minors


@pytest.mark.parametrize("name", list(BYTES_PER_ROW))
def test_bytes_per_row(cache, name):
    view = view_of(cache, name)
    found = view.data.shape[-1] + (0 if view.scales is None else view.scales.shape[-1])
    assert found == BYTES_PER_ROW[name] == GROUPS[name].bytes_per_row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(GROUPS))
def test_reads_what_round_rows_announces(cache, name, dtype):
    """Later steps read exactly the values that this step was given by `round_rows`."""
    view = view_of(cache, name)
    x = rows_like(view, dtype, 10)
    major, minor = places(view, 10)
    expected = round_rows(x, view)
    write_records(view, major, minor, x)
    found = read_records(view, major, minor, dtype)
    assert found.dtype == expected.dtype == dtype
    assert found.equal(expected)
    assert torch.signbit(found).equal(torch.signbit(expected))


@pytest.mark.parametrize("name", list(GROUPS))
def test_stored_rows_survive_being_stored_again(cache, name):
    """Rounded rows are on the grid of the format: copies of copies keep their values."""
    view = view_of(cache, name)
    x = rows_like(view, torch.float32, 10)
    major, minor = places(view, 10)
    write_records(view, major, minor, x)
    write_records(view, major, minor, read_records(view, major, minor, torch.float32))
    assert read_records(view, major, minor, torch.float32).equal(round_rows(x, view))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_values_are_the_fake_quantised_ones(cache, dtype):
    """The released path rounds in place; storing codes must give the same numbers."""

    def stored(name: str, x: Tensor) -> Tensor:
        view = view_of(cache, name)
        major, minor = places(view, len(x))
        write_records(view, major, minor, x)
        return read_records(view, major, minor, dtype)

    wide, narrow = view_of(cache, "main"), view_of(cache, "index")
    x, keys = rows_like(wide, dtype, 9), rows_like(narrow, dtype, 9)
    codes, scales = quant.quantise_fp4_e4m3(x)
    assert stored("main", x).equal(quant.dequantise_fp4_e4m3(codes, scales).to(dtype))
    assert stored("window", x).equal(quant.fake_fp8(x, 32))
    assert stored("index", keys).equal(quant.fake_fp4_ue8m0(keys))
    nope, rope = stored("main_v4", x).split((448, 64), dim=-1)
    assert nope.equal(quant.fake_fp8(x[:, :448], 64))
    assert rope.equal(x[:, 448:].to(torch.bfloat16).to(dtype))


@pytest.mark.parametrize("name", list(GROUPS))
def test_neighbours_stay_poisoned(cache, name):
    """A written row changes its own bytes: no other row, layer, group or padding."""
    view = view_of(cache, name)
    major, minor = torch.tensor([2]), torch.tensor([1])
    write_records(view, major, minor, rows_like(view, torch.float32, 2)[1:])
    changed = int((cache.blocks != 0xFF).sum() + (cache.slots != 0xFF).sum())
    number_bytes = 4 if GROUPS[name].format is RecordFormat.PLAIN else 1
    size = view.data.shape[-1] * number_bytes
    size += 0 if view.scales is None else view.scales.shape[-1]
    assert 0 < changed <= size
    whole = read_records(view, *everywhere(view), torch.float32)
    assert torch.isfinite(whole[2, 1]).all()
    whole[2, 1] = torch.nan
    assert torch.isnan(whole).all()


def everywhere(view: RecordView) -> tuple[Tensor, Tensor]:
    majors, minors = view.data.shape[:2]
    grid = torch.meshgrid(torch.arange(majors), torch.arange(minors), indexing="ij")
    return grid[0], grid[1]


def test_unwritten_rows_read_as_nan(cache):
    """Poison is NaN in every format, so that a read of a row nobody wrote cannot go unseen."""
    for name in GROUPS:
        view = view_of(cache, name)
        assert torch.isnan(read_records(view, *everywhere(view), torch.float32)).all(), name


def test_index_blocks_are_planar(cache):
    """All data of a block lie before all scales of it."""
    view = view_of(cache, "index")
    rows = BLOCK_TOKENS // 2
    assert view.scales is not None
    assert view.data.shape == (BLOCKS, rows, 64)
    assert view.scales.shape == (BLOCKS, rows, 4)
    assert view.data.stride(1) == 64
    assert view.scales.stride(1) == 4
    start = view.data.storage_offset()
    assert view.scales.storage_offset() == start + rows * 64
    x = rows_like(view, torch.float32, rows)
    write_records(view, torch.full((rows,), 3), torch.arange(rows), x)
    codes, scales = quant.quantise_fp4_ue8m0(x)
    block = cache.blocks.flatten()[start + 3 * cache.blocks.stride(0) :][: rows * 68]
    assert block[: rows * 64].equal(quant.pack_fp4(codes).flatten())
    assert block[rows * 64 :].equal(scales.flatten())


@pytest.mark.parametrize(("name", "data_bytes"), [("main", 256), ("window", 512)])
def test_other_records_hold_data_then_scales(cache, name, data_bytes):
    view = view_of(cache, name)
    x = rows_like(view, torch.float32, 2)[1:]
    write_records(view, torch.tensor([1]), torch.tensor([0]), x)
    if name == "main":
        codes, scales = quant.quantise_fp4_e4m3(x)
        codes = quant.pack_fp4(codes)
    else:
        codes, scales = quant.quantise_fp8(x)
    record = view.data[1, 0]
    assert record[:data_bytes].equal(codes[0])
    assert record[data_bytes:].equal(scales[0])


def test_v4_record_bytes(cache):
    """448 codes, 64 bf16 numbers, 7 scales, one pad byte."""
    view = view_of(cache, "main_v4")
    x = rows_like(view, torch.float32, 2)[1:]
    write_records(view, torch.tensor([1]), torch.tensor([0]), x)
    codes, scales = quant.quantise_fp8(x[:, :448], 64)
    record = view.data[1, 0]
    assert record[:448].equal(codes[0])
    assert record[448:576].equal(x[0, 448:].to(torch.bfloat16).view(torch.uint8))
    assert record[576:583].equal(scales[0])


def test_rows_of_any_shape_and_none_at_all(cache):
    for name in GROUPS:
        view = view_of(cache, name)
        x = rows_like(view, torch.float32, 6).view(2, 3, view.width)
        major, minor = (place.view(2, 3) for place in places(view, 6))
        write_records(view, major, minor, x)
        assert read_records(view, major, minor, torch.float32).equal(round_rows(x, view))
        none = torch.empty(0, dtype=torch.int64)
        write_records(view, none, none, x.view(6, view.width)[:0])
        assert read_records(view, none, none, torch.float32).shape == (0, view.width)


def test_plain_rows_are_exact_in_their_dtype():
    """The exact modes keep every bit; state rows stay fp32 in a bf16 engine."""
    groups = [GROUPS["window_plain"], GROUPS["compressor"]]
    for dtype, state in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        cache = KVCache(groups, num_blocks=2, num_slots=3, dtype=dtype)
        for name, kept in (("window_plain", dtype), ("compressor", state)):
            view = view_of(cache, name)
            x = torch.full((1, view.width), math.pi, dtype=kept)
            write_records(view, torch.tensor([1]), torch.tensor([2]), x)
            assert view.data.dtype == kept
            assert read_records(view, torch.tensor([1]), torch.tensor([2]), kept).equal(x)
