"""Quantisers and cache rows of few numbers: exponent bits, tables, and few calls.

Exact: codes and numbers are those of the reference, bit for bit, also for NaN and infinity where
the reference defines them. Codes are decoded by tables of 256 entries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.core.kv import RecordFormat
from headrace.ops.cpu.decode.arrays import FEW, Array, array, as_dtype
from headrace.ops.records import RecordView
from headrace.ops.reference import quant as reference

_BYTES = torch.arange(256, dtype=torch.uint8)
# fp32 value of each byte.
_E4M3: Array = _BYTES.view(torch.float8_e4m3fn).float().numpy()
_UE8M0: Array = reference.ue8m0_to_float(_BYTES).numpy()
_E2M1: Array = reference.e2m1_to_float(_BYTES[:16]).numpy()
# The two values of a packed byte, low nibble first: [256, 2].
_E2M1_PAIRS: Array = _E2M1[np.stack((np.arange(256) & 15, np.arange(256) >> 4), axis=1)]
# Code of an E2M1 magnitude, by twice the magnitude.
_E2M1_CODES = np.zeros(13, np.uint8)
_E2M1_CODES[(_E2M1[:8] * 2).astype(np.int64)] = np.arange(8)

_FP8_RECIPROCAL = np.float32(1.0 / reference.E4M3_MAX)
_FP4_RECIPROCAL = np.float32(1.0 / reference.E2M1_MAX)


def _grouped(x: Tensor, group: int) -> Array:
    """fp32 [..., n / group, group]."""
    v: Array = array(x if x.dtype == torch.float32 else x.float())
    return v.reshape(*v.shape[:-1], v.shape[-1] // group, group)


def _largest(v: Array, least: float) -> Array:
    """Largest magnitude of each group [..., n / group, 1], at least `least`."""
    top: Array = np.maximum.reduce(np.abs(v), axis=-1, keepdims=True)
    return np.maximum(top, np.float32(least), out=top)


def _power_of_two(amax: Array, reciprocal: np.float32) -> tuple[Array, Array]:
    """(exponent bytes as uint32, scales fp32): the smallest power of two >= amax * reciprocal."""
    bits = (amax * reciprocal).view(np.uint32)
    bits += 0x7FFFFF  # carries into the exponent unless the mantissa is 0
    bits >>= 23
    return bits, (bits << 23).view(np.float32)


def _round_e4m3(v: Array) -> Tensor:
    """float8_e4m3fn of v, saturating; overwrites v."""
    np.minimum(v, reference.E4M3_MAX, out=v)
    np.maximum(v, -reference.E4M3_MAX, out=v)
    return torch.from_numpy(v).to(torch.float8_e4m3fn)


def _to_e2m1(v: Array) -> Array:
    """v fp32 rounded to E2M1 numbers, ties to the even code, saturating; overwrites v.

    Numbers are 0.5 apart up to 2, 1 apart up to 4, 2 apart up to 6: half their power of two.
    """
    np.minimum(v, reference.E2M1_MAX, out=v)
    np.maximum(v, -reference.E2M1_MAX, out=v)
    apart = (v.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    apart *= 0.5
    np.maximum(apart, 0.5, out=apart)
    v /= apart
    np.rint(v, out=v)
    v *= apart
    return v


# --- rounding ----------------------------------------------------------------------------------


def fake_fp8(x: Tensor, group: int) -> Tensor:
    """`reference.fake_fp8`."""
    if x.numel() > FEW:
        return reference.fake_fp8(x, group)
    v = _grouped(x, group)
    _, scale = _power_of_two(_largest(v, reference.MIN_AMAX_FP8), _FP8_RECIPROCAL)
    rounded: Array = _round_e4m3(v / scale).float().numpy()
    rounded *= scale
    return as_dtype(rounded.reshape(x.shape), x.dtype)


def _round_e2m1(v: Array, scale: Array) -> Array:
    """v rounded to E2M1 numbers times `scale`."""
    rounded = _to_e2m1(v / scale)
    rounded *= scale
    return rounded


def fake_fp4_ue8m0(x: Tensor) -> Tensor:
    """`reference.fake_fp4_ue8m0`."""
    if x.numel() > FEW:
        return reference.fake_fp4_ue8m0(x)
    v = _grouped(x, 32)
    _, scale = _power_of_two(_largest(v, reference.MIN_AMAX_FP4_UE8M0), _FP4_RECIPROCAL)
    return as_dtype(_round_e2m1(v, scale).reshape(x.shape), x.dtype)


def _e4m3_scale(v: Array) -> Tensor:
    """float8_e4m3fn scales [..., n / 16, 1] of FP4 groups, saturating."""
    scale = _largest(v, reference.MIN_AMAX_FP4_E4M3)
    scale /= np.float32(reference.E2M1_MAX)
    np.minimum(scale, np.float32(reference.E4M3_MAX), out=scale)
    return torch.from_numpy(scale).to(torch.float8_e4m3fn)


def round_rows(x: Tensor, view: RecordView) -> Tensor:
    """`reference.round_rows`."""
    if x.numel() > FEW:
        return reference.round_rows(x, view)
    match view.format:
        case RecordFormat.FP8_UE8M0_32:
            return fake_fp8(x, 32)
        case RecordFormat.FP4_UE8M0_32:
            return fake_fp4_ue8m0(x)
        case RecordFormat.FP4_E4M3_16:
            v = _grouped(x, 16)
            rounded = _round_e2m1(v, _e4m3_scale(v).float().numpy())
            return as_dtype(rounded.reshape(x.shape), x.dtype)
        case _:
            return reference.round_rows(x, view)


# --- cache rows --------------------------------------------------------------------------------


def _packed(scaled: Array) -> Array:
    """Two E2M1 codes per byte, uint8 [..., groups * size / 2]; overwrites its argument."""
    rounded = _to_e2m1(scaled)
    sign = np.signbit(rounded).view(np.uint8) << 3
    np.abs(rounded, out=rounded)
    rounded *= 2.0
    codes = _E2M1_CODES.take(rounded.astype(np.uint8), mode="clip")
    codes |= sign
    flat = codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])
    low: Array = flat[..., 0::2]
    return low | (flat[..., 1::2] << 4)


def _encode(x: Tensor, view: RecordView) -> tuple[Array, Array]:
    """(data, scales) uint8 of rows x [..., width] in one of the formats with groups."""
    if view.format is RecordFormat.FP4_E4M3_16:
        v = _grouped(x, 16)
        e4m3 = _e4m3_scale(v)
        scales: Array = e4m3.view(torch.uint8).numpy()
        return _packed(v / e4m3.float().numpy()), scales.squeeze(-1)
    v = _grouped(x, 32)
    if view.format is RecordFormat.FP8_UE8M0_32:
        exponent, scale = _power_of_two(_largest(v, reference.MIN_AMAX_FP8), _FP8_RECIPROCAL)
        codes: Array = _round_e4m3(v / scale).view(torch.uint8).numpy()
        data = codes.reshape(x.shape)
    else:
        least = reference.MIN_AMAX_FP4_UE8M0
        exponent, scale = _power_of_two(_largest(v, least), _FP4_RECIPROCAL)
        data = _packed(v / scale)
    return data, exponent.squeeze(-1).astype(np.uint8)


def _encode_nope(x: Tensor, view: RecordView) -> Array:
    """Records of the V4 format, as `reference.encode_rows` makes them."""
    nope, rope = view.width - view.rope_width, view.rope_width
    groups = -(-nope // 64)
    v = array(x if x.dtype == torch.float32 else x.float())
    padded = np.zeros((*v.shape[:-1], groups * 64), np.float32)
    padded[..., :nope] = v[..., :nope]
    grouped = padded.reshape(*v.shape[:-1], groups, 64)
    exponent, scale = _power_of_two(_largest(grouped, reference.MIN_AMAX_FP8), _FP8_RECIPROCAL)
    codes: Array = _round_e4m3(grouped / scale).view(torch.uint8).numpy()
    record = np.zeros((*v.shape[:-1], view.data.shape[-1]), np.uint8)
    record[..., :nope] = codes.reshape(padded.shape)[..., :nope]
    tail = x[..., nope:].to(torch.bfloat16).contiguous()
    record[..., nope : nope + 2 * rope] = tail.view(torch.uint8).numpy()
    record[..., nope + 2 * rope : nope + 2 * rope + groups] = exponent[..., 0]
    return record


def _decode_nope(data: Array, view: RecordView) -> Array:
    """Inverse of `_encode_nope`, fp32."""
    nope, rope = view.width - view.rope_width, view.rope_width
    groups = -(-nope // 64)
    out = np.empty((*data.shape[:-1], view.width), np.float32)
    scales = _UE8M0.take(data[..., nope + 2 * rope : nope + 2 * rope + groups])
    if groups > 1:
        scales = np.repeat(scales, 64, axis=-1)[..., :nope]
    np.multiply(_E4M3.take(data[..., :nope]), scales, out=out[..., :nope])
    # bf16 is the upper half of fp32.
    tail = np.ascontiguousarray(data[..., nope : nope + 2 * rope]).view(np.uint16)
    out[..., nope:] = (tail.astype(np.uint32) << 16).view(np.float32)
    return out


def write_records(view: RecordView, major: Tensor, minor: Tensor, x: Tensor) -> None:
    """`reference.write_records`."""
    if x.numel() > FEW:
        return reference.write_records(view, major, minor, x)
    place = array(major), array(minor)
    stored = array(view.data)
    if view.format is RecordFormat.PLAIN:
        stored[place] = array(x if x.dtype == view.data.dtype else x.to(view.data.dtype))
        return None
    if view.format is RecordFormat.FP8_NOPE_64:
        stored[place] = _encode_nope(x, view)
        return None
    data, scales = _encode(x, view)
    if view.scales is not None:
        stored[place] = data
        array(view.scales)[place] = scales
    else:
        stored[place] = np.concatenate((data, scales), axis=-1)
    return None


def read_records(view: RecordView, major: Tensor, minor: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.read_records`."""
    place = array(major), array(minor)
    data: Array = array(view.data)[place]
    return _decoded(data, None if view.scales is None else array(view.scales)[place], view, dtype)


def read_majors(view: RecordView, major: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.read_majors`."""
    place = array(major)
    data: Array = array(view.data)[place]
    return _decoded(data, None if view.scales is None else array(view.scales)[place], view, dtype)


def _decoded(data: Array, scales: Array | None, view: RecordView, dtype: torch.dtype) -> Tensor:
    """`reference.decode_rows`."""
    if view.format is RecordFormat.PLAIN:
        return as_dtype(data, dtype)
    if view.format is RecordFormat.FP8_NOPE_64:
        return as_dtype(_decode_nope(data, view), dtype)
    fp8 = view.format is RecordFormat.FP8_UE8M0_32
    if scales is None:
        size = view.width if fp8 else view.width // 2
        data, scales = data[..., :size], data[..., size:]
    numbers = _E4M3.take(data) if fp8 else _E2M1_PAIRS.take(data, axis=0)
    table = _E4M3 if view.format is RecordFormat.FP4_E4M3_16 else _UE8M0
    grouped = numbers.reshape(*scales.shape, view.width // scales.shape[-1])
    grouped *= table.take(scales)[..., None]
    return as_dtype(grouped.reshape(*data.shape[:-1], view.width), dtype)
