"""Quantisers: published tie and edge vectors, a slow exact implementation, and their properties.

`slow_*` compute with Python fractions from the definition of the formats alone, so that no rounding
of the machine can hide one of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.ops.reference import quant

NEXT_AFTER_3 = float(np.nextafter(np.float32(3), np.float32(4)))


# --- a slow implementation from the definitions ---------------------------------------------------

E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def e4m3_value(code: int) -> Fraction:
    """Magnitude of a 7-bit E4M3 code (0x7F is NaN and not asked for)."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(2) ** -6
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3_value(code) for code in range(0x7F)]


def nearest(value: Fraction, grid: Sequence[Fraction]) -> int:
    """Index of the nearest grid value, ties to the even index; beyond the grid its last one."""
    return min(range(len(grid)), key=lambda code: (abs(grid[code] - value), code % 2))


def encode(value: float, scale: Fraction, grid: Sequence[Fraction]) -> int:
    """Code with its sign in the highest bit; -0 keeps it."""
    code = nearest(abs(Fraction(value)) / scale, grid)
    sign_bit = 8 if len(grid) == 8 else 128
    return code + sign_bit if math.copysign(1.0, value) < 0 else code


def fp32(value: Fraction) -> Fraction:
    """Rounded to fp32, by way of fp64: a double rounding would need 29 bits that are all alike."""
    return Fraction(float(np.float32(float(value))))


def pow2ceil(value: Fraction) -> Fraction:
    power = Fraction(1)
    while power < value:
        power *= 2
    while power / 2 >= value:
        power /= 2
    return power


def slow_ue8m0(values: Sequence[float], top: int, floor: Fraction) -> Fraction:
    amax = max(max(abs(Fraction(v)) for v in values), fp32(floor))
    return pow2ceil(fp32(amax * fp32(Fraction(1, top))))


def slow_fp8(values: Sequence[float]) -> tuple[list[int], Fraction]:
    scale = slow_ue8m0(values, 448, Fraction(1, 10000))
    return [encode(v, scale, E4M3) for v in values], scale


def slow_fp4(values: Sequence[float]) -> tuple[list[int], Fraction]:
    scale = slow_ue8m0(values, 6, 6 * Fraction(2) ** -126)
    return [encode(v, scale, E2M1) for v in values], scale


def slow_fp4_e4m3(values: Sequence[float]) -> tuple[list[int], Fraction]:
    amax = max(max(abs(Fraction(v)) for v in values), 6 * Fraction(2) ** -9)
    scale = E4M3[nearest(fp32(amax / 6), E4M3)]
    # The quotient x / scale is rounded to fp32 before it is rounded to E2M1.
    return [
        encode(math.copysign(float(fp32(abs(Fraction(v)) / scale)), v), Fraction(1), E2M1)
        for v in values
    ], scale


FORMATS = {
    "fp8": (quant.quantise_fp8, quant.dequantise_fp8, 32, slow_fp8, E4M3),
    "fp4_ue8m0": (quant.quantise_fp4_ue8m0, quant.dequantise_fp4_ue8m0, 32, slow_fp4, E2M1),
    "fp4_e4m3": (quant.quantise_fp4_e4m3, quant.dequantise_fp4_e4m3, 16, slow_fp4_e4m3, E2M1),
}
Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def scale_values(name: str, scales: Tensor) -> Tensor:
    """Scale bytes as fp32 numbers."""
    if name == "fp4_e4m3":
        return scales.view(torch.float8_e4m3fn).float()
    return quant.ue8m0_to_float(scales)


# --- published vectors ----------------------------------------------------------------------------

TIES = [0.25, -0.25, 0.75, -0.75, 1.25, -1.25, 1.75, -1.75]
TIES += [2.5, -2.5, 3.5, -3.5, 5.0, -5.0, 6.0, -6.0]
TIE_CODES = [0, 8, 2, 10, 2, 10, 4, 12, 4, 12, 6, 14, 6, 14, 7, 15]
TIE_VALUES = [0.0, -0.0, 1, -1, 1, -1, 2, -2, 2, -2, 4, -4, 4, -4, 6, -6]
FP8_TIES = [17, 19, -17, -19, 2**-10, 3 * 2**-10, -(2**-10), 248, 264, 448]
FP8_TIE_CODES = [88, 90, 216, 218, 0, 2, 128, 120, 120, 126]
FP8_TIE_VALUES = [16, 20, -16, -20, 0.0, 2**-8, -0.0, 256, 256, 448]
TINY_FP8 = 9.5367431640625e-6

# (id, format, input, scale, codes, values); the rest of a group is zero.
VECTORS = [
    ("T1", "fp4_ue8m0", TIES * 2, 1.0, TIE_CODES * 2, TIE_VALUES * 2),
    ("T2", "fp4_e4m3", TIES, 1.0, TIE_CODES, TIE_VALUES),
    ("T3", "fp4_ue8m0", [5, -5, 2.5, 0.75], 1.0, [6, 14, 4, 2], [4, -4, 2, 1]),
    ("T4a", "fp4_e4m3", [6.375, 1, -0.25], 1.0, [7, 2, 8], [6, 1, -0.0]),
    ("T4b", "fp4_e4m3", [7.125, 1, -0.3125], 1.25, [7, 2, 8], [7.5, 1.25, -0.0]),
    ("T5a", "fp4_ue8m0", [3, 1.25], 0.5, [7, 4], [3, 1]),
    ("T5b", "fp4_ue8m0", [NEXT_AFTER_3, 1.25], 1.0, [5, 2], [3, 1]),
    ("T6a", "fp4_ue8m0", [0.0, -0.0], 2.0**-126, [0, 8], [0.0, -0.0]),
    ("T6b", "fp4_e4m3", [0.0, -0.0], 2.0**-9, [0, 8], [0.0, -0.0]),
    ("T7", "fp8", FP8_TIES, 1.0, FP8_TIE_CODES, FP8_TIE_VALUES),
    (
        "T8",
        "fp8",
        [1e-5, -1e-5, 5e-5],
        2.0**-22,
        [98, 226, 117],
        [TINY_FP8, -TINY_FP8, 4.9591064453125e-5],
    ),
]


@pytest.mark.parametrize(
    ("name", "values", "scale", "codes", "expected"),
    [pytest.param(*vector[1:], id=vector[0]) for vector in VECTORS],
)
def test_published_vectors(name, values, scale, codes, expected):
    quantise, dequantise, group, *_ = FORMATS[name]
    x = torch.tensor([*values, *[0.0] * (group - len(values))], dtype=torch.float32)
    found, scales = quantise(x)
    assert scale_values(name, scales).tolist() == [scale]
    assert found[: len(values)].tolist() == codes
    result = dequantise(found, scales)[: len(values)]
    assert result.tolist() == expected
    assert torch.signbit(result).tolist() == [math.copysign(1, v) < 0 for v in expected]


# Section 14 of the model specification: bf16(((37 i) mod 101 - 50) / 17).
RAMP = torch.tensor([((37 * i) % 101 - 50) / 17 for i in range(32)]).to(torch.bfloat16)
RAMP_FP8 = (
    "252 236 115 249 219 120 246 101 122 241 112 251 233 117 249 0 121 245 105 123 240 113 250 229 "
    "118 248 91 121 243 108 124 237"
)
RAMP_FP4 = "-6 -1.5 3 -4 -.5 4 -4 1 6 -2 2 -6 -1 3 -4 0 4 -3 1 6 -2 2 -6 -1 4 -4 .5 4 -3 1.5 6 -1.5"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_specification_vectors(dtype):
    x = RAMP.to(dtype)
    codes, scales = quant.quantise_fp8(x)
    assert scales.tolist() == [120]  # 2^-7
    assert codes.tolist() == [int(c) for c in RAMP_FP8.split()]
    grid = [float(v) for v in RAMP_FP4.split()]
    codes, scales = quant.quantise_fp4_ue8m0(x)
    assert scales.tolist() == [126]  # 2^-1
    assert quant.e2m1_to_float(codes).tolist() == grid
    assert quant.fake_fp4_ue8m0(x).tolist() == [v / 2 for v in grid]
    codes, scales = quant.quantise_fp4_e4m3(x)
    assert scales.tolist() == [0x30, 0x30]  # 0.5 in E4M3
    assert quant.e2m1_to_float(codes).tolist() == grid


# --- against the slow implementation --------------------------------------------------------------


def random_groups(name: str, seed: int, dtype: torch.dtype) -> Tensor:
    """Groups of all magnitudes, with values near and on rounding borders."""
    _, _, group, _, grid = FORMATS[name]
    g = torch.Generator().manual_seed(seed)
    powers = 2.0 ** torch.randint(-20, 12, (40, 1), generator=g).double()
    smooth = torch.randn((20, group), generator=g, dtype=torch.float64)
    middles = torch.tensor([float(a + b) / 2 for a, b in pairwise(grid)])
    picks = middles.double()[torch.randint(0, len(middles), (20, group), generator=g)]
    signs = torch.randint(0, 2, (20, group), generator=g) * 2.0 - 1.0
    return (torch.cat((smooth, picks * signs)) * powers).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", list(FORMATS))
def test_equals_slow_implementation(name, dtype):
    quantise, _, _, slow, _ = FORMATS[name]
    for row in random_groups(name, 11, dtype):
        codes, scales = quantise(row)
        expected_codes, expected_scale = slow(row.tolist())
        assert scale_values(name, scales).item() == float(expected_scale), row
        assert codes.tolist() == expected_codes, row


@pytest.mark.parametrize("name", list(FORMATS))
def test_fp64_input_is_first_rounded_to_fp32(name):
    quantise = FORMATS[name][0]
    x = random_groups(name, 5, torch.float64)
    for a, b in zip(quantise(x), quantise(x.float()), strict=True):
        assert a.equal(b)


# --- ties at every scale --------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-126, -125, -60, -1, 0, 1, 40, 124])
def test_fp4_ties_go_to_the_even_code_at_every_scale(exponent):
    """Midpoints of all neighbouring codes, in a group whose largest value fixes the scale."""
    for low in range(7):
        middle = float(E2M1[low] + E2M1[low + 1]) / 2
        x = torch.zeros(32)
        x[:3] = torch.tensor([6.0, middle, -middle]) * torch.tensor(2.0**exponent)
        codes, scales = quant.quantise_fp4_ue8m0(x)
        even = low + low % 2
        assert scales.item() == exponent + 127
        assert codes[:3].tolist() == [7, even, 8 + even]


@pytest.mark.parametrize("scale_code", [1, 2, 7, 8, 0x30, 0x38, 0x70, 0x7E])
def test_fp4_e4m3_ties_go_to_the_even_code_at_every_scale(scale_code):
    """Scales are E4M3 numbers; with those of few bits the midpoints are exact fp32 numbers."""
    scale = float(E4M3[scale_code])
    for low in range(7):
        middle = float(E2M1[low] + E2M1[low + 1]) / 2
        x = torch.zeros(16)
        x[:3] = torch.tensor([6.0, middle, -middle]) * scale
        codes, scales = quant.quantise_fp4_e4m3(x)
        even = low + low % 2
        assert scales.item() == scale_code
        assert codes[:3].tolist() == [7, even, 8 + even]


@pytest.mark.parametrize("exponent", [-22, -10, 0, 1, 30, 118])
def test_fp8_ties_go_to_the_even_code_at_every_scale(exponent):
    middles = torch.tensor([float(a + b) / 2 for a, b in pairwise(E4M3)])
    codes = torch.arange(len(middles))
    even = codes + codes % 2
    for start in range(0, len(middles), 31):
        part = middles[start : start + 31]
        x = torch.zeros(32)
        x[0] = 448.0
        x[1 : 1 + len(part)] = part
        for sign in (1.0, -1.0):
            found, scales = quant.quantise_fp8(x * sign * torch.tensor(2.0**exponent))
            assert scales.item() == exponent + 127
            expected = even[start : start + 31] + (128 if sign < 0 else 0)
            assert found[1 : 1 + len(part)].tolist() == expected.tolist()


# --- extremes -------------------------------------------------------------------------------------


def test_scales_of_extreme_groups():
    huge = torch.full((32,), 1.5 * 2.0**127)
    assert quant.fake_fp8(huge, 32).equal(huge)
    assert quant.fake_fp4_ue8m0(huge).equal(huge)
    codes, scales = quant.quantise_fp4_e4m3(huge[:16])
    assert scales.item() == 0x7E  # saturates at 448, no NaN
    assert codes.tolist() == [7] * 16
    smallest = torch.full((32,), 2.0**-149)
    assert quant.quantise_fp8(smallest)[1].item() == 127 - 22
    assert quant.quantise_fp4_ue8m0(smallest)[1].item() == 1
    assert quant.quantise_fp4_e4m3(smallest[:16])[1].item() == 1


def test_ue8m0_bytes():
    """Byte e means 2^(e - 127), also the subnormal 2^-127; 255 is NaN."""
    values = quant.ue8m0_to_float(torch.arange(256).to(torch.uint8))
    assert values[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert math.isnan(values[255])


def test_e2m1_codes():
    values = quant.e2m1_to_float(torch.arange(16).to(torch.uint8))
    assert values.tolist() == [*map(float, E2M1), *(-float(v) for v in E2M1)]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8


def test_pack_order():
    """The even element lies in the low nibble."""
    assert quant.pack_fp4(torch.tensor([1, 2, 15, 0]).to(torch.uint8)).tolist() == [0x21, 0x0F]


# --- properties -----------------------------------------------------------------------------------

numbers = st.floats(-(2.0**100), 2.0**100, width=32)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def group_of(name: str) -> st.SearchStrategy[list[float]]:
    size = FORMATS[name][2]
    scaled = st.tuples(
        st.lists(st.floats(-8, 8, width=32), min_size=size, max_size=size), st.integers(-40, 40)
    ).map(lambda t: [v * 2.0 ** t[1] for v in t[0]])
    return st.one_of(scaled, st.lists(numbers, min_size=size, max_size=size))


@pytest.mark.parametrize("name", list(FORMATS))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_properties(name, data):
    """Half-a-step error, sign kept, idempotence; codes survive their own numbers."""
    quantise, dequantise, _, _, grid = FORMATS[name]
    x = torch.tensor(data.draw(group_of(name))).to(data.draw(DTYPES))
    codes, scales = quantise(x)
    value = dequantise(codes, scales)
    scale = scale_values(name, scales).item()
    top = float(grid[-1]) * scale
    assert torch.equal(torch.signbit(value), torch.signbit(x))
    assert value.abs().max().item() <= top
    for v, q in zip(x.float().tolist(), value.tolist(), strict=True):
        place = min(abs(v), top) / scale
        upper = max(1, next((i for i, g in enumerate(grid) if g >= place), len(grid) - 1))
        step = float(grid[upper] - grid[upper - 1]) * scale
        assert abs(min(abs(v), top) - abs(q)) <= step / 2 * (1 + 1e-6)
    again = dequantise(*quantise(value))
    assert again.equal(value)


@pytest.mark.parametrize("name", list(FORMATS))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_codes_survive_their_own_numbers(name, data):
    """quantise(dequantise(codes)) is the identity where the largest code fixes the scale."""
    quantise, dequantise, group, _, grid = FORMATS[name]
    top = len(grid) - 1
    sign = 128 if len(grid) > 8 else 8
    magnitude = st.integers(0, top)
    codes = [
        m + sign * s
        for m, s in data.draw(
            st.lists(st.tuples(magnitude, st.integers(0, 1)), min_size=group, max_size=group)
        )
    ]
    codes[data.draw(st.integers(0, group - 1))] = top
    scale = data.draw(st.integers(1, 0x7E) if name == "fp4_e4m3" else st.integers(106, 240))
    c = torch.tensor(codes).to(torch.uint8)
    s = torch.tensor([scale]).to(torch.uint8)
    found, scales = quantise(dequantise(c, s))
    assert scales.tolist() == [scale]
    assert found.tolist() == codes


@given(st.lists(st.integers(0, 255), max_size=64))
def test_unpack_inverts_pack(values):
    packed = torch.tensor(values, dtype=torch.uint8)
    codes = quant.unpack_fp4(packed)
    assert int(codes.max()) <= 15 if values else codes.numel() == 0
    assert quant.pack_fp4(codes).equal(packed)


def test_groups_are_independent():
    """Each group has its own scale, in every leading dimension."""
    for name, (quantise, _, group, _, _) in FORMATS.items():
        x = random_groups(name, 9, torch.float32).view(4, 10 * group)
        codes, scales = quantise(x)
        for i in range(4):
            for j in range(10):
                part = slice(j * group, (j + 1) * group)
                c, s = quantise(x[i, part])
                assert codes[i, part].equal(c)
                assert scales[i, j].equal(s[0])
