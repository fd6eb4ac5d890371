"""Triton operators in Triton's interpreter, without a GPU: run it with TRITON_INTERPRET=1.

On a card tests/gpu/test_gpu_operators.py runs the compiled kernels on every case, bf16
too, which the interpreter cannot multiply.
"""

from __future__ import annotations

import pytest
import torch

from headrace.core.kv import RecordFormat
from headrace.ops import cases
from headrace.ops.records import RecordView
from headrace.ops.reference import attention as reference
from headrace.ops.reference.quant import read_records
from tests.conformance.test_operators import check_rows, error, selections

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from headrace.ops.catalogue import IMPLEMENTATIONS  # noqa: E402
from headrace.ops.triton import attention, records  # noqa: E402

# The interpreter's own, with NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

tl = triton.language
SPARSE = next(i for i in IMPLEMENTATIONS if (i.op, i.name) == ("sparse_attention", "triton"))


@triton.jit
def _decode(codes, values, KIND: tl.constexpr):
    place = tl.arange(0, 256)
    code = tl.load(codes + place).to(tl.int32)
    if KIND == 0:
        value = records.e4m3_to_float(code)
    elif KIND == 1:
        value = records.e2m1_to_float(code & 15)
    else:
        value = records.ue8m0_to_float(code)
    tl.store(values + place, value)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_every_code_is_decoded_exactly(kind: int):
    codes = torch.arange(256).to(torch.uint8)
    values = torch.full((256,), -1.0)
    _decode[(1,)](codes, values, KIND=kind)
    if kind == 0:
        expected = codes.view(torch.float8_e4m3fn).float()
    elif kind == 1:
        # A record of two numbers, whose scales of 16 are 1.0.
        packed = torch.cat((codes[:, None].expand(-1, 8), codes[:, None] * 0 + 0x38), dim=1)
        view = RecordView(packed.unsqueeze(1), RecordFormat.FP4_E4M3_16, 16, 0)
        place = torch.arange(256)
        expected = read_records(view, place, place * 0, torch.float32)[:, 0]
    else:
        expected = codes.view(torch.float8_e8m0fnu).float()
    same = (values == expected) | (values.isnan() & expected.isnan())
    assert same.all(), codes[~same]
    signs = ~expected.isnan()
    assert torch.signbit(values)[signs].equal(torch.signbit(expected)[signs])


@pytest.mark.parametrize("variant", list(cases.CASES["sparse_attention"]))
def test_sparse_attention(variant: str):
    for rows in (2,) if "released" in variant else (0, 1, 3, 33):
        case = cases.build("sparse_attention", variant, rows, torch.float32)
        found = attention.sparse_attention(*case.args)
        expected = reference.sparse_attention(*case.args)
        assert found.dtype == expected.dtype
        assert error(found, expected) <= SPARSE.tolerance["float32"]


@pytest.mark.parametrize("variant", list(cases.CASES["sparse_attention"]))
@pytest.mark.parametrize(
    "choice",
    [
        attention.Choice(64, 16, 1, 4, parts=1, grouped=True),
        attention.Choice(16, 32, 1, 4, parts=3, grouped=True),
        attention.Choice(16, 16, 1, 4, parts=5),
    ],
    ids=str,
)
def test_every_tile_choice_agrees_with_reference(variant: str, choice: attention.Choice):
    """More parts than tiles, too; the sink counts once."""
    case = cases.build("sparse_attention", variant, 3, torch.float32)
    if case.args[3] is not None and case.args[3].format in attention._OTHERS:
        pytest.skip("index keys go to the reference")
    found = attention.attend(*case.args, choice)
    assert error(found, reference.sparse_attention(*case.args)) <= SPARSE.tolerance["float32"]


def test_rows_do_not_see_each_other():
    case = cases.build("sparse_attention", "fp4", 96, torch.float32)
    chosen = {name: rows[:8] for name, rows in selections(96).items()}
    check_rows(SPARSE, case, chosen)


def test_more_places_without_a_key_change_nothing():
    case = cases.build("sparse_attention", "fp8", 5, torch.float32)
    q, window, index, view, major, minor, sink, scale = case.args
    none = torch.full((5, 100), -1)
    wider = torch.cat((major, none), 1), torch.cat((minor, none), 1)
    found = attention.sparse_attention(q, window, index, view, *wider, sink, scale)
    assert found.equal(attention.sparse_attention(*case.args))
