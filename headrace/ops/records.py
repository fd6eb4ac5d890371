"""Stored cache rows as the operators see them.

A `RecordView` is a strided window over a cache arena: row `data[major, minor]` is one stored row,
where (major, minor) is (block, row in block) for paged groups and (slot, row in ring) for the
others. The operators `read_records` / `write_records` translate between rows and numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.core.kv import RecordFormat


@dataclass(frozen=True, slots=True)
class RecordView:
    """data: uint8 [majors, minors, bytes] of a quantised format, numbers [.., width] of PLAIN.

    `scales` is None where data and scales of a row lie side by side. Index-key blocks are planar
    (all data of a block, then all scales): data is [.., width // 2], scales [.., width // 32].
    """

    data: Tensor
    format: RecordFormat
    width: int
    rope_width: int = 0
    scales: Tensor | None = None
