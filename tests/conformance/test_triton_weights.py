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
from headrace.ops.triton import moe, product_tiles, products, tiles, weights  # noqa: E402

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
        product_tiles.part_count(programs, tiles, 264)
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
    one, two = product_tiles.shared_tile, product_tiles.routed_tiles
    monkeypatch.setattr(moe, "shared_tile", lambda *a: one(*a)._replace(parts=3))
    monkeypatch.setattr(moe, "routed_tiles", lambda *a: [t._replace(parts=3) for t in two(*a)])
    case = cases.build("moe", variant, 35, torch.float32)
    expected = REFERENCE["moe"].function(*case.args, **case.kwargs)
    assert error(moe.moe(*case.args, **case.kwargs), expected) <= 1e-5


def stored(form: WeightFormat, outputs: int, columns: int, block: tuple[int, int]) -> StoredWeight:
    """Codes of one matrix that nothing reads."""
    codes = torch.empty((outputs, columns // (2 if form is WeightFormat.FP4 else 1)))
    scales = torch.empty((outputs // block[0] + 1, columns // block[1] + 1))
    return StoredWeight(codes.to(torch.uint8), scales.to(torch.uint8), form, block)


def test_words_are_read_only_where_a_weight_allows_it():
    """Whole 128 columns, blocks of 32 or 128, rows that begin at words."""
    fp8, fp4 = WeightFormat.FP8, WeightFormat.FP4
    for form, columns, block, fits in (
        (fp8, 256, (128, 128), True),
        (fp8, 256, (1, 32), True),
        (fp4, 128, (1, 32), True),
        (fp8, 256, (64, 64), False),
        (fp8, 256, (8, 256), False),
        (fp8, 192, (32, 32), False),
        (fp4, 96, (1, 32), False),
    ):
        assert weights.in_words(stored(form, 48, columns, block)) is fits
    whole = stored(fp8, 48, 256, (128, 128))
    apart = torch.empty((48, 258), dtype=torch.uint8)
    assert not weights.in_words(StoredWeight(apart[:, :256], whole.scales, fp8, whole.block))
    later = torch.empty(48 * 256 + 1, dtype=torch.uint8)[1:].view(48, 256)
    assert not weights.in_words(StoredWeight(later, whole.scales, fp8, whole.block))
    assert not weights.in_words(torch.empty((48, 256)))


CARDS = [pytest.param(card, id=str(capability)) for capability, card in tiles.CARDS.items()]


@pytest.mark.parametrize("card", CARDS)
def test_tiles_fit_their_weights_and_cards(card: tiles.Tiles, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "of", lambda device: card)
    kinds = [
        stored(WeightFormat.FP8, 64, columns, block)
        for columns in (96, 128, 384, 512, 2304)
        for block in ((128, 128), (32, 32), (64, 64))
    ]
    kinds += [stored(WeightFormat.FP4, 64, columns, (1, 32)) for columns in (96, 128, 384, 512)]
    kinds += [torch.empty((64, 384), dtype=torch.bfloat16)]
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 16, 17, 33, 65, 256, 257, 5000):
            x = torch.empty((rows, 2), dtype=dtype)
            for fixed in (True, False):
                for first in kinds:
                    compute = weights.compute_dtype(dtype)
                    found = [product_tiles.product_tile(first, 1, x, compute, fixed)]
                    found += [product_tiles.shared_tile(first, x, fixed)]
                    for tile in found:
                        check_tile(tile, first, dtype, card)
                    for second in kinds:
                        pair = product_tiles.routed_tiles(first, second, rows, x, fixed)
                        assert pair[0].rows == pair[1].rows
                        for tile, weight in zip(pair, (first, second), strict=True):
                            check_tile(tile, weight, dtype, card)


def check_tile(
    tile: products.Tile, weight: weights.Weight, dtype: torch.dtype, card: tiles.Tiles
) -> None:
    if tile.packed == 2:
        assert dtype == torch.bfloat16
        assert weights.in_words(weight)
        assert weight.shape[-1] % tile.depth == 0
        assert tile.rows <= 64 or card.shared_bytes > product_tiles._LARGE_CARD
    assert all(n.bit_count() == 1 for n in (tile.rows, tile.outputs, tile.depth, tile.warps))


def test_a_tile_of_all_row_counts_is_the_same_for_all():
    for weight in (
        stored(WeightFormat.FP8, 64, 512, (128, 128)),
        stored(WeightFormat.FP4, 64, 512, (1, 32)),
        torch.empty((64, 512), dtype=torch.bfloat16),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            found = set()
            for rows in (1, 16, 40, 300, 5000):
                x, compute = torch.empty((rows, 2), dtype=dtype), weights.compute_dtype(dtype)
                found.add(
                    (
                        product_tiles.product_tile(weight, 1, x, compute, True),
                        product_tiles.shared_tile(weight, x, True),
                        *product_tiles.routed_tiles(weight, weight, rows, x, True),
                    )
                )
            assert len(found) == 1
            assert found.pop()[1].parts in (0, 1)


def test_measured_tiles_of_an_h200(monkeypatch: pytest.MonkeyPatch):
    """Eight experts' rows: see docs/perf-log.md."""
    monkeypatch.setattr(tiles, "of", lambda device: tiles.for_capability((9, 0)))
    fp4, fp8 = (
        stored(WeightFormat.FP4, 4608, 5120, (1, 32)),
        stored(WeightFormat.FP8, 4608, 5120, (128, 128)),
    )
    x = torch.empty((6, 5120), dtype=torch.bfloat16)
    assert product_tiles.routed_tiles(fp4, fp4, 1, x, False) == (
        (16, 64, 256, 4, 3, 1, 2, 264),
        (16, 128, 128, 4, 3, 1, 2, 264),
    )
    assert product_tiles.routed_tiles(fp4, fp4, 96, x, False)[0][:3] == (128, 128, 128)
    assert product_tiles.shared_tile(fp8, x, False)[:7] == (16, 64, 128, 4, 3, 8, 2)
