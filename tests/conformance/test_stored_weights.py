"""Weights as they are stored, against the decoders that a checkpoint is loaded with."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import InternalError
from headrace.model.stored_formats import decode_fp4, decode_fp8, encode_fp4, encode_fp8
from headrace.ops.case_inputs import Inputs
from headrace.ops.stored_weights import StoredWeight, WeightFormat, dense, halves
from headrace.ops.weight_cases import KINDS, stored_weight

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def numbers(seed: int, rows: int, columns: int) -> torch.Tensor:
    i = Inputs(seed, torch.float32)
    return i.normal(rows, columns) * 2.0 ** i.integers(-12, 12, rows, 1)


@DTYPES
@pytest.mark.parametrize("block", [(32, 32), (1, 32), (128, 128), (3, 16)])
def test_fp8_is_what_a_checkpoint_decodes_to(block: tuple[int, int], dtype: torch.dtype):
    """75 rows: the last block is short."""
    codes, scales = encode_fp8(numbers(1, 75, 256), block)
    stored = StoredWeight(
        codes.view(torch.uint8), scales.view(torch.uint8), WeightFormat.FP8, block
    )
    per_row = scales.view(torch.uint8).repeat_interleave(block[0], 0)[:75]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert stored.shape == (75, 256)
    assert dense(stored, dtype).equal(decode_fp8(codes, per_row, block[1], wide).to(dtype))


@DTYPES
def test_fp4_is_what_a_checkpoint_decodes_to(dtype: torch.dtype):
    codes, scales = encode_fp4(numbers(2, 7, 96))
    stored = StoredWeight(
        codes.view(torch.uint8), scales.view(torch.uint8), WeightFormat.FP4, (1, 32)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert stored.shape == (7, 96)
    assert dense(stored, dtype).equal(decode_fp4(codes, scales, wide).to(dtype))


@pytest.mark.parametrize("byte", [0, 1, 127, 254])
def test_the_largest_and_smallest_scales_keep_fp64(byte: int):
    """448 * 2^127 is beyond fp32, and 2^-127 * 2^-9 below its normal numbers."""
    codes = torch.arange(256).to(torch.uint8)[None]
    codes = codes[codes & 0x7F != 0x7F][None, :224]
    scales = torch.full((1, 7), byte, dtype=torch.uint8)
    stored = StoredWeight(codes, scales, WeightFormat.FP8, (1, 32))
    expected = decode_fp8(codes.view(torch.float8_e4m3fn), scales, 32, torch.float64)
    assert dense(stored, torch.float64).equal(expected)
    assert torch.isfinite(expected).all()


@pytest.mark.parametrize("kind", list(KINDS))
def test_one_of_several_and_some_rows(kind: str):
    stored = stored_weight(Inputs(3, torch.float32), kind, 4, 256 + 96, 640)
    whole = dense(stored, torch.float32)
    height = stored.block[0]
    assert dense(stored[2], torch.float32).equal(whole[2])
    assert dense(stored[1:3], torch.float32).equal(whole[1:3])
    start, stop = height, 2 * height
    assert dense(stored.rows(start, stop), torch.float32).equal(whole[:, start:stop])
    assert dense(stored.rows(start, 352), torch.float32).equal(whole[:, start:])
    assert dense(stored[3].rows(0, stop), torch.float32).equal(whole[3, :stop])


def test_halves_lie_at_the_border_of_a_block():
    i = Inputs(4, torch.float32)
    for stored in (stored_weight(i, "fp8", 3, 128, 32), stored_weight(i, "fp4", 6, 32)):
        whole = dense(stored, torch.float32)
        found = torch.cat([dense(half, torch.float32) for half in halves(stored)], dim=-2)
        assert found.equal(whole)
    plain = i.weight(2, 6, 5)
    assert torch.cat(halves(plain), dim=-2).equal(plain)
    with pytest.raises(InternalError, match="block of 32"):
        halves(stored_weight(i, "fp8", 96, 32))
    with pytest.raises(InternalError, match="Rows 0 to 40 of 96"):
        stored_weight(i, "fp8", 96, 32).rows(0, 40)
