"""The stored number formats as rounding with straight-through gradients.

Forward values equal those of `headrace.ops.reference.quant` and `headrace.model.stored_formats`;
written as plain arithmetic (no tables), so that the compiler can fuse them. Everything is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded` with the gradient of x."""
    return x + (rounded.to(x.dtype) - x).detach()


def _power_at_or_above(value: Tensor) -> Tensor:
    """Smallest power of two >= value (fp32, > 0)."""
    bits = value.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties to the even code."""
    a = x.abs().clamp_max(6.0)
    fine, middle, coarse = torch.round(a * 2) * 0.5, torch.round(a), torch.round(a * 0.5) * 2
    return torch.where(a <= 2, fine, torch.where(a <= 4, middle, coarse)) * torch.sign(x)


def fp8_groups(x: Tensor, group: int = 32) -> Tensor:
    """Window keys, Engram rows: E4M3 with one power-of-two scale per group of the last dim."""
    v = x.detach().float().unflatten(-1, (-1, group))
    amax = v.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = _power_at_or_above(amax * (1.0 / 448.0))
    return straight_through(x, (_e4m3(v / scale) * scale).flatten(-2))


def fp4_groups(x: Tensor) -> Tensor:
    """Expert weights, index queries and keys: E2M1, a power-of-two scale per 32."""
    v = x.detach().float().unflatten(-1, (-1, 32))
    amax = v.abs().amax(-1, keepdim=True).clamp_min(6.0 * 2.0**-126)
    scale = _power_at_or_above(amax * (1.0 / 6.0))
    return straight_through(x, (_e2m1(v / scale) * scale).flatten(-2))


def fp4_entries(x: Tensor) -> Tensor:
    """Compressed entries: E2M1 with an E4M3 scale per 16."""
    v = x.detach().float().unflatten(-1, (-1, 16))
    amax = v.abs().amax(-1, keepdim=True).clamp_min(6.0 * 2.0**-9)
    scale = (amax / 6.0).clamp_max(448.0).to(torch.float8_e4m3fn).float()
    return straight_through(x, (_e2m1(v / scale) * scale).flatten(-2))


def fp8_blocks(x: Tensor, block: int = 32) -> Tensor:
    """Linear weights [n, k], both multiples of `block` or n short: E4M3, a scale per block."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.detach().float(), (0, 0, 0, -rows % block))
    v = padded.view(-1, block, columns // block, block)
    amax = v.abs().amax((1, 3), keepdim=True).clamp_min(1e-30)
    scale = _power_at_or_above(amax * (1.0 / 448.0))
    rounded = (_e4m3(v / scale) * scale).reshape(-1, columns)[:rows]
    return straight_through(x, rounded)
