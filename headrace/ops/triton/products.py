"""Matrix products: linear layers, the grouped projection and the head, over weights of any kind.

A program computes some outputs of some rows, outputs by rows: the decoded weight is the operand
that stays in registers. Sums are fp32. By default the tile is looked up by the number of rows, the
sum over columns may be cut into parts (added in order), and what torch does well is left to it:
plain weights, and many rows, for which a stored weight is decoded once. With `fixed_tile` every row
count takes one tile and no parts, so that a row's bits do not depend on the rows beside it. Tiles
are chosen in `product_tiles`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.reference import attention as reference_attention
from headrace.ops.reference import head as reference_head
from headrace.ops.reference import norm as reference_norm
from headrace.ops.stored_weights import StoredWeight, Weight
from headrace.ops.triton.product_tiles import Tile, part_count, product_tile
from headrace.ops.triton.weights import compute_dtype, in_order, layout, weight_tile

# From so many rows on a stored weight is decoded once, for torch.
DENSE_ROWS = 1024


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x_ptr,
    code_ptr,
    scale_ptr,
    out_ptr,
    rows,
    outputs,
    columns,
    x_row,
    code_row,
    scale_row,
    out_row,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Program (tile of rows and outputs, group, part).

    Group g multiplies columns [g * columns, ..) of x by rows [g * outputs, ..) of the weight.
    Part p adds up every PARTS-th tile of columns into rows [p * rows, ..) of the result.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    # Neighbours share a tile of the weight.
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    output = (tl.program_id(0) // row_tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    group = tl.program_id(1)
    part = tl.program_id(2)
    present, known = row < rows, output < outputs
    x_place = x_ptr + row.to(tl.int64)[None, :] * x_row + group * columns
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(part * DEPTH, columns, PARTS * DEPTH):
        column = start + tl.arange(0, DEPTH)
        inside = (column < columns)[:, None] & present[None, :]
        x = tl.load(x_place + column[:, None], mask=inside, other=0.0).to(DTYPE)
        weight = weight_tile(
            code_ptr,
            scale_ptr,
            group * outputs + output,
            known,
            start,
            columns,
            code_row,
            scale_row,
            DTYPE,
            FORMAT,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            DEPTH,
            PACKED,
        )
        total = tl.dot(weight, x, total, input_precision="ieee")
    far = (part.to(tl.int64) * rows + row)[None, :] * out_row
    place = out_ptr + far + group * outputs + output[:, None]
    tl.store(place, total, mask=known[:, None] & present[None, :])


@triton.jit
def _add_parts(part_ptr, out_ptr, size, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Part 0 of each number plus the others in order."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for part in range(PARTS):
        total += tl.load(part_ptr + part * size + place, mask=place < size, other=0.0)
    tl.store(out_ptr + place, total, mask=place < size)


def multiply(
    x: Tensor,
    weight: Weight,
    groups: int,
    dtype: torch.dtype,
    *,
    fixed: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x [T, groups * K], weight [groups * N, K] -> [T, groups * N] in `dtype`.

    Products are formed in x's dtype, but in fp32 if x or a plain weight of a wide result is.
    tile: instead of that of the tables.
    """
    rows, (all_outputs, columns) = x.shape[0], weight.shape
    outputs = all_outputs // groups
    out = torch.empty((rows, all_outputs), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    compute = compute_dtype(x.dtype)
    if isinstance(weight, Tensor) and dtype == torch.float32:
        compute = compute_dtype(x.dtype, weight.dtype)
    tile = tile or product_tile(weight, groups, x, compute, fixed)
    x, w = in_order(x, weight, tile.packed), layout(weight)
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    depth_tiles = triton.cdiv(columns, tile.depth)
    parts = tile.parts or part_count(programs * groups, depth_tiles, tile.programs)
    parts = 1 if fixed else parts
    shape = (parts, rows, all_outputs)
    sums = out if parts == 1 else torch.empty(shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _multiply[(programs, groups, parts)](
            x,
            w.codes,
            w.scales,
            sums,
            rows,
            outputs,
            columns,
            x.stride(0),
            w.code_strides[1],
            w.scale_strides[1],
            all_outputs,
            PARTS=parts,
            DTYPE=compute,
            **w.constants,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            PACKED=tile.packed,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if parts > 1:
            size = out.numel()
            _add_parts[(triton.cdiv(size, 1024),)](sums, out, size, PARTS=parts, SIZE=1024)
    return out


@triton.jit
def _decode(
    code_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    code_row,
    scale_row,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Program (tile of rows, tile of columns)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * DEPTH
    number = weight_tile(
        code_ptr,
        scale_ptr,
        row,
        row < rows,
        start,
        columns,
        code_row,
        scale_row,
        DTYPE,
        FORMAT,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        DEPTH,
        PACKED,
    )
    column = start + tl.arange(0, DEPTH)
    place = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(place, number, mask=(row < rows)[:, None] & (column < columns)[None, :])


def numbers(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """`StoredWeight.numbers` of one matrix [N, K], without the temporary ones; bf16 or fp32."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.device)
    w = layout(weight)
    with torch.cuda.device_of(out):
        _decode[(triton.cdiv(rows, 32), triton.cdiv(columns, 128))](
            w.codes,
            w.scales,
            out,
            rows,
            columns,
            w.code_strides[1],
            w.scale_strides[1],
            DTYPE=tl.float32,
            **w.constants,
            ROWS=32,
            DEPTH=128,
            PACKED=0,
        )
    return out


def _for_torch(weight: Weight, rows: int, dtype: torch.dtype) -> Tensor | None:
    """The weight as torch multiplies it, where that is the better way."""
    if not isinstance(weight, StoredWeight):
        return weight
    return numbers(weight, dtype) if rows >= DENSE_ROWS else None


def linear(x: Tensor, weight: Weight, *, fixed_tile: bool = False) -> Tensor:
    """`reference.linear` for x [.., K] in bf16 or fp32."""
    flat = x.flatten(0, -2)
    plain = None if fixed_tile else _for_torch(weight, flat.shape[0], x.dtype)
    if plain is not None:
        return reference_norm.linear(x, plain)
    out = multiply(flat, weight, 1, x.dtype, fixed=fixed_tile)
    return out.unflatten(0, x.shape[:-1])


def grouped_projection(o: Tensor, wo_a: Weight, groups: int, *, fixed_tile: bool = False) -> Tensor:
    """`reference.grouped_projection` for o in bf16 or fp32."""
    plain = None if fixed_tile else _for_torch(wo_a, o.shape[0], o.dtype)
    if plain is not None:
        return reference_attention.grouped_projection(o, plain, groups)
    return multiply(o.flatten(1), wo_a, groups, o.dtype, fixed=fixed_tile)


def logits(x: Tensor, head: Tensor, *, fixed_tile: bool = False) -> Tensor:
    """`reference.logits`. A bf16 head of bf16 rows is not widened: its products are exact."""
    if not fixed_tile and not x.dtype == head.dtype == torch.bfloat16:
        return reference_head.logits(x, head)
    return multiply(x, head, 1, torch.float32, fixed=fixed_tile)
