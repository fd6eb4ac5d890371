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
from headrace.ops.triton import attention, records, tiles  # noqa: E402

# The interpreter's own, with NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

tl = triton.language
SPARSE = next(
    i for i in IMPLEMENTATIONS if (i.op, i.name) == ("sparse_attention", "triton_invariant")
)


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
        found = SPARSE.function(*case.args)
        assert found.equal(attention.sparse_attention(*case.args))
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
    several = {name: rows[:8] for name, rows in selections(96).items()}
    check_rows(SPARSE, case, several)


def test_more_places_without_a_key_change_nothing():
    case = cases.build("sparse_attention", "fp8", 5, torch.float32)
    q, window, index, view, major, minor, sink, scale = case.args
    none = torch.full((5, 100), -1)
    wider = torch.cat((major, none), 1), torch.cat((minor, none), 1)
    found = SPARSE.function(q, window, index, view, *wider, sink, scale)
    assert found.equal(SPARSE.function(*case.args))


def chosen(
    rows: int,
    heads: int,
    form: RecordFormat | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    width: int = 512,
    keys: int = 512,
    fixed: bool = False,
) -> attention.Choice:
    """Of a window of 128 and so many entries."""
    q = torch.empty((rows, heads, width), dtype=dtype, device="meta")
    window, places = torch.empty((rows, 128)), torch.empty((rows, keys))
    view = None if form is None else RecordView(torch.empty(0), form, width)
    return attention.choose(q, window, view, places, fixed)


@pytest.mark.parametrize("capability", list(tiles.CARDS))
def test_attention_is_chosen_by_rows_and_heads(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    card = tiles.for_capability(capability)
    monkeypatch.setattr(tiles, "of", lambda device: card)
    for form in (None, *RecordFormat):
        for heads in (1, 4, 8, 16, 24, 32, 64, 100, 128):
            alike = {chosen(rows, heads, form, fixed=True) for rows in (1, 6, 33, 4096)}
            assert len(alike) == 1
            assert alike.pop().parts == 1
            for rows in (1, 6, 33, 192, 4096):
                found = chosen(rows, heads, form)
                assert found.heads < 2 * max(heads, 16)  # none for heads that are not there
                assert not found.grouped or form is RecordFormat.FP4_E4M3_16
                shape = tiles.AttentionTile(*found[:4])
                assert shape in (card.attention, *card.attention_bf16)
                assert chosen(rows, heads, form, dtype=torch.float32)[:5] == (*card.attention, 1)
                assert chosen(rows, heads, form, width=576)[:4] == card.attention
        assert chosen(1, 8, form, keys=16).parts <= 128 // 16
        assert chosen(1, 8, form).parts > 1 == chosen(4096, 8, form).parts


def test_measured_choices_of_an_h200(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "of", lambda device: tiles.for_capability((9, 0)))
    form = RecordFormat.FP4_E4M3_16
    assert chosen(6, 64, form) == (16, 32, 2, 4, 8, True)
    for rows in (192, 768, 4096):
        assert chosen(rows, 64, form) == (64, 64, 2, 8, 1, True)
    assert chosen(6, 64, form, fixed=True) == (64, 64, 2, 8, 1, True)
