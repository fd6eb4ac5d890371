"""Cases of operators whose weights are not plain numbers of the compute dtype; see `cases`.

Variants called "stored_.." hold weights as a checkpoint stores them, or a head in bf16: what only
cards are given, so that implementations for few rows on a CPU leave them out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.ops.case_inputs import Builder, Case, Inputs
from headrace.ops.stored_weights import StoredWeight, Weight, WeightFormat

# kind -> format and block; FP4 always has rows of 32, FP8 the model's squares, those of V4, rows
# of its quantised layers, and blocks that are no power of two
KINDS = {
    "fp8": (WeightFormat.FP8, (32, 32)),
    "fp8_rows": (WeightFormat.FP8, (1, 32)),
    "fp8_128": (WeightFormat.FP8, (128, 128)),
    "fp8_odd": (WeightFormat.FP8, (3, 20)),
    "fp4": (WeightFormat.FP4, (1, 32)),
}


def stored_weight(i: Inputs, kind: str, *shape: int) -> StoredWeight:
    """Random codes of a weight [.., out, in] of about gain one; neighbouring scales differ."""
    kind_format, block = KINDS[kind]
    *lead, rows, columns = shape
    if kind_format is WeightFormat.FP4:
        codes = i.integers(0, 256, *lead, rows, columns // 2).to(torch.uint8)
    else:
        numbers = i.wide(*shape, scale=3.0).float()
        codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    middle = 127 - 2 - round(math.log2(columns) / 2)
    size = -(-rows // block[0]), columns // block[1]
    scales = (middle + i.integers(-1, 2, *lead, *size)).to(torch.uint8)
    return StoredWeight(codes, scales, kind_format, block)


def _linear(kind: str, inputs: int, outputs: int, *inner: int) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        return Case((i.normal(rows, *inner, inputs), stored_weight(i, kind, outputs, inputs)), (0,))

    return build


def _strided_linear(i: Inputs, rows: int) -> Case:
    """Columns of wider inputs, and rows of a taller weight."""
    weight = stored_weight(i, "fp8", 72, 64).rows(32, 72)
    return Case((i.normal(rows, 100)[:, 33:97], weight), (0,))


def _grouped_projection(kind: str, heads: int, width: int, groups: int, rank: int) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        weight = stored_weight(i, kind, groups * rank, heads * width // groups)
        return Case((i.normal(rows, heads, width), weight, groups), (0,))

    return build


def _moe(
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    kinds: tuple[str | None, str | None],
    *,
    act_group: int = 0,
    none: bool = False,
) -> Builder:
    """kinds of the routed and the shared weights (None: plain); none: some places are -1."""

    def weight(i: Inputs, kind: str | None, *shape: int) -> Weight:
        return i.weight(*shape) if kind is None else stored_weight(i, kind, *shape)

    def build(i: Inputs, rows: int) -> Case:
        routed, shared = kinds
        pick = i.distinct(rows, top_k, experts)
        if none:
            pick = pick.masked_fill(i.integers(0, 3, rows, top_k) == 0, -1)
        args = (
            i.normal(rows, hidden),
            pick,
            i.wide(rows, top_k).abs(),
            weight(i, routed, experts, 2 * inner, hidden),
            weight(i, routed, experts, hidden, inner),
            weight(i, shared, 2 * inner, hidden),
            weight(i, shared, hidden, inner),
        )
        return Case((*args, 10.0, act_group), (0, 1, 2))

    return build


def _logits(hidden: int, vocabulary: int, head_dtype: torch.dtype | None) -> Builder:
    """head_dtype None: fp32 (fp64), whatever the compute dtype."""

    def build(i: Inputs, rows: int) -> Case:
        head: Tensor = i.wide(vocabulary, hidden, scale=hidden**-0.5)
        return Case((i.normal(rows, hidden), head.to(head_dtype or head.dtype)), (0,))

    return build


WEIGHT_CASES: dict[str, dict[str, Builder]] = {
    "linear": {
        "stored_fp8": _linear("fp8", 96, 64),
        "stored_fp8_short_block": _linear("fp8", 160, 75),
        "stored_fp8_rows": _linear("fp8_rows", 64, 33),
        "stored_fp8_128": _linear("fp8_128", 256, 200),
        "stored_fp8_odd": _linear("fp8_odd", 60, 7),
        "stored_fp4": _linear("fp4", 96, 40),
        "stored_inner_dims": _linear("fp4", 32, 5, 3),
        "stored_strided": _strided_linear,
        "stored_fp8_released": _linear("fp8", 1280, 520),
        "stored_fp4_released": _linear("fp4", 2304, 128),
    },
    "grouped_projection": {
        "stored_fp8": _grouped_projection("fp8", 4, 16, 2, 32),
        "stored_fp8_block_over_groups": _grouped_projection("fp8", 6, 32, 3, 8),
        "stored_fp8_rows": _grouped_projection("fp8_rows", 4, 16, 2, 5),
        "stored_fp4": _grouped_projection("fp4", 4, 16, 1, 24),
        "stored_released": _grouped_projection("fp8", 16, 512, 8, 64),
    },
    "moe": {
        "stored_fp4": _moe(64, 32, 6, 2, ("fp4", "fp8")),
        "stored_fp8": _moe(96, 64, 5, 3, ("fp8", "fp8"), none=True),
        "stored_fp8_rows": _moe(64, 32, 4, 2, ("fp8_rows", "fp4")),
        "stored_plain_and_fp8": _moe(64, 32, 4, 2, (None, "fp8"), none=True),
        "stored_act_fp8": _moe(64, 32, 6, 2, ("fp4", "fp8"), act_group=32),
        "stored_act_fp8_of_128": _moe(128, 128, 4, 2, ("fp8_128", "fp8_128"), act_group=128),
        "stored_released": _moe(512, 288, 8, 6, ("fp4", "fp8"), none=True),
    },
    "logits": {
        "wide_head": _logits(48, 33, None),
        "stored_bf16_head": _logits(48, 33, torch.bfloat16),
    },
}
