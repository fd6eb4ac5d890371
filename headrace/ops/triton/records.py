"""Cache records to numbers, inside Triton kernels: integer arithmetic, so that every card can.

Codes come as int32 and results are fp32, exact: FP8 codes of cards before SM89 have no conversion
of their own. Formulas: `ops/reference/quant.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _signed(value, sign):
    """fp32 with the sign bit of int32 `sign`, also of zero: Triton's -0.0 is 0.0."""
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_to_float(code):
    """E4M3 codes, int32 0..255 -> fp32; 0x7F and 0xFF are NaN."""
    magnitude = code & 0x7F
    mantissa = magnitude & 7
    exponent = magnitude >> 3
    normal = ((exponent + 120) << 23) | (mantissa << 20)
    value = tl.where(
        exponent == 0,
        mantissa.to(tl.float32) * 0.001953125,  # 2^-9
        normal.to(tl.float32, bitcast=True),
    )
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return _signed(value, (code & 0x80) << 24)


@triton.jit
def e2m1_to_float(code):
    """E2M1 codes, int32 0..15 -> fp32."""
    mantissa = code & 1
    exponent = (code >> 1) & 3
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    value = tl.where(
        exponent == 0, mantissa.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True)
    )
    return _signed(value, (code & 8) << 28)


@triton.jit
def ue8m0_to_float(code):
    """UE8M0 bytes, int32 0..255 -> fp32 powers of two; 255 is NaN."""
    bits = tl.where(code == 0, 1 << 22, code << 23)  # 2^-127 is subnormal
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)
