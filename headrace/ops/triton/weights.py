"""Tiles of weights inside Triton kernels: plain numbers, or stored codes that are decoded.

A tile comes in the dtype that is multiplied in, with the bits of `StoredWeight.numbers`: codes are
put in place as bits of that dtype and multiplied by powers of two, so that cards without FP8 can do
it. In bf16 four bytes are decoded at a time, two numbers an instruction (`DECODE_FP8`, `.._FP4`).
`layout` says on the host what a kernel has to know of a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.stored_weights import StoredWeight, Weight, WeightFormat
from headrace.ops.triton.records import e2m1_to_float, e4m3_to_float, ue8m0_to_float

# How many numbers a byte holds.
_FORMATS = {WeightFormat.FP8: 1, WeightFormat.FP4: 2}


# Two numbers a register. Bytes 0 and 1, then 2 and 3, go to the low ends of the halves; sign and
# magnitude go where bf16 has them, and a power of two makes good the other bias of the exponent.
# fma with -0.0 is a product, which SM80 has for bf16 in this form only.
_START = """{
    .reg .b32 zero, power, low, high, sign, size;
    mov.b32 zero, 0x80008000;
    mov.b32 power, POWER;
    prmt.b32 low, CODES, 0, 0x4140;
    prmt.b32 high, CODES, 0, 0x4342;
"""
# The NaN of E4M3 is all ones: one more carries into bit 7, which becomes bf16's exponent of NaN.
_FP8_PAIR = """
    shl.b32 sign, FROM, 8;
    and.b32 sign, sign, 0x80008000;
    and.b32 size, FROM, 0x007F007F;
    shl.b32 FROM, size, 4;
    or.b32 sign, sign, FROM;
    add.u32 size, size, 0x00010001;
    and.b32 size, size, 0x00800080;
    shr.u32 FROM, size, 7;
    sub.u32 size, size, FROM;
    shl.b32 size, size, 8;
    or.b32 sign, sign, size;
    fma.rn.bf16x2 sign, sign, power, zero;
    fma.rn.bf16x2 TO, sign, SCALE, zero;
"""
_FP4_PAIR = """
    shl.b32 sign, FROM, SIGN;
    and.b32 sign, sign, 0x80008000;
    shl.b32 size, FROM, SIZE;
    and.b32 size, size, 0x01C001C0;
    or.b32 sign, sign, size;
    fma.rn.bf16x2 sign, sign, power, zero;
    fma.rn.bf16x2 TO, sign, SCALE, zero;
"""


def _filled(text: str, **names: str) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text


_EVEN, _ODD = {"SIGN": "12", "SIZE": "6"}, {"SIGN": "8", "SIZE": "2"}
DECODE_FP8 = tl.constexpr(
    _filled(_START, POWER="0x7B807B80", CODES="$2")  # 2^120
    + _filled(_FP8_PAIR, FROM="low", TO="$0", SCALE="$3")
    + _filled(_FP8_PAIR, FROM="high", TO="$1", SCALE="$4")
    + "}"
)
DECODE_FP4 = tl.constexpr(
    _filled(_START, POWER="0x7E807E80", CODES="$4")  # 2^126
    + _filled(_FP4_PAIR, FROM="low", TO="$0", SCALE="$5", **_EVEN)
    + _filled(_FP4_PAIR, FROM="high", TO="$1", SCALE="$6", **_EVEN)
    + _filled(_FP4_PAIR, FROM="low", TO="$2", SCALE="$5", **_ODD)
    + _filled(_FP4_PAIR, FROM="high", TO="$3", SCALE="$6", **_ODD)
    + "}"
)


# A word of codes in an order that needs no bytes moved: low halves hold the lower numbers of a
# word, high halves the upper ones (see `in_order`), and each output is one half.
_WORD = """{
    .reg .b32 zero, power, word, sign, size;
    mov.b32 zero, 0x80008000;
    mov.b32 power, POWER;
"""
_FP4_WORD_PAIR = """
    SHIFT_SIGN sign, CODES, BY_SIGN;
    and.b32 sign, sign, 0x80008000;
    SHIFT_SIZE size, CODES, BY_SIZE;
    and.b32 size, size, 0x01C001C0;
    or.b32 sign, sign, size;
    fma.rn.bf16x2 sign, sign, power, zero;
    fma.rn.bf16x2 sign, sign, SCALE, zero;
    mov.b32 {TO, UPPER}, sign;
"""
_FP8_WORD_PAIR = _FP8_PAIR.replace("TO,", "sign,") + "    mov.b32 {TO, UPPER}, sign;\n"
WORD_FP4 = tl.constexpr(
    _filled(_WORD, POWER="0x7E807E80")
    + "".join(
        _filled(
            _FP4_WORD_PAIR,
            SHIFT_SIGN="shl.b32",
            BY_SIGN=str(12 - 4 * i),
            SHIFT_SIZE="shl.b32" if i < 2 else "shr.u32",
            BY_SIZE=str(abs(6 - 4 * i)),
            CODES="$8",
            SCALE="$9",
            TO=f"${2 * i}",
            UPPER=f"${2 * i + 1}",
        )
        for i in range(4)
    )
    + "}"
)
WORD_FP8 = tl.constexpr(
    _filled(_WORD, POWER="0x7B807B80")
    + "mov.b32 word, $4;"
    + _filled(_FP8_WORD_PAIR, FROM="word", SCALE="$5", TO="$0", UPPER="$1")
    + "shr.u32 word, $4, 8;"
    + _filled(_FP8_WORD_PAIR, FROM="word", SCALE="$5", TO="$2", UPPER="$3")
    + "}"
)


class Layout(NamedTuple):
    """A weight as kernels take it: plain numbers have FORMAT 0 and no scales.

    Strides are in elements of `codes` and `scales`, those of E matrices first (0 for one matrix).
    """

    codes: Tensor
    scales: Tensor
    code_strides: tuple[int, int]
    scale_strides: tuple[int, int]
    constants: dict[str, int]


def layout(weight: Weight) -> Layout:
    """Of [N, K] or [E, N, K]."""
    if isinstance(weight, StoredWeight):
        codes, scales = _packed(weight.codes), _packed(weight.scales)
        form, block = _FORMATS[weight.format], weight.block
    else:
        codes = scales = _packed(weight)
        form, block = 0, (1, 1)
    constants = {"FORMAT": form, "BLOCK_ROWS": block[0], "BLOCK_COLUMNS": block[1]}
    return Layout(codes, scales, _strides(codes), _strides(scales), constants)


def _packed(x: Tensor) -> Tensor:
    """x with its last dim in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int]:
    return (x.stride(0) if x.dim() == 3 else 0), x.stride(-2)


@triton.jit
def _ordered_tile(
    codes,
    scales,
    far,
    known,
    start,
    code_row,
    scale_row,
    FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`weight_tile` of PACKED 2.

    What a thread multiplies of 128 columns of a row is 32 columns side by side: a fragment of the
    matrix product is made of whole words, with one scale.
    """
    ROWS: tl.constexpr = far.shape[0]
    NUMBERS: tl.constexpr = 4 * FORMAT  # of a word
    COUNT: tl.constexpr = DEPTH // 128
    WORDS: tl.constexpr = 32 // NUMBERS
    words = codes.to(tl.pointer_type(tl.int32))
    word = (start // NUMBERS + tl.arange(0, DEPTH // NUMBERS))[None, :]
    code = tl.load(words + far * (code_row // 4) + word, mask=known[:, None], other=0)
    BLOCKS: tl.constexpr = DEPTH // BLOCK_COLUMNS
    block = (start // BLOCK_COLUMNS + tl.arange(0, BLOCKS))[None, :]
    place = scales + (far // BLOCK_ROWS) * scale_row + block
    scale = tl.load(place, mask=known[:, None], other=0).to(tl.int32)
    scale = tl.reshape(scale, (ROWS, COUNT, BLOCKS // COUNT))
    scale = tl.where(scale == 255, 0x7FC0, tl.where(scale == 0, 0x40, scale << 7))
    scale = (scale | (scale << 16))[:, :, :, None]
    scale = tl.reshape(tl.broadcast_to(scale, (ROWS, COUNT, 4, WORDS)), (ROWS, DEPTH // NUMBERS))
    if FORMAT == 2:
        a, e, b, f, c, g, d, h = tl.inline_asm_elementwise(
            WORD_FP4,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [code, scale],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )
        low = tl.join(tl.join(a, c), tl.join(b, d))
        number = tl.join(low, tl.join(tl.join(e, g), tl.join(f, h)))
        number = tl.reshape(number, (ROWS, COUNT, 4, WORDS, 2, 2, 2))
        number = tl.permute(number, (0, 1, 3, 4, 5, 2, 6))
    else:
        a, c, b, d = tl.inline_asm_elementwise(
            WORD_FP8,
            "=h,=h,=h,=h,r,r",
            [code, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
        number = tl.join(tl.join(a, b), tl.join(c, d))
        number = tl.reshape(number, (ROWS, COUNT, 4, WORDS, 2, 2))
        number = tl.permute(number, (0, 1, 3, 4, 2, 5))
    return tl.reshape(number, (ROWS, DEPTH))


@triton.jit
def weight_tile(
    codes,
    scales,
    row,
    known,
    start,
    columns,
    code_row,
    scale_row,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Numbers [rows, DEPTH] of the rows `row` [rows], columns from `start`, a multiple of DEPTH.

    0 where not `known` [rows] and beyond `columns`. code_row and scale_row: strides of rows.
    PACKED: 0 decodes number by number; 1 two bf16 numbers an instruction; 2 a word at a time, the
    columns of each 128 in the order of `in_order` (bf16, blocks of 32 or 128 columns, DEPTH and
    columns multiples of 128).
    """
    ROWS: tl.constexpr = row.shape[0]
    far = row.to(tl.int64)[:, None]
    if PACKED == 2 and FORMAT > 0:
        return _ordered_tile(
            codes,
            scales,
            far,
            known,
            start,
            code_row,
            scale_row,
            FORMAT,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            DEPTH,
        )
    elif FORMAT == 0:
        column = (start + tl.arange(0, DEPTH))[None, :]
        inside = known[:, None] & (column < columns)
        return tl.load(codes + far * code_row + column, mask=inside, other=0.0).to(DTYPE)
    else:
        # COUNT scales a row, each for STEP columns, whose codes are WIDTH bytes.
        WHOLE: tl.constexpr = DEPTH if BLOCK_COLUMNS % DEPTH == 0 else FORMAT
        STEP: tl.constexpr = BLOCK_COLUMNS if DEPTH % BLOCK_COLUMNS == 0 else WHOLE
        COUNT: tl.constexpr = DEPTH // STEP
        WIDTH: tl.constexpr = STEP // FORMAT
        byte = (start // FORMAT + tl.arange(0, COUNT * WIDTH))[None, :]
        inside = known[:, None] & (byte < columns // FORMAT)
        code = tl.load(codes + far * code_row + byte, mask=inside, other=0)
        code = tl.reshape(code, (ROWS, COUNT, WIDTH))
        column = (start + tl.arange(0, COUNT) * STEP)[None, :]
        inside = known[:, None] & (column < columns)
        place = (far // BLOCK_ROWS) * scale_row + column // BLOCK_COLUMNS
        scale = tl.load(scales + place, mask=inside, other=0).to(tl.int32)
        scale = ue8m0_to_float(scale)[:, :, None]
        if PACKED == 1 and tl.bfloat16 == DTYPE:
            scale = tl.broadcast_to(scale.to(DTYPE), (ROWS, COUNT, WIDTH))
            if FORMAT == 1:
                number = tl.inline_asm_elementwise(
                    DECODE_FP8,
                    "=r,=r,r,r,r",
                    [code, scale],
                    dtype=tl.bfloat16,
                    is_pure=True,
                    pack=4,
                )
            else:
                even, odd = tl.inline_asm_elementwise(
                    DECODE_FP4,
                    "=r,=r,=r,=r,r,r,r",
                    [code, scale],
                    dtype=(tl.bfloat16, tl.bfloat16),
                    is_pure=True,
                    pack=4,
                )
                number = tl.join(even, odd)
        else:
            code = code.to(tl.int32)
            if FORMAT == 1:
                number = (e4m3_to_float(code) * scale).to(DTYPE)
            else:
                even = (e2m1_to_float(code & 15) * scale).to(DTYPE)
                number = tl.join(even, (e2m1_to_float(code >> 4) * scale).to(DTYPE))
        return tl.reshape(number, (ROWS, DEPTH))


def in_words(weight: Weight) -> bool:
    """Whether PACKED 2 of `weight_tile` can read it, with a depth of 128."""
    if not isinstance(weight, StoredWeight):
        return False
    if weight.shape[-1] % 128 or weight.block[1] not in (32, 128):
        return False
    codes = _packed(weight.codes)
    return all(n % 4 == 0 for n in (codes.data_ptr(), *_strides(codes)))


def in_order(x: Tensor, weight: Weight, packed: int) -> Tensor:
    """x [.., K] with its columns as tiles of the weight have them, see `weight_tile`."""
    if packed < 2 or not isinstance(weight, StoredWeight):
        return x
    # Of 128 columns: thread of the matrix product, word, half, numbers of the half.
    order: tuple[int, ...]
    if weight.format is WeightFormat.FP4:
        parts, order = x.unflatten(-1, (-1, 4, 4, 2, 2, 2)), (-4, -2, -1, -5, -3)
    else:
        parts, order = x.unflatten(-1, (-1, 4, 8, 2, 2)), (-3, -1, -4, -2)
    lead = range(parts.dim() - len(order))
    return parts.permute(*lead, *order).flatten(-len(order) - 1)


def compute_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """bf16 if all are, else fp32: what products of these numbers are formed in."""
    return tl.bfloat16 if all(dtype == torch.bfloat16 for dtype in dtypes) else tl.float32
