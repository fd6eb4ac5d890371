"""Sparse attention and grouped projection of few rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.ops.cpu import prefill
from headrace.ops.cpu.decode import quant
from headrace.ops.cpu.decode.arrays import LARGE_PRODUCT, array, tensor
from headrace.ops.records import RecordView

# Most numbers of gathered keys (4 MB in fp32).
_MOST_KEYS = 1 << 20


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: RecordView | None,
    major: Tensor,
    minor: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """`reference.sparse_attention`: the sink is the bias of one more key, which is zero."""
    rows, heads, width = q.shape
    place, far = array(window_index), array(major)
    near = place.shape[1]
    count = near + (far.shape[1] if entries is not None else 0)
    if rows * count * width > _MOST_KEYS:
        return prefill.sparse_attention(q, window, window_index, entries, major, minor, sink, scale)
    window_keys = array(window)
    keys = np.empty((rows, count + 1, width), window_keys.dtype)
    # mode="clip": -1 reads row 0, which is taken out below.
    keys[:, :near] = window_keys.take(place, axis=0, mode="clip")
    if count > near and entries is not None:
        # -1 reads the last row, likewise.
        keys[:, near:count] = array(quant.read_records(entries, major, minor, q.dtype))
    keys[:, count] = 0.0
    if (count == near or far.min(initial=0) >= 0) and place.min(initial=0) >= 0:
        bias = np.zeros((heads, count + 1), keys.dtype)
    else:
        parts = (place, far) if count > near else (place,)
        absent = np.concatenate(parts, axis=1) < 0
        keys[:, :count][absent] = 0.0
        bias = np.zeros((rows, heads, count + 1), keys.dtype)
        np.copyto(bias[..., :count], -np.inf, where=absent[:, None])
    bias[..., count] = array(sink)
    k = torch.from_numpy(keys)
    logits = torch.baddbmm(torch.from_numpy(bias), q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(logits, dim=-1), k)


def grouped_projection(o: Tensor, wo_a: Tensor, groups: int) -> Tensor:
    """`reference.grouped_projection`."""
    rows, (outputs, inputs) = o.shape[0], wo_a.shape
    if wo_a.dtype != o.dtype:
        wo_a = wo_a.to(o.dtype)
    if rows * wo_a.numel() > LARGE_PRODUCT * groups:
        w = wo_a.view(groups, outputs // groups, inputs).transpose(1, 2)
        x = o.reshape(rows, groups, inputs).transpose(0, 1)
        return torch.bmm(x, w).transpose(0, 1).reshape(rows, outputs)
    weight = array(wo_a).reshape(groups, outputs // groups, inputs)
    heads = array(o).reshape(rows, groups, inputs)
    out = np.empty((rows, groups, outputs // groups), weight.dtype)
    for group in range(groups):
        out[:, group] = heads[:, group].dot(weight[group].T)
    return tensor(out.reshape(rows, outputs))
