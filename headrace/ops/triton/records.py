"""Cache records to numbers, inside Triton kernels: integer arithmetic, so that every card can.

Codes come as int32 and results are fp32, exact: FP8 codes of cards before SM89 have no conversion
of their own. Formulas: `ops/reference/quant.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
