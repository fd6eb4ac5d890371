"""Engram: the gate of each stream and the gated addition, one kernel each.

A gate is computed by one program from its whole row; the addition multiplies and adds as the
reference does, without fused operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.norm import inverse_rms
from headrace.ops.triton.rows import as_rows, warps

_ADD_COLUMNS = 2048


@triton.jit
def _gate(
    streams_ptr,
    key_ptr,
    weight_ptr,
    out_ptr,
    eps,
    scale,
    copies,
    streams_outer,
    streams_inner,
    key_outer,
    key_inner,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    outer, copy = (row // copies).to(tl.int64), (row % copies).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < WIDTH
    streams = streams_ptr + outer * streams_outer + copy * streams_inner + column
    key = key_ptr + outer * key_outer + copy * key_inner + column
    s = tl.load(streams, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight_ptr + copy * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    # Zero has no sign here, as in torch's sums: the gate of -0 would be another one.
    dot = tl.sum(s * w * k, 1) + 0.0
    dot *= inverse_rms(s, eps, WIDTH)
    dot *= inverse_rms(k, eps, WIDTH)
    dot *= scale
    size = tl.abs(dot)
    # NaN stays NaN.
    root = tl.sqrt_rn(tl.where(size < 1e-6, 1e-6, size))
    root = tl.where(dot < 0.0, -root, root)
    tl.store(out_ptr + row + tl.arange(0, 1), 1.0 / (1.0 + tl.exp(-root)))


@triton.jit
def _add(
    streams_ptr,
    gate_ptr,
    value_ptr,
    out_ptr,
    copies,
    streams_outer,
    streams_inner,
    gate_outer,
    gate_inner,
    value_outer,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    outer, copy = (row // copies).to(tl.int64), (row % copies).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    streams = streams_ptr + outer * streams_outer + copy * streams_inner
    s = tl.load(streams + column, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(value_ptr + outer * value_outer + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + outer * gate_outer + copy * gate_inner).to(tl.float32)
    out = out_ptr + row.to(tl.int64) * WIDTH + column
    tl.store(out, (s + g * v).to(out_ptr.dtype.element_ty), mask=inside)


def engram_gate(streams: Tensor, key: Tensor, query_key_weight: Tensor, eps: float) -> Tensor:
    """`reference.engram_gate`."""
    rows, copies, width = streams.shape
    out = torch.empty((rows, copies), dtype=torch.float32, device=streams.device)
    if out.numel() == 0:
        return out
    streams, key = as_rows(streams), as_rows(key)
    columns = triton.next_power_of_2(width)
    with torch.cuda.device_of(streams):
        _gate[(rows * copies,)](
            streams,
            key,
            query_key_weight.contiguous(),
            out,
            float(eps),
            width**-0.5,
            copies,
            *streams.stride()[:2],
            *key.stride()[:2],
            WIDTH=width,
            COLUMNS=columns,
            num_warps=warps(columns),
        )
    return out


def engram_add(streams: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """`reference.engram_add`."""
    rows, copies, width = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if out.numel() == 0:
        return out
    streams, value = as_rows(streams), as_rows(value)
    columns = min(triton.next_power_of_2(width), _ADD_COLUMNS)
    with torch.cuda.device_of(streams):
        _add[(rows * copies, triton.cdiv(width, columns))](
            streams,
            gate,
            value,
            out,
            copies,
            *streams.stride()[:2],
            *gate.stride(),
            value.stride(0),
            WIDTH=width,
            COLUMNS=columns,
            enable_fp_fusion=False,
        )
    return out
