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
_E2M1_BOUNDS: Array = np.array(reference.E2M1_BOUNDS, np.float32)

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


def _e2m1_magnitudes(v: Array) -> Array:
    """Index 0..7 of the E2M1 magnitude nearest to |v|, ties to the even code."""
    return np.searchsorted(_E2M1_BOUNDS, np.abs(v)).astype(np.uint8)


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
    scaled = v / scale
    magnitude = np.take(_E2M1, _e2m1_magnitudes(scaled))
    np.copysign(magnitude, scaled, out=magnitude)
    magnitude *= scale
    return magnitude


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
    """Two E2M1 codes per byte, uint8 [..., groups * size / 2]."""
    codes = _e2m1_magnitudes(scaled)
    codes |= np.signbit(scaled).view(np.uint8) << 3
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


def write_records(view: RecordView, major: Tensor, minor: Tensor, x: Tensor) -> None:
    """`reference.write_records`."""
    if x.numel() > FEW or view.format is RecordFormat.FP8_NOPE_64:
        return reference.write_records(view, major, minor, x)
    place = array(major), array(minor)
    stored = array(view.data)
    if view.format is RecordFormat.PLAIN:
        stored[place] = array(x if x.dtype == view.data.dtype else x.to(view.data.dtype))
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
    if view.format is RecordFormat.FP8_NOPE_64:
        return reference.read_records(view, major, minor, dtype)
    place = array(major), array(minor)
    data: Array = array(view.data)[place]
    return _decoded(data, None if view.scales is None else array(view.scales)[place], view, dtype)


def read_majors(view: RecordView, major: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.read_majors`."""
    if view.format is RecordFormat.FP8_NOPE_64:
        return reference.read_majors(view, major, dtype)
    place = array(major)
    data: Array = array(view.data)[place]
    return _decoded(data, None if view.scales is None else array(view.scales)[place], view, dtype)


def _decoded(data: Array, scales: Array | None, view: RecordView, dtype: torch.dtype) -> Tensor:
    """`reference.decode_rows` of formats with groups, and of PLAIN."""
    if view.format is RecordFormat.PLAIN:
        return as_dtype(data, dtype)
    fp8 = view.format is RecordFormat.FP8_UE8M0_32
    if scales is None:
        size = view.width if fp8 else view.width // 2
        data, scales = data[..., :size], data[..., size:]
    numbers = _E4M3.take(data) if fp8 else _E2M1_PAIRS.take(data, axis=0)
    table = _E4M3 if view.format is RecordFormat.FP4_E4M3_16 else _UE8M0
    grouped = numbers.reshape(*scales.shape, view.width // scales.shape[-1])
    grouped *= table.take(scales)[..., None]
    return as_dtype(grouped.reshape(*data.shape[:-1], view.width), dtype)
