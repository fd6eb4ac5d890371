"""Numbers <-> the stored weight formats: FP8 blocks, packed FP4 rows, FP8 rows, UE8M0 scales.

Decoding multiplies a code by a power of two, which is exact in every dtype the model uses; encoding
follows the released rules (scale = power of two at or above amax / largest code, ties to even).
UE8M0 bytes are looked up, never converted numerically. Used by `weights` (decode) and `tiny`
(encode).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
GROUP = 32
NAN_SCALE = 255
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TABLE = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
# value = 2^(byte - 127); byte 255 is NaN. Byte 0 is subnormal in fp32 but exact.
_E8M0_TABLE = torch.from_numpy(np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products are formed for a result in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scales_to_numbers(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """UE8M0 [...] (any 1-byte dtype) -> powers of two in `dtype` (float32 or float64)."""
    index = scales.view(torch.uint8).to(torch.int32).reshape(-1)
    table = _E8M0_TABLE.to(device=scales.device, dtype=dtype)
    return table.index_select(0, index).view(scales.shape)


def decode_fp8(codes: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """E4M3 [n, k] with UE8M0 [n, k / group] -> numbers [n, k] in `dtype` (float32 or float64)."""
    numbers = codes.to(dtype)
    rows, columns = numbers.shape
    grouped = numbers.view(rows, columns // group, group)
    grouped.mul_(scales_to_numbers(scales, dtype).unsqueeze(-1))
    return numbers


def decode_fp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed E2M1 [n, k / 2] (low nibble first), UE8M0 [n, k / 32] -> numbers [n, k]."""
    code_bytes = packed.view(torch.uint8)
    nibbles = torch.stack((code_bytes & 0xF, code_bytes >> 4), dim=-1).to(torch.int32)
    rows, half = packed.shape
    table = _E2M1_TABLE.to(device=packed.device, dtype=dtype)
    numbers = table.index_select(0, nibbles.view(-1)).view(rows, 2 * half)
    grouped = numbers.view(rows, -1, GROUP)
    grouped.mul_(scales_to_numbers(scales, dtype).unsqueeze(-1))
    return numbers


def _scale_bytes(amax: Tensor, largest: float) -> Tensor:
    """UE8M0 bytes of the smallest powers of two >= amax / largest (amax of 0 gives 2^-126)."""
    quotient = (amax.double() / largest).clamp_min(2.0**-126)
    mantissa, exponent = torch.frexp(quotient)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def encode_fp8(numbers: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Numbers [n, k] -> E4M3 codes [n, k] and UE8M0 scales of blocks (rows, columns).

    k must be a multiple of the block's columns; the last block of rows may be short.
    """
    rows, columns = numbers.shape
    block_rows, block_columns = block
    padding = -rows % block_rows
    padded = torch.nn.functional.pad(numbers.float(), (0, 0, 0, padding))
    blocks = padded.view(-1, block_rows, columns // block_columns, block_columns)
    scale_bytes = _scale_bytes(blocks.abs().amax(dim=(1, 3)), E4M3_MAX)
    divisor = scales_to_numbers(scale_bytes, torch.float32)[:, None, :, None]
    codes = (blocks / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    flat = codes.view(torch.uint8).reshape(-1, columns)[:rows].contiguous()
    return flat.view(torch.float8_e4m3fn), scale_bytes.view(torch.float8_e8m0fnu)


def encode_fp4(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [n, k] -> packed E2M1 int8 [n, k / 2] and UE8M0 [n, k / 32]; ties to even codes."""
    rows, columns = numbers.shape
    groups = numbers.float().view(rows, columns // GROUP, GROUP)
    scale_bytes = _scale_bytes(groups.abs().amax(dim=-1), E2M1_MAX)
    scaled = groups / scales_to_numbers(scale_bytes, torch.float32).unsqueeze(-1)
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code in range(1, len(E2M1)):
        middle = (E2M1[code - 1] + E2M1[code]) / 2
        # A tie goes to the even one of the two neighbouring codes.
        reached = magnitude >= middle if code % 2 == 0 else magnitude > middle
        codes += reached.to(torch.uint8)
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    pairs = codes.view(rows, columns // 2, 2)
    packed = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed.view(torch.int8), scale_bytes.view(torch.float8_e8m0fnu)
