"""Cache views for cases of operators: strided, full of NaN where nobody wrote."""

from __future__ import annotations

import torch

from headrace.core.kv import RecordFormat
from headrace.ops.case_inputs import Inputs
from headrace.ops.records import RecordView
from headrace.ops.reference.quant import write_records

# name -> (format, width, rope width, scales apart from the data)
RECORDS = {
    "plain": (RecordFormat.PLAIN, 24, 0, False),
    "fp4_e4m3": (RecordFormat.FP4_E4M3_16, 32, 0, False),
    "fp4_e4m3_released": (RecordFormat.FP4_E4M3_16, 512, 0, False),
    "fp8": (RecordFormat.FP8_UE8M0_32, 64, 0, False),
    "fp8_released": (RecordFormat.FP8_UE8M0_32, 512, 0, False),
    "fp4_ue8m0": (RecordFormat.FP4_UE8M0_32, 32, 0, False),
    "fp4_ue8m0_planar": (RecordFormat.FP4_UE8M0_32, 128, 0, True),
    "fp8_nope": (RecordFormat.FP8_NOPE_64, 48, 16, False),
    "fp8_nope_released": (RecordFormat.FP8_NOPE_64, 512, 64, False),
}


def record_view(i: Inputs, name: str, majors: int, minors: int) -> RecordView:
    """A view into a strided arena full of 0xFF bytes (NaN in every format)."""
    kind, width, rope, planar = RECORDS[name]
    if kind is RecordFormat.PLAIN:
        arena = torch.full((majors, 8 + minors * width), torch.nan, dtype=i.dtype)
        return RecordView(arena[:, 8:].unflatten(1, (minors, width)), kind, width)
    nope = width - rope
    size = {
        RecordFormat.FP4_E4M3_16: width // 2 + width // 16,
        RecordFormat.FP8_UE8M0_32: width + width // 32,
        RecordFormat.FP4_UE8M0_32: width // 2 + width // 32,
        RecordFormat.FP8_NOPE_64: nope + 2 * rope + -(-nope // 64),
    }[kind]
    size += size % 2 if kind is RecordFormat.FP8_NOPE_64 else 0
    arena = torch.full((majors, 32 + minors * size), 0xFF, dtype=torch.uint8)
    if not planar:
        return RecordView(arena[:, 32:].unflatten(1, (minors, size)), kind, width, rope)
    border = 32 + minors * (width // 2)
    data = arena[:, 32:border].unflatten(1, (minors, width // 2))
    scales = arena[:, border:].unflatten(1, (minors, width // 32))
    return RecordView(data, kind, width, rope, scales)


def written_view(i: Inputs, name: str, majors: int, minors: int) -> RecordView:
    """A view whose rows are written, but for the last major, which stays NaN."""
    view = record_view(i, name, majors, minors)
    major = torch.arange(majors - 1).unsqueeze(1).expand(-1, minors)
    minor = torch.arange(minors).expand(majors - 1, -1)
    write_records(view, major, minor, i.normal(majors - 1, minors, view.width))
    return view
