"""Cache records to numbers and back, inside Triton kernels: integer arithmetic, on every card.

Codes are int32 and numbers fp32, exact: FP8 codes of cards before SM89 have no conversion of their
own. Formulas: `ops/reference/quant.py`. Kernels that encode must be launched with
`enable_fp_fusion=False`: a fused multiply-add would skip a rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.core.kv import RecordFormat

# How kernels know a format, and how many numbers share a scale (PLAIN: as many as a tile takes).
FORMATS = {
    RecordFormat.PLAIN: 0,
    RecordFormat.FP8_UE8M0_32: 1,
    RecordFormat.FP4_E4M3_16: 2,
    RecordFormat.FP4_UE8M0_32: 3,
    RecordFormat.FP8_NOPE_64: 4,
}
GROUPS = {
    RecordFormat.PLAIN: 64,
    RecordFormat.FP8_UE8M0_32: 32,
    RecordFormat.FP4_E4M3_16: 16,
    RecordFormat.FP4_UE8M0_32: 32,
    RecordFormat.FP8_NOPE_64: 64,
}


@triton.jit
def e4m3_to_float(code):
    """E4M3 codes, int32 0..255 -> fp32; 0x7F and 0xFF are NaN."""
    # The code's bits where fp32 has its own, subnormals too: only the exponents' bias differs.
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e2m1_to_float(code):
    """E2M1 codes, int32 0..15 -> fp32."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def ue8m0_to_float(code):
    """UE8M0 bytes, int32 0..255 -> fp32 powers of two; 255 is NaN."""
    bits = tl.where(code == 0, 1 << 22, code << 23)  # 2^-127 is subnormal
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_bits(v):
    """fp32 -> the bits of the nearest bf16 number, int32, ties to even; NaN stays NaN."""
    bits = v.to(tl.int32, bitcast=True)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    nan = ((bits >> 16) & 0xFFFF) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, near)


@triton.jit
def _nearest_code(value, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """fp32 >= 0 within the format -> its nearest code, ties to even.

    MANTISSA bits; the smallest normal number is 2^LEAST.
    """
    bits = value.to(tl.int32, bitcast=True)
    dropped: tl.constexpr = 23 - MANTISSA
    up = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    normal = ((bits + up) >> dropped) - ((126 + LEAST) << MANTISSA)
    # The last bit of this number is the step below 2^LEAST: the sum is rounded to whole steps.
    magic: tl.constexpr = (127 + 23 + LEAST - MANTISSA) << 23
    number = tl.full((1,), magic, tl.int32).to(tl.float32, bitcast=True)
    below = (value + number).to(tl.int32, bitcast=True) - magic
    return tl.where(bits < ((127 + LEAST) << 23), below, normal)


@triton.jit
def encode(v, FORMAT: tl.constexpr):
    """Groups of numbers, fp32 [g, n] -> (codes with their sign bit [g, n], scale bytes [g]), int32.

    FORMAT: one of `FORMATS`, not PLAIN. Also what NaN and infinity become is the reference's.
    """
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 31) & 1
    no_number = magnitude > 0x7F800000
    # As integers NaN is larger than infinity, and infinity than all numbers.
    largest = tl.max(magnitude, 1)
    if FORMAT == 2:
        # 6 * 2^-9, the least that has a scale.
        amax = tl.maximum(largest, 0x3C400000).to(tl.float32, bitcast=True)
        sixth = tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 448.0)
        scale = tl.where(largest > 0x7F800000, 0x7F, _nearest_code(sixth, 3, -6))
        value = magnitude.to(tl.float32, bitcast=True)
        divisor = tl.broadcast_to(e4m3_to_float(scale)[:, None], value.shape)
        code = _nearest_code(tl.minimum(tl.div_rn(value, divisor), 6.0), 1, 0)
        lost = (scale == 0x7F)[:, None]
        code = tl.where(lost, 7, code)
        sign = tl.where(lost & (no_number == 0), 0, sign)
        return code | (sign << 3), scale
    else:
        if FORMAT == 3:
            # 6 * 2^-126, and 1 / 6.
            amax = tl.maximum(largest, 0x01C00000).to(tl.float32, bitcast=True)
            ratio = (amax * 0.1666666716337204).to(tl.int32, bitcast=True)
        else:
            # 1e-4, and 1 / 448.
            amax = tl.maximum(largest, 0x38D1B717).to(tl.float32, bitcast=True)
            ratio = (amax * 0.002232142873108387).to(tl.int32, bitcast=True)
        exponent = (ratio >> 23) + ((ratio & 0x7FFFFF) != 0).to(tl.int32)
        exponent = tl.where(largest > 0x7F800000, 256, exponent)
        # Dividing by a power of two is multiplying by its inverse, which is a normal number.
        inverse = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
        value = magnitude.to(tl.float32, bitcast=True) * inverse[:, None]
        if FORMAT == 3:
            code = _nearest_code(tl.minimum(value, 6.0), 1, 0)
            top, nan, place = 7, 7, 3
        else:
            code = _nearest_code(tl.minimum(value, 448.0), 3, -6)
            top, nan, place = 0x7E, 0x7F, 7
        # With infinity the scale is NaN, and so is all that is divided by it.
        infinite = (exponent == 255)[:, None]
        # With NaN it is -0: zeros become the NaN of x86, whose sign is set, other numbers the
        # largest of the other sign.
        lost = (exponent == 256)[:, None]
        zero = magnitude == 0
        code = tl.where(infinite | (lost & (zero | no_number)), nan, tl.where(lost, top, code))
        flipped = tl.where(zero, 1, tl.where(no_number, sign, 1 - sign))
        sign = tl.where(infinite, 0, tl.where(lost, flipped, sign))
        return code | (sign << place), exponent & 255


@triton.jit
def decode(code, scale, FORMAT: tl.constexpr):
    """Inverse of `encode`: codes [g, n], scale bytes [g], int32 -> fp32 [g, n]."""
    if FORMAT == 2:
        value = e2m1_to_float(code) * e4m3_to_float(scale)[:, None]
    elif FORMAT == 3:
        value = e2m1_to_float(code) * ue8m0_to_float(scale)[:, None]
    else:
        value = e4m3_to_float(code) * ue8m0_to_float(scale)[:, None]
    return value


@triton.jit
def round_fp8(x):
    """Groups [n, size] of finite fp32 numbers as `fake_fp8` gives them, fp32; NaN stays NaN."""
    amax = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
    # The power of two at or above amax / 448, and its inverse: both are exact.
    bits = (amax * 0.002232142857142857).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    value = tl.minimum(tl.abs(x * inverse), 448.0)
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF  # three bits of mantissa, ties to even
    # Below 2^-6 codes are 2^-9 apart, as fp32 numbers from 2^14 on are.
    rounded = tl.where(
        value < 0.015625, value + 16384.0 - 16384.0, bits.to(tl.float32, bitcast=True)
    )
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    signed = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(x == x, signed * scale, x)
