"""The compiled CPU operators: how they are chosen, and that no call compiles them again."""

from __future__ import annotations

import sys

import numba
import pytest
import torch

from headrace.ops import catalogue
from headrace.ops.cases import CASES, Inputs
from headrace.ops.cpu import compiled
from headrace.ops.cpu.compiled import kernel
from headrace.ops.numerics import Numerics
from headrace.ops.registry import explain

OPERATORS = [impl for impl in catalogue.IMPLEMENTATIONS if impl.name == "compiled"]


def kernels() -> list[object]:
    """Every compiled function of the package."""
    return [
        value
        for module in compiled.MODULES
        for value in vars(module).values()
        if isinstance(value, numba.core.dispatcher.Dispatcher)
    ]


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
            for build in CASES[impl.op].values():
                for rows in (1, 3, 17):
                    case = build(Inputs(1, dtype), rows)
                    impl.function(*case.args, **case.kwargs)
    for found in kernels():
        assert len(found.signatures) <= 2, found.py_func.__qualname__


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


def test_nowhere_to_keep_machine_code(monkeypatch):
    """In a read-only installation without a home folder every start compiles, and works."""

    def refuse(**options: object) -> object:
        raise RuntimeError("cannot cache function: no locator available")

    assert kernel._has_cache_folder() in (True, False)
    monkeypatch.setattr(numba, "njit", refuse)
    assert not kernel._has_cache_folder()
