"""Hyper-connections in Triton's interpreter: run it with TRITON_INTERPRET=1, see test_triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.ops import cases
from headrace.ops.reference import hyper_connections as reference
from tests.conformance.test_operators import check_rows, error, result_dtype, selections

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from headrace.ops.catalogue import IMPLEMENTATIONS  # noqa: E402
from headrace.ops.triton import hyper_connections  # noqa: E402

# The interpreter's own, with NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

OPS = ("hc_enter", "hc_head", "hc_collapse", "hc_merge")
# Which argument is multiplied with the streams.
FN = {"hc_enter": 2, "hc_head": 1}
TRITON = {i.op: i for i in IMPLEMENTATIONS if i.name == "triton"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def results(module, op: str, args, kwargs):
    found = getattr(module, op)(*args, **kwargs)
    return found if isinstance(found, tuple) else (found,)


def check(op: str, dtype: str, args, kwargs) -> None:
    found = results(hyper_connections, op, args, kwargs)
    expected = results(reference, op, args, kwargs)
    for number, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert f.dtype == e.dtype == result_dtype(op, dtype, number)
        assert error(f, e) <= TRITON[op].tolerance[dtype], f"result {number}, {len(f)} rows"


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("op", "variant"), [(op, v) for op in OPS for v in cases.CASES[op]])
def test_agrees_with_reference(op: str, variant: str, dtype: str):
    for rows in (2,) if variant == "released" else (0, 1, 3, 33):
        case = cases.build(op, variant, rows, DTYPES[dtype])
        check(op, dtype, case.args, case.kwargs)


@pytest.mark.parametrize("op", OPS)
def test_rows_do_not_see_each_other(op: str):
    case = cases.build(op, "tiny", 96, torch.bfloat16)
    if op in FN:
        # NumPy adds up products in an order that depends on the row's place; sums of eighths are
        # exact in any order.
        args = list(case.args)
        for place in (0, FN[op]):
            args[place] = (args[place] * 8).round().clamp(-7, 7) / 8
        case = replace(case, args=tuple(args))
    chosen = {name: rows[:8] for name, rows in selections(96).items()}
    check_rows(TRITON[op], case, chosen | {"one": torch.tensor([95])})


@pytest.mark.parametrize("hc", [1, 3, 8])
def test_any_number_of_streams(hc: int):
    """Lanes behind an odd number of streams must not leak, not even with an eps of 0."""
    i = cases.Inputs(hc, torch.float32)
    count, hidden = (2 + hc) * hc, 36
    streams, fn = i.normal(5, hc, hidden), i.wide(count, hc * hidden, scale=0.1)
    weights = fn, i.wide(count), i.wide(count), i.wide(hidden)
    options = {"rms_eps": 1e-6, "hc_eps": 0.0, "iterations": 20}
    for pre in (None, i.wide(5, hc)):
        check("hc_enter", "float32", (streams, pre, *weights), options)
    check("hc_collapse", "float32", (streams, i.wide(5, hc)), {})
    check(
        "hc_merge", "float32", (i.normal(5, hidden), streams, i.wide(5, hc), i.wide(5, hc, hc)), {}
    )
    for scale in (i.wide(1), i.wide(hc)):
        check("hc_head", "float32", (streams, fn[:hc], i.wide(hc), scale, 1e-6, 1e-6), {})


def test_inputs_may_lie_anywhere():
    """Strided streams, as an expanded embedding, and coefficients that are slices."""
    i = cases.Inputs(7, torch.float32)
    y = i.normal(3, 80)[:, 8:40]
    streams = y.unsqueeze(1).expand(-1, 4, -1)
    mixes = i.wide(3, 24)
    pre, post, comb = mixes[:, :4], mixes[:, 4:8], mixes[:, 8:].unflatten(1, (4, 4)).mT
    fn = i.wide(128, 24).T
    weights = fn, i.wide(48)[::2], i.wide(48)[::2], i.wide(32)
    options = {"rms_eps": 1e-6, "hc_eps": 1e-6, "iterations": 3}
    check("hc_enter", "float32", (streams, pre, *weights), options)
    check("hc_head", "float32", (streams, fn[:4], i.wide(8)[::2], i.wide(1), 1e-6, 1e-6), {})
    check("hc_collapse", "float32", (streams, pre), {})
    check("hc_merge", "float32", (y, streams, post, comb), {})


@triton.jit
def _split(numbers, pieces):
    place = triton.language.arange(0, 1024)
    f = triton.language.load(numbers + place)
    first = hyper_connections._leading(f)
    second = hyper_connections._leading(f - first)
    triton.language.store(pieces + place, first)
    triton.language.store(pieces + 1024 + place, second)
    triton.language.store(pieces + 2048 + place, f - first - second)


def test_pieces_of_a_weight_are_exact_in_tf32():
    """TF32 has ten bits behind the point; the interpreter's products would hide a loss."""
    numbers = cases.Inputs(11, torch.float32).wide(1024)
    pieces = torch.empty((3, 1024))
    _split[(1,)](numbers, pieces)
    assert (pieces.view(torch.int32) & 0x1FFF).count_nonzero() == 0
    assert pieces.double().sum(0).equal(numbers.double())


def test_bf16_streams_lose_nothing_of_the_weights():
    """The coefficients are as near to fp64 as those of fp32 streams with the same numbers."""
    case = cases.build("hc_enter", "tiny", 33, torch.bfloat16)
    found = hyper_connections.hc_enter(*case.args, **case.kwargs)
    wide = tuple(a.double() for a in case.args)
    expected = reference.hc_enter(*wide, **case.kwargs)
    for f, e in zip(found[1:], expected[1:], strict=True):
        assert error(f, e) <= 1e-6
