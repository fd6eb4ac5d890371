"""Row-wise and cache-row operators of Triton in its interpreter: run it with TRITON_INTERPRET=1.

On a card tests/gpu/test_gpu_operators.py runs the compiled kernels on every case.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.ops import cases
from headrace.ops.numerics import DTYPES
from tests.conformance import row_checks
from tests.conformance.test_operators import (
    REFERENCE,
    as_bytes,
    check_rows,
    error,
    outputs,
    result_dtype,
    selections,
    tensors,
)

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from headrace.ops.catalogue import IMPLEMENTATIONS  # noqa: E402

# The interpreter's own, with NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

OPS = (
    *("rms_norm", "rope", "norm_rope", "hadamard", "fake_fp8", "fake_fp4_ue8m0"),
    *("round_rows", "read_records", "read_majors", "write_records"),
    *("pool_entries", "engram_gate", "engram_add"),
)
TRITON = {i.op: i for i in IMPLEMENTATIONS if i.name == "triton"}
CALLS = {op: i.function for op, i in TRITON.items()}
TABLE = [
    pytest.param(op, variant, dtype, id=f"{op}-{variant}-{dtype}")
    for op in OPS
    for variant in cases.CASES[op]
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("op", "variant", "dtype"), TABLE)
def test_agrees_with_reference(op: str, variant: str, dtype: str):
    for rows in (2,) if "released" in variant else (0, 1, 7, 33):
        case, again = (cases.build(op, variant, rows, DTYPES[dtype]) for _ in range(2))
        before = copy.deepcopy(case.args)
        found, expected = outputs(TRITON[op], case), outputs(REFERENCE[op], again)
        for number, (f, e) in enumerate(zip(found, expected, strict=True)):
            if f.is_floating_point():
                assert f.dtype == result_dtype(op, dtype, number)
            limit = TRITON[op].tolerance[dtype] if e.is_floating_point() else 0.0
            assert error(f, e) <= limit, f"{rows} rows"
        for place, (now, then) in enumerate(zip(case.args, before, strict=True)):
            if place != case.in_place:
                for a, b in zip(tensors(now), tensors(then), strict=True):
                    assert as_bytes(a).equal(as_bytes(b)), f"argument {place} changed"


# NumPy says what the interpreter computes with infinity and NaN.
computes_with_nan = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@computes_with_nan
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [32, 64, 128, 24])
def test_fake_quantisers_meet_extremes(group: int, dtype: str):
    # The interpreter's conversions from and to bf16 are wrong for subnormal numbers.
    x = row_checks.extreme_rows(2 * group, DTYPES[dtype], tame=dtype == "bfloat16")
    row_checks.check_fakes(CALLS, "cpu", group, x)


@computes_with_nan
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", row_checks.QUANTISED)
def test_records_of_extremes(name: str, dtype: str):
    width = cases.record_view(cases.Inputs(1, torch.float32), name, 1, 1).width
    x = row_checks.extreme_rows(width, DTYPES[dtype], tame=dtype == "bfloat16")
    row_checks.check_records(CALLS, "cpu", name, x)


@computes_with_nan
@pytest.mark.parametrize("name", row_checks.RECORDS)
def test_every_byte_is_read(name: str):
    row_checks.check_every_byte(CALLS, "cpu", name, torch.float32)


@pytest.mark.parametrize("name", row_checks.RECORDS)
def test_places_of_any_shape(name: str):
    row_checks.check_places(CALLS, "cpu", name)


@pytest.mark.parametrize("name", row_checks.RECORDS)
def test_places_outside_the_view(name: str):
    row_checks.check_outside(CALLS, "cpu", name)


def test_plain_rows_keep_a_dtype_of_their_own():
    """State rows stay fp32 in a bf16 engine; numbers that bf16 has too survive."""
    i = cases.Inputs(2, torch.bfloat16)
    x = i.normal(8, 24)
    for stored in (torch.float32, torch.bfloat16):
        view = cases.record_view(cases.Inputs(1, stored), "plain", 3, 4)
        place = torch.arange(8)
        TRITON["write_records"].function(view, place // 4, place % 4, x)
        for wanted in (torch.float32, torch.bfloat16):
            found = TRITON["read_records"].function(view, place // 4, place % 4, wanted)
            assert found.equal(x.to(wanted))
        assert TRITON["round_rows"].function(x.float(), view).equal(x.float())


def strided(x: Tensor) -> Tensor:
    """The same numbers with other numbers between rows and groups of rows."""
    wide = torch.nn.functional.pad(x, (3, 5) + (0, 1) * (x.dim() > 2), value=torch.nan)
    cut = wide[..., 3:-5]
    return cut[:, :-1] if x.dim() > 2 else cut


@pytest.mark.parametrize("op", OPS)
def test_takes_strided_inputs(op: str):
    """Every float argument in pieces, and with its columns apart."""
    if op in ("read_records", "read_majors"):
        return  # their floats are the view, always strided
    for variant in [v for v in cases.CASES[op] if "released" not in v]:
        case = cases.build(op, variant, 5, torch.float32)
        whole = outputs(TRITON[op], case)
        for change in (strided, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)):
            again = cases.build(op, variant, 5, torch.float32)
            args = tuple(
                change(a) if isinstance(a, Tensor) and a.is_floating_point() and a.dim() > 1 else a
                for a in again.args
            )
            for a, b in zip(outputs(TRITON[op], replace(again, args=args)), whole, strict=True):
                assert as_bytes(a).equal(as_bytes(b)), variant


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        *(("rms_norm", "heads_without_weight"), ("rope", "heads"), ("norm_rope", "heads")),
        *(("hadamard", "tiny"), ("fake_fp8", "edges"), ("fake_fp4_ue8m0", "tiny")),
        *(("round_rows", "fp4_e4m3"), ("read_records", "fp8"), ("read_majors", "fp8_nope")),
        *(("pool_entries", "overlap"), ("engram_gate", "tiny"), ("engram_add", "two_odd")),
    ],
)
def test_rows_do_not_see_each_other(op: str, variant: str):
    case = cases.build(op, variant, 96, torch.float32)
    chosen = {name: rows[:8] for name, rows in selections(96).items()}
    check_rows(TRITON[op], case, chosen)


@pytest.mark.parametrize("op", ["rope", "hadamard", "engram_add"])
def test_no_fused_operations(op: str):
    """Products are rounded before they are added: fp32 results have the bits of the reference."""
    for variant in cases.CASES[op]:
        rows = 2 if "released" in variant else 33
        case = cases.build(op, variant, rows, torch.float32)
        for f, e in zip(outputs(TRITON[op], case), outputs(REFERENCE[op], case), strict=True):
            assert as_bytes(f).equal(as_bytes(e)), variant


def test_rope_of_position_0_keeps_signs_of_zero():
    x = torch.tensor([[0.0, -0.0, -0.0, 0.0, 1.0, -1.0]])
    turn = torch.tensor([1.0, 0.0]).expand(1, 3, 2)
    for inverse in (False, True):
        found = TRITON["rope"].function(x, turn, inverse)
        assert as_bytes(found).equal(as_bytes(REFERENCE["rope"].function(x, turn, inverse)))


def test_rope_of_an_odd_width():
    i = cases.Inputs(4, torch.float32)
    for width, pairs in ((7, 3), (7, 1), (9, 2), (6, 3)):
        x, turn = i.normal(5, 3, width), i.turn(5, pairs)
        for inverse in (False, True):
            found = TRITON["rope"].function(x, turn, inverse)
            assert found.equal(REFERENCE["rope"].function(x, turn, inverse))
        weight = i.wide(width)
        found = TRITON["norm_rope"].function(x, weight, 1e-6, turn)
        assert error(found, REFERENCE["norm_rope"].function(x, weight, 1e-6, turn)) < 1e-6


@computes_with_nan
def test_pooling_without_a_token_is_no_number():
    """Softmax over nothing: as in the reference; its neighbours are not touched."""
    i = cases.Inputs(4, torch.float32)
    rows = i.wide(6, 16)
    rows[3] = torch.nan
    rows[4, 8:] = -torch.inf
    tokens = torch.tensor([[0, 1], [-1, -1], [2, -1], [-1, 5], [3, 0], [4, 1], [4, 4]])
    found, expected = (
        k["pool_entries"].function(rows, tokens, None, False) for k in (TRITON, REFERENCE)
    )
    assert found.isnan().equal(expected.isnan())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@computes_with_nan
def test_gates_of_zeros_and_nan():
    """Zero counts as positive whatever its sign, and a row that is no number stays so."""
    streams = torch.tensor([[[0.0] * 4], [[-0.0] * 4], [[torch.nan, 1.0, 1.0, 1.0]]])
    key = torch.tensor([1.0, 2.0, -1.0, -2.0]).expand(3, 1, 4)
    for weight in (torch.ones(1, 4), -torch.ones(1, 4), torch.tensor([[1.0, 1.0, -1.0, -1.0]])):
        found, expected = (
            k["engram_gate"].function(streams, key, weight, 1e-6) for k in (TRITON, REFERENCE)
        )
        assert torch.allclose(found, expected, rtol=1e-6, equal_nan=True)
