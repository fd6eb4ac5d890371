"""The compiled CPU operators: how they are chosen, and that no call compiles them again."""

from __future__ import annotations

import sys

import numba
import pytest
import torch

from headrace.ops import catalogue
from headrace.ops.cases import CASES, Inputs
from headrace.ops.cpu.compiled import kernel, kernels
from headrace.ops.numerics import Numerics
from headrace.ops.registry import explain

OPERATORS = [impl for impl in catalogue.IMPLEMENTATIONS if impl.name == "compiled"]


def dispatchers() -> list[object]:
    """Every compiled function of the package."""
    found = [v for v in vars(kernels).values() if isinstance(v, numba.core.dispatcher.Dispatcher)]
    assert found
    return found


def test_preferred_where_numba_is_installed():
    chosen = {r.op: r.chosen.name for r in explain(catalogue.IMPLEMENTATIONS, "cpu", Numerics())}
    assert {op for op, name in chosen.items() if name == "compiled"} == {i.op for i in OPERATORS}


def test_numpy_set_stands_in_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "headrace.ops.cpu.compiled", None)
    monkeypatch.delattr("headrace.ops.cpu.compiled")
    assert catalogue._compiled_modules() == ()


def test_one_machine_code_per_dtype():
    """An array in another memory layout would compile a kernel again, within a request."""
    for dtype in (torch.float32, torch.float64):
        for impl in OPERATORS:
            for variant, build in CASES[impl.op].items():
                if variant.startswith("stored_"):  # only kept on a card
                    continue
                for rows in (1, 3, 17):
                    case = build(Inputs(1, dtype), rows)
                    impl.function(*case.args, **case.kwargs)
    for found in dispatchers():
        layouts = {
            tuple(kind for kind in signature if isinstance(kind, numba.types.Array))
            for signature in found.signatures
        }
        assert len(layouts) <= 2, found.py_func.__qualname__


@pytest.mark.parametrize("op", ["select_top_k", "router"])
def test_rows_of_nan_stay_within_bounds(op):
    """A request whose numbers are NaN fails alone: it must not index outside of anything."""
    impl = next(i for i in OPERATORS if i.op == op)
    case = CASES[op]["ties"](Inputs(1, torch.float32), 5)
    args = list(case.args)
    args[0] = args[0].clone()
    args[0][2] = torch.nan
    result = impl.function(*args, **case.kwargs)
    found = result[0] if isinstance(result, tuple) else result
    expected = impl.function(*case.args, **case.kwargs)
    expected = expected[0] if isinstance(expected, tuple) else expected
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])
    limit = args[0].shape[1] if op == "select_top_k" else args[1].shape[0]
    assert bool(((found >= -1) & (found < limit)).all())


def double(x: object) -> object:
    """Something to compile."""
    return x + x  # type: ignore[operator]


def test_nowhere_to_keep_machine_code(monkeypatch):
    """In a read-only installation without a home folder every start compiles, and works."""

    def refuse(self: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(numba.core.dispatcher.Dispatcher, "enable_caching", refuse)
    assert kernel.kernel(double)(2.0) == 4.0


def test_damaged_machine_code_is_compiled_again(monkeypatch):
    compiled_double = kernel.kernel(double)

    class Damaged:
        flushed = 0

        def load_overload(self, signature: object, context: object) -> object:
            raise EOFError("Ran out of input")

        def save_overload(self, signature: object, data: object) -> None:
            raise OSError("No space left on device")

        def flush(self) -> None:
            Damaged.flushed += 1

    compiled_double._cache = kernel._ForgivingCache(Damaged())
    assert compiled_double(2.0) == 4.0
    assert Damaged.flushed == 1


@pytest.mark.parametrize("error", [ImportError, OSError, AttributeError])
def test_numba_that_cannot_be_loaded(monkeypatch, error):
    """What a broken installation raises is not defined; the NumPy set stands in."""

    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "headrace.ops.cpu.compiled":
                raise error("libLLVM.so: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "headrace.ops.cpu.compiled")
    monkeypatch.delattr("headrace.ops.cpu.compiled")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert catalogue._compiled_modules() == ()


def test_no_entries_and_nothing_asked_for():
    by_name = {
        i.name: i.function
        for i in catalogue.IMPLEMENTATIONS
        if i.op == "select_top_k" and {"*", "cpu"}.intersection(i.platforms)
    }
    for scores, top_k in ((torch.zeros(2, 0), 3), (torch.zeros(2, 5), 0)):
        expected = by_name["reference"](scores, top_k)
        for function in by_name.values():
            assert torch.equal(function(scores, top_k), expected)
