"""Triton operators that multiply by weights, in Triton's interpreter; see `test_triton`."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import InternalError
from headrace.ops import cases
from headrace.ops.reference.quant import fake_fp8
from headrace.ops.stored_weights import StoredWeight, WeightFormat, dense
from headrace.ops.weight_cases import KINDS, stored_weight
from tests.conformance.test_operators import REFERENCE, check_rows, error, outputs, selections

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from headrace.ops.catalogue import IMPLEMENTATIONS  # noqa: E402
from headrace.ops.triton import moe, products, weights  # noqa: E402

# The interpreter's own, with NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

OPS = ("linear", "grouped_projection", "logits", "moe", "router")
OURS = [i for i in IMPLEMENTATIONS if i.op in OPS and i.name.startswith("triton")]
TABLE = [
    pytest.param(impl, variant, id=f"{impl.op}-{impl.name}-{variant}")
    for impl in OURS
    for variant in cases.CASES[impl.op]
]


@pytest.mark.parametrize(("impl", "variant"), TABLE)
def test_agrees_with_reference(impl, variant: str):
    # A fixed tile is the same kernel with other constants.
    several = (0, 1, 35) if impl.name == "triton" else (35,)
    for rows in (2,) if "released" in variant else several:
        case = cases.build(impl.op, variant, rows, torch.float32)
        for found, expected in zip(
            outputs(impl, case), outputs(REFERENCE[impl.op], case), strict=True
        ):
            assert found.dtype == expected.dtype
            assert error(found, expected) <= impl.tolerance["float32"]


@pytest.mark.parametrize(
    ("impl", "variant"), [p for p in TABLE if p.values[0].name == "triton_invariant"]
)
def test_rows_do_not_see_each_other(impl, variant: str):
    """Nor does their number matter: one row alone has its bits among 96."""
    if "released" in variant:
        pytest.skip("slow in the interpreter, and no other code than the small sizes")
    case = cases.build(impl.op, variant, 96, torch.float32)
    chosen = {name: rows[:40] for name, rows in selections(96).items()}
    check_rows(impl, case, {**chosen, "one": torch.tensor([57])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", list(KINDS))
def test_numbers_are_those_of_the_reference(kind: str, dtype: torch.dtype):
    stored = stored_weight(cases.Inputs(5, dtype), kind, 75, 640)
    assert products.numbers(stored, dtype).equal(dense(stored, dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", list(WeightFormat))
def test_every_code_with_every_scale(kind: WeightFormat, dtype: torch.dtype):
    """Also NaN, numbers too large, and fp32 numbers below the normal ones, which the interpreter
    gets wrong in bf16."""
    columns = 256 if kind is WeightFormat.FP8 else 512
    codes = torch.arange(256).to(torch.uint8).expand(256, -1).contiguous()
    scales = torch.arange(256).to(torch.uint8)[:, None].expand(-1, columns // 32).contiguous()
    stored = StoredWeight(codes, scales, kind, (1, 32))
    found, expected = products.numbers(stored, dtype), dense(stored, dtype)
    assert found.isnan().equal(expected.isnan())
    known = ~expected.isnan()
    if dtype == torch.bfloat16:
        exact = dense(stored, torch.float32)
        known &= (exact == 0) | (exact.abs() >= torch.finfo(dtype).tiny)
    assert found[known].equal(expected[known])
    assert torch.signbit(found)[known].equal(torch.signbit(expected)[known])


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("op", ["moe", "router"])
def test_a_row_of_nan_stays_alone(op: str):
    """A request whose numbers are NaN fails, and nobody else; experts exist."""
    variant = "stored_act_fp8" if op == "moe" else "ties"
    impl = next(i for i in OURS if (i.op, i.name) == (op, "triton"))
    case = cases.build(op, variant, 5, torch.float32)
    expected = outputs(impl, case)
    case.args[0][2] = torch.nan
    for found, other in zip(outputs(impl, case), expected, strict=True):
        rows = [0, 1, 3, 4]
        assert found[rows].equal(other[rows])
        if found.is_floating_point():
            assert found[2].isnan().all()
        else:
            assert ((found >= 0) & (found < case.args[1].shape[0])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [32, 96, 128])
def test_activations_are_rounded_to_the_same_bits(group: int, dtype: torch.dtype):
    i = cases.Inputs(7, dtype)
    x = torch.cat((i.normal(40, 384), i.edges(40, 384), i.normal(3, 384, scale=1e-6)))
    found, expected = moe._rounded(x, group), fake_fp8(x, group)
    assert found.equal(expected)
    assert torch.signbit(found).equal(torch.signbit(expected))
    assert moe._rounded(x, 0) is x


@pytest.mark.parametrize(("rows", "experts"), [(1, 3), (40, 5), (700, 9)])
def test_places_are_sorted_by_expert_and_padded(rows: int, experts: int):
    """Each expert's places ascend; two experts are chosen by nobody, some places have none."""
    chosen = cases.Inputs(8, torch.float32).integers(-1, experts, rows, 3)
    chosen = torch.where((chosen == 0) | (chosen == experts - 2), -1, chosen)
    tables = moe._sorted_places(chosen, experts, 16)
    owners, places = tables.owners.tolist(), tables.places.view(-1, 16).tolist()
    flat = chosen.flatten().tolist()
    expected: list[tuple[int, list[int]]] = []
    for expert in range(experts):
        own = [place for place, e in enumerate(flat) if e == expert]
        cut = [own[start : start + 16] for start in range(0, len(own), 16)]
        expected += [(expert, part + [-1] * (16 - len(part))) for part in cut]
    used = len(expected)
    assert list(zip(owners, places, strict=True))[:used] == expected
    assert owners[used:] == [-1] * (tables.tiles - used)


def test_every_place_may_choose_another_expert():
    """As many tiles as there can be."""
    chosen = torch.arange(12).view(4, 3)
    tables = moe._sorted_places(chosen, 12, 16)
    assert tables.owners.tolist() == list(range(12))
    full = moe._sorted_places(torch.zeros((16, 3), dtype=torch.int64), 1, 16)
    assert full.owners.tolist() == [0, 0, 0, -1]


def test_long_prompts_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch):
    case = cases.build("moe", "stored_fp4", 7, torch.float32)
    whole = moe.moe(*case.args, fixed_tile=True)
    monkeypatch.setattr(moe, "MAX_ROWS", 3)
    assert moe.moe(*case.args, fixed_tile=True).equal(whole)


def test_halves_that_cut_a_block_are_refused():
    case = cases.build("moe", "stored_fp8", 3, torch.float32)
    args = list(case.args)
    args[3] = stored_weight(cases.Inputs(9, torch.float32), "fp8", 5, 96, 96)
    with pytest.raises(InternalError, match="cut a block of 32"):
        moe.moe(*args)


def test_many_rows_are_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "DENSE_ROWS", 3)
    monkeypatch.delattr(products, "_multiply")
    for op in ("linear", "grouped_projection"):
        case = cases.build(op, "stored_fp8", 3, torch.float32)
        expected = outputs(REFERENCE[op], case)[0]
        assert error(getattr(products, op)(*case.args), expected) <= 1e-6


def test_few_rows_of_few_outputs_are_cut_into_parts():
    counts = [
        products.part_count(programs, tiles)
        for programs, tiles in ((20, 40), (20, 3), (100, 40), (300, 40), (1, 1000))
    ]
    assert counts == [8, 1, 4, 1, 8]


def test_weights_are_taken_as_they_lie():
    stored = stored_weight(cases.Inputs(6, torch.float32), "fp8", 3, 64, 96)
    w = weights.layout(stored.rows(32, 64)[1])
    assert w.codes.data_ptr() == stored.codes[1, 32:].data_ptr()
    assert w.scales.data_ptr() == stored.scales[1, 1:].data_ptr()


@pytest.mark.parametrize("variant", [v for v in cases.CASES["moe"] if "released" not in v])
def test_sums_of_experts_may_be_cut_into_parts(variant: str, monkeypatch: pytest.MonkeyPatch):
    choose = products.choose_tile
    monkeypatch.setattr(moe, "choose_tile", lambda *a: choose(*a)._replace(parts=3))
    case = cases.build("moe", variant, 35, torch.float32)
    expected = REFERENCE["moe"].function(*case.args, **case.kwargs)
    assert error(moe.moe(*case.args, **case.kwargs), expected) <= 1e-5
