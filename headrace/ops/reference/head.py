"""Reference output head."""

from __future__ import annotations

from torch import Tensor

from headrace.ops.reference.norm import wide


def logits(x: Tensor, head: Tensor) -> Tensor:
    """fp32(x) @ fp32(head)^T for x [S, D], head [V, D] -> [S, V] (fp64 in the fp64 mode)."""
    v = wide(x)
    return v @ head.to(v.dtype).T
