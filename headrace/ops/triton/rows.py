"""Rows of tensors as row-wise kernels address them: row r is (r // inner, r % inner)."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """x [.., n] as [outer, inner, n] with outer its dim 0 and columns side by side.

    A view where the strides allow it, else a copy.
    """
    n = x.shape[-1]
    if x.dim() < 3:
        rows = x.reshape(-1, 1, n)
    elif x.dim() == 3:
        rows = x
    else:
        rows = x.reshape(x.shape[0], x.shape[1:-1].numel(), n)
    return rows if n == 1 or rows.stride(-1) == 1 else rows.contiguous()


def tile_rows(columns: int, numbers: int = 2048) -> int:
    """Rows of `columns` padded columns that one program takes: some `numbers` numbers.

    By the width alone, never by the row count: a row's bits must not depend on other rows.
    """
    return max(1, numbers // columns)


def warps(numbers: int) -> int:
    """Warps of a program over a tile of `numbers` numbers: at most 32 numbers a thread."""
    return 4 if numbers <= 4096 else 8 if numbers <= 8192 else 16
