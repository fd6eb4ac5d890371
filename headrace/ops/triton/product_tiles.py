"""Which tile products by a weight take: tables by the kind of weight and the number of rows.

Those of bf16 hold what was fastest on an H200 (SM90) at the sizes of DeepSeek-V4.1-Flash, see
docs/perf-log.md; other cards take what fits of them. Every table also has one tile for all row
counts. A tile a weight's shape does not allow is never given.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.stored_weights import Weight
from headrace.ops.triton import tiles
from headrace.ops.triton.weights import compute_dtype, in_words


class Tile(NamedTuple):
    """How much a program computes at a time: rows, outputs, columns of the sum."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int
    # Parts of the sum over columns; 0: until there are so many programs.
    parts: int = 0
    # See `weight_tile`.
    packed: int = 1
    programs: int = 264


class Table(NamedTuple):
    """The tile of all row counts, and those by rows: the first whose bound is not exceeded."""

    fixed: Tile
    by_rows: tuple[tuple[int, Tile], ...]


_ALL = 1 << 62
# fp32 is multiplied without tensor cores.
FP32 = Table(Tile(16, 32, 32, 4, 2), ((16, Tile(16, 32, 32, 4, 2)), (_ALL, Tile(32, 32, 32, 4, 2))))
# What follows is for bf16. Weights of any kind:
ANY = Table(
    Tile(32, 64, 64, 4, 3),
    (
        (16, Tile(16, 64, 128, 4, 3)),
        (32, Tile(32, 64, 64, 4, 3)),
        (64, Tile(64, 64, 64, 4, 3)),
        (_ALL, Tile(128, 128, 32, 8, 3)),
    ),
)
# Plain weights of many outputs:
WIDE = Table(
    Tile(64, 128, 64, 8, 3),
    (
        (16, Tile(16, 64, 128, 4, 4)),
        (256, Tile(64, 128, 64, 8, 3)),
        (_ALL, Tile(128, 128, 64, 8, 3)),
    ),
)
# Stored weights that can be decoded a word at a time, see `in_words`.
WORDS = Table(
    Tile(64, 64, 128, 4, 3, 1, 2),
    (
        (16, Tile(16, 64, 128, 4, 3, 0, 2, 400)),
        (256, Tile(64, 64, 128, 4, 3, 0, 2, 132)),
        (_ALL, Tile(128, 128, 128, 8, 3, 1, 2)),
    ),
)
# Tables of the routed experts by rows of an expert: w1 and w3, then w2. For as many rows all tables
# of a dtype have tiles of as many.
_FIXED = Tile(32, 64, 128, 4, 3, 1, 2)
_LARGEST = Tile(128, 128, 128, 8, 3, 1, 2)
ROUTED_1 = Table(
    _FIXED,
    (
        (16, Tile(16, 64, 256, 4, 3, 1, 2)),
        (32, _FIXED),
        (64, Tile(64, 64, 256, 4, 2, 1, 2)),
        (_ALL, _LARGEST),
    ),
)
ROUTED_2 = Table(
    _FIXED,
    (
        (16, Tile(16, 128, 128, 4, 3, 1, 2)),
        (32, _FIXED),
        (64, Tile(64, 128, 128, 4, 3, 1, 2)),
        (_ALL, _LARGEST),
    ),
)
# From so many outputs on a plain weight is wide.
_WIDE_OUTPUTS = 1 << 14
# Up to 16 rows by a smaller weight: to bring x into another order takes longer than that saves.
_FEW_ROWS, _WORDS_FROM = 16, 1 << 24
# Words in tiles of 128 rows take 160 KiB of shared memory, 256 columns up to 112 KiB.
_LARGE_CARD = 200 * tiles.KIB
_MAX_PARTS = 8


def table_of(weight: Weight, compute: tl.dtype, words: Table = WORDS) -> Table:
    """The table for products by a weight; words: that of weights for which `in_words` holds."""
    if compute == tl.float32:
        return FP32
    return words if in_words(weight) else ANY


def choose_tile(
    table: Table, rows: int, columns: int, shared_bytes: int, *, fixed: bool = False
) -> Tile:
    """The tile for so many rows of so many columns, on a card with so much shared memory."""
    tile = table.fixed
    if not fixed:
        tile = next(tile for most, tile in table.by_rows if rows <= most)
    if tile.packed == 2:
        large = shared_bytes >= _LARGE_CARD
        if tile.rows > 64 and not large:
            tile = table.by_rows[-2][1]
        # Words of a tile are not masked by column.
        if columns % tile.depth or not large:
            tile = tile._replace(depth=128)
    return tile


def product_tile(weight: Weight, groups: int, x: Tensor, compute: tl.dtype, fixed: bool) -> Tile:
    """That of `products.multiply` for rows x [T, ..], which are multiplied in `compute`."""
    (outputs, columns), rows = weight.shape, x.shape[0]
    table = table_of(weight, compute)
    few = rows <= _FEW_ROWS and outputs * columns < _WORDS_FROM
    if table is WORDS and few and not fixed:
        table = ANY
    if isinstance(weight, Tensor) and table is ANY and outputs // groups >= _WIDE_OUTPUTS:
        table = WIDE
    return choose_tile(table, rows, columns, tiles.of(x.device).shared_bytes, fixed=fixed)


def _of_two(tile: Tile) -> Tile:
    """For `moe._activation`, which holds two weights and two sums at a time."""
    if tile.packed == 2:
        return tile
    return tile._replace(outputs=min(tile.outputs, 64), depth=min(tile.depth, 64), parts=1)


def routed_tiles(w13: Weight, w2: Weight, rows: int, x: Tensor, fixed: bool) -> tuple[Tile, Tile]:
    """Those of `moe._activation` and `moe._projection` for so many rows of an expert."""
    shared_bytes, compute = tiles.of(x.device).shared_bytes, compute_dtype(x.dtype)
    if shared_bytes < _LARGE_CARD:
        rows = min(rows, 64)  # for which all tables have tiles that fit
    first, second = (
        choose_tile(table_of(w, compute, table), rows, w.shape[-1], shared_bytes, fixed=fixed)
        for w, table in ((w13, ROUTED_1), (w2, ROUTED_2))
    )
    return _of_two(first), second


def shared_tile(w13: Weight, x: Tensor, fixed: bool) -> Tile:
    """That of `moe._activation` for the shared expert and rows x [T, D]."""
    (rows, columns), table = x.shape, table_of(w13, compute_dtype(x.dtype), WORDS)
    tile = choose_tile(table, rows, columns, tiles.of(x.device).shared_bytes, fixed=fixed)
    parts = 1
    if tile.packed == 2 and tile.rows == 16 and not fixed:
        programs = triton.cdiv(rows, 16) * triton.cdiv(w13.shape[-2] // 2, tile.outputs)
        parts = part_count(programs, columns // tile.depth, tile.programs)
    return _of_two(tile)._replace(parts=parts)


def part_count(programs: int, depth_tiles: int, wanted: int) -> int:
    """A power of two, so that few kernels are compiled; each part has two tiles or more."""
    parts = 1
    while parts < _MAX_PARTS and programs * parts < wanted and depth_tiles >= 4 * parts:
        parts *= 2
    return parts
