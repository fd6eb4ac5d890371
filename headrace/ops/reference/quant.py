"""Exact FP8 / FP4 quantisers of the released model, and how cache rows are stored with them.

All arithmetic is fp32 whatever the input dtype; rounding is to nearest, ties to even. A scale is
either UE8M0 (a power of two, one byte of exponent) or E4M3. Formulas: the model specification,
"fake quantisation"; tie and edge vectors: tests/conformance/test_quant.py.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from headrace.core.kv import RecordFormat
from headrace.ops.records import RecordView

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIN_AMAX_FP8 = 1e-4
MIN_AMAX_FP4_UE8M0 = 6.0 * 2.0**-126
MIN_AMAX_FP4_E4M3 = 6.0 * 2.0**-9
# Half-way points between neighbouring E2M1 codes. A tie goes to the even code: down at even
# boundaries, up at odd ones, which is "x > the next smaller fp32".
E2M1_BOUNDS = tuple(
    b if i % 2 == 0 else torch.nextafter(torch.tensor(b), torch.tensor(0.0)).item()
    for i, b in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
)


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """fp32 on a device, sent once: a device is waited for when it gets something from a list."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _groups(x: Tensor, size: int) -> Tensor:
    """[..., n] -> fp32 [..., n // size, size]."""
    return x.float().unflatten(-1, (-1, size))


def _ceil_exponent(value: Tensor) -> Tensor:
    """Biased exponent byte e with 2^(e-127) = the smallest power of two >= value (fp32, > 0)."""
    bits = value.view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def ue8m0_to_float(exponent: Tensor) -> Tensor:
    """uint8 exponent bytes -> fp32 powers of two 2^(byte-127); byte 255 is NaN."""
    e = exponent.to(torch.int32)
    # 2^-127 is subnormal in fp32 and has no exponent bits of its own.
    bits = torch.where(e == 0, torch.full_like(e, 1 << 22), e << 23)
    return torch.where(e == 255, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


def quantise_fp8(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """E4M3 codes uint8 [..., n] and UE8M0 scale bytes uint8 [..., n // group]."""
    v = _groups(x, group)
    amax = v.abs().amax(-1, keepdim=True).clamp_min(MIN_AMAX_FP8)
    exponent = _ceil_exponent(amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32))
    codes = (v / ue8m0_to_float(exponent)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).flatten(-2), exponent.squeeze(-1).to(torch.uint8)


def dequantise_fp8(codes: Tensor, scales: Tensor, group: int = 32) -> Tensor:
    """Inverse of `quantise_fp8`, fp32."""
    v = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, group))
    return (v * ue8m0_to_float(scales).unsqueeze(-1)).flatten(-2)


def _e2m1_codes(v: Tensor) -> Tensor:
    """fp32 within +-6 -> 4-bit codes (uint8): bit 3 sign (kept for -0), bits 2..0 magnitude."""
    magnitude = torch.bucketize(v.abs().contiguous(), _constant(E2M1_BOUNDS, v.device))
    return (magnitude + 8 * torch.signbit(v).to(torch.int64)).to(torch.uint8)


def e2m1_to_float(codes: Tensor) -> Tensor:
    """4-bit codes (uint8) -> fp32; -0 keeps its sign."""
    return _constant(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), codes.device)[codes.long()]


def quantise_fp4_ue8m0(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """E2M1 codes uint8 [..., n] (one per byte) and UE8M0 scale bytes uint8 [..., n // group]."""
    v = _groups(x, group)
    amax = v.abs().amax(-1, keepdim=True).clamp_min(MIN_AMAX_FP4_UE8M0)
    exponent = _ceil_exponent(amax * torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32))
    codes = _e2m1_codes((v / ue8m0_to_float(exponent)).clamp(-E2M1_MAX, E2M1_MAX))
    return codes.flatten(-2), exponent.squeeze(-1).to(torch.uint8)


def dequantise_fp4_ue8m0(codes: Tensor, scales: Tensor, group: int = 32) -> Tensor:
    """Inverse of `quantise_fp4_ue8m0`, fp32."""
    v = e2m1_to_float(codes).unflatten(-1, (-1, group))
    return (v * ue8m0_to_float(scales).unsqueeze(-1)).flatten(-2)


def quantise_fp4_e4m3(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    """E2M1 codes uint8 [..., n] (one per byte) and E4M3 scale bytes uint8 [..., n // group]."""
    v = _groups(x, group)
    amax = v.abs().amax(-1, keepdim=True).clamp_min(MIN_AMAX_FP4_E4M3)
    # The clamp saturates: torch's cast would give NaN above the largest E4M3 number.
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    codes = _e2m1_codes((v / scale.float()).clamp(-E2M1_MAX, E2M1_MAX))
    return codes.flatten(-2), scale.squeeze(-1).view(torch.uint8)


def dequantise_fp4_e4m3(codes: Tensor, scales: Tensor, group: int = 16) -> Tensor:
    """Inverse of `quantise_fp4_e4m3`, fp32."""
    v = e2m1_to_float(codes).unflatten(-1, (-1, group))
    return (v * scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2)


def pack_fp4(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [..., n] -> bytes [..., n // 2]; the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Inverse of `pack_fp4`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def fake_fp8(x: Tensor, group: int) -> Tensor:
    """Quantise and dequantise per `group` values of the last dim; dtype of x."""
    return dequantise_fp8(*quantise_fp8(x, group), group).to(x.dtype)


def fake_fp4_ue8m0(x: Tensor) -> Tensor:
    """Quantise and dequantise per 32 values of the last dim (index queries and keys)."""
    return dequantise_fp4_ue8m0(*quantise_fp4_ue8m0(x)).to(x.dtype)


# --- cache rows ------------------------------------------------------------------------------


def _nope_scale_count(view: RecordView) -> int:
    return -(-(view.width - view.rope_width) // 64)


def _encode_nope(x: Tensor, view: RecordView) -> Tensor:
    """V4 record: E4M3 of the dims without rope, bf16 rope dims, one UE8M0 per 64, pad."""
    nope = view.width - view.rope_width
    padded = torch.nn.functional.pad(x[..., :nope].float(), (0, -nope % 64))
    codes, scales = quantise_fp8(padded, 64)
    rope = x[..., nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
    record = torch.cat((codes[..., :nope], rope, scales), dim=-1)
    return torch.nn.functional.pad(record, (0, record.shape[-1] % 2))


def _decode_nope(record: Tensor, view: RecordView) -> Tensor:
    nope, rope = view.width - view.rope_width, view.rope_width
    codes = torch.nn.functional.pad(record[..., :nope], (0, -nope % 64))
    scales = record[..., nope + 2 * rope : nope + 2 * rope + _nope_scale_count(view)]
    tail = record[..., nope : nope + 2 * rope].contiguous().view(torch.bfloat16).float()
    return torch.cat((dequantise_fp8(codes, scales, 64)[..., :nope], tail), dim=-1)


def encode_rows(x: Tensor, view: RecordView) -> tuple[Tensor, Tensor | None]:
    """Rows [..., width] -> (data, scales) as `view` stores them; scales is None if interleaved."""
    match view.format:
        case RecordFormat.PLAIN:
            return x.to(view.data.dtype), None
        case RecordFormat.FP8_NOPE_64:
            return _encode_nope(x, view), None
        case RecordFormat.FP8_UE8M0_32:
            data, scales = quantise_fp8(x, 32)
        case RecordFormat.FP4_E4M3_16:
            codes, scales = quantise_fp4_e4m3(x)
            data = pack_fp4(codes)
        case RecordFormat.FP4_UE8M0_32:
            codes, scales = quantise_fp4_ue8m0(x)
            data = pack_fp4(codes)
    if view.scales is not None:
        return data, scales
    return torch.cat((data, scales), dim=-1), None


def decode_rows(
    data: Tensor, scales: Tensor | None, view: RecordView, dtype: torch.dtype
) -> Tensor:
    """Inverse of `encode_rows`: numbers [..., width] in `dtype`."""
    if view.format is RecordFormat.PLAIN:
        return data.to(dtype)
    if view.format is RecordFormat.FP8_NOPE_64:
        return _decode_nope(data, view).to(dtype)
    if scales is None:
        size = view.width if view.format is RecordFormat.FP8_UE8M0_32 else view.width // 2
        data, scales = data[..., :size], data[..., size:]
    match view.format:
        case RecordFormat.FP8_UE8M0_32:
            return dequantise_fp8(data.contiguous(), scales, 32).to(dtype)
        case RecordFormat.FP4_E4M3_16:
            return dequantise_fp4_e4m3(unpack_fp4(data), scales.contiguous()).to(dtype)
        case _:
            return dequantise_fp4_ue8m0(unpack_fp4(data), scales).to(dtype)


def write_records(view: RecordView, major: Tensor, minor: Tensor, x: Tensor) -> None:
    """Store rows x [..., width] at (major, minor) int64 [...], in place.

    Places that appear twice must get equal rows.
    """
    data, scales = encode_rows(x, view)
    view.data[major, minor] = data
    if scales is not None and view.scales is not None:
        view.scales[major, minor] = scales


def read_records(view: RecordView, major: Tensor, minor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., width] in `dtype` at (major, minor) int64 [...]."""
    scales = None if view.scales is None else view.scales[major, minor]
    return decode_rows(view.data[major, minor], scales, view, dtype)


def read_majors(view: RecordView, major: Tensor, dtype: torch.dtype) -> Tensor:
    """All rows of whole majors: [..., minors, width] in `dtype` at major int64 [...]."""
    scales = None if view.scales is None else view.scales[major]
    return decode_rows(view.data[major], scales, view, dtype)


def round_rows(x: Tensor, view: RecordView) -> Tensor:
    """What `read_records` would give after `write_records`: the values later steps will see."""
    return decode_rows(*encode_rows(x, view), view, x.dtype)
