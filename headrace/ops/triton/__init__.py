"""Triton operators for NVIDIA GPUs from SM80 on.

The functions here are what the catalogue lists: Triton is imported with the first call, since it
takes a second and a CPU never needs it. Kernels: `attention`; decoding of records: `records`.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from headrace.ops.records import RecordView


def missing() -> str | None:
    """Why Triton operators cannot run here, or None."""
    return None if find_spec("triton") else "needs the package triton, which is not installed"


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
    """`reference.sparse_attention`, see `attention.sparse_attention`."""
    from headrace.ops.triton import attention

    return attention.sparse_attention(q, window, window_index, entries, major, minor, sink, scale)
