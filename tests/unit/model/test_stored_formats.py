"""Stored weight formats: tie vectors, scale edge cases, exact round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.stored_formats import (
    decode_fp4,
    decode_fp8,
    encode_fp4,
    encode_fp8,
    scales_to_numbers,
)


def test_every_scale_byte_is_its_power_of_two() -> None:
    numbers = scales_to_numbers(torch.arange(256, dtype=torch.uint8), torch.float64)
    assert numbers[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert torch.isnan(numbers[255])
    single = scales_to_numbers(torch.tensor([0, 127, 254], dtype=torch.uint8), torch.float32)
    assert single.tolist() == [2.0**-127, 1.0, 2.0**127]


def row_of(*values: float) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


@pytest.mark.parametrize(
    ("values", "scale", "codes"),
    [
        (
            (
                0.25,
                -0.25,
                0.75,
                -0.75,
                1.25,
                -1.25,
                1.75,
                -1.75,
                2.5,
                -2.5,
                3.5,
                -3.5,
                5,
                -5,
                6,
                -6,
            ),
            1.0,
            (0, 8, 2, 10, 2, 10, 4, 12, 4, 12, 6, 14, 6, 14, 7, 15),
        ),
        ((5, -5, 2.5, 0.75), 1.0, (6, 14, 4, 2)),
        ((3, 1.25), 0.5, (7, 4)),
        ((3.0000002384185791, 1.25), 1.0, (5, 2)),
        ((0.0, -0.0), 2.0**-126, (0, 8)),
    ],
)
def test_fp4_ties_go_to_even_codes(
    values: tuple[float, ...], scale: float, codes: tuple[int, ...]
) -> None:
    packed, scales = encode_fp4(row_of(*values))
    assert scales_to_numbers(scales, torch.float64).tolist() == [[scale]]
    unpacked = torch.stack((packed.view(torch.uint8) & 0xF, packed.view(torch.uint8) >> 4), -1)
    assert unpacked.flatten()[: len(codes)].tolist() == list(codes)


def test_fp4_low_nibble_is_the_even_element() -> None:
    packed, _ = encode_fp4(row_of(6.0, 1.0))
    assert packed.view(torch.uint8)[0, 0] == 0x27


def test_fp8_ties_and_clamp() -> None:
    values = (17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 248.0, 264.0, 448.0)
    codes, scales = encode_fp8(row_of(*values), (1, 32))
    assert scales_to_numbers(scales, torch.float64).tolist() == [[1.0]]
    expected = [88, 90, 216, 0, 2, 120, 120, 126]
    assert codes.view(torch.uint8)[0, : len(values)].tolist() == expected


def test_short_last_block_of_rows() -> None:
    numbers = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    codes, scales = encode_fp8(numbers, (32, 32))
    assert codes.shape == (40, 64)
    assert scales.shape == (2, 2)
    per_row = scales.view(torch.uint8).repeat_interleave(32, 0)[:40]
    decoded = decode_fp8(codes, per_row, 32, torch.float32)
    torch.testing.assert_close(decoded, numbers, rtol=0.07, atol=0.01)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-60, 60))
def test_decoded_numbers_encode_to_themselves(seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(8, 64, generator=generator) * 2.0**exponent
    packed, scales = encode_fp4(numbers)
    decoded = decode_fp4(packed, scales, torch.float32)
    again = decode_fp4(*encode_fp4(decoded), torch.float32)
    assert torch.equal(again, decoded)
    assert torch.equal(decoded.to(torch.bfloat16).float(), decoded)
    error = (decoded - numbers).abs().view(8, 2, 32).amax(-1)
    # Half of the widest step (4 to 6) of the group's scale.
    assert bool((error <= scales_to_numbers(scales, torch.float32)).all())
    codes, scales8 = encode_fp8(numbers, (1, 32))
    decoded8 = decode_fp8(codes, scales8, 32, torch.float64)
    again8 = decode_fp8(*encode_fp8(decoded8, (1, 32)), 32, torch.float64)
    assert torch.equal(again8, decoded8)
