"""All operator implementations. Register one by adding a line; conformance tests follow."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from headrace.ops import triton
from headrace.ops.cpu import decode, fixed_tile
from headrace.ops.reference import (
    attention,
    engram,
    head,
    hyper_connections,
    indexer,
    moe,
    norm,
    quant,
)
from headrace.ops.registry import Implementation
from headrace.ops.signatures import OPS

_MODULES = (norm, quant, hyper_connections, indexer, attention, moe, engram, head)

# References whose rows are computed one by one whatever the batch, given whole row tiles and one
# thread (see docs/decisions): no matrix product over the rows of the batch is involved.
_ROW_WISE = frozenset(
    {
        *("rms_norm", "rope", "norm_rope", "hadamard", "fake_fp8", "fake_fp4_ue8m0"),
        *("round_rows", "read_records", "read_majors", "write_records", "hc_collapse", "hc_merge"),
        *("pool_entries", "candidate_mask", "select_top_k"),
        *("ngram_rows", "engram_gate", "engram_add"),
    }
)

# Where that was tested; on a card by tests/gpu, and found on an H200.
_INVARIANT_ON = ("cpu", "cuda")

# The plain mixture of experts asks which experts were chosen.
_WAITING = frozenset({"moe"})


def _reference(op: str) -> Implementation:
    function = next(getattr(m, op) for m in _MODULES if hasattr(m, op))
    return Implementation(
        op,
        "reference",
        function,
        batch_invariant=op in _ROW_WISE,
        invariant_on=_INVARIANT_ON,
        priority=0,
        waits=op in _WAITING,
    )


def _fixed_tile(op: str) -> Implementation:
    return Implementation(
        op,
        "fixed_tile",
        getattr(fixed_tile, op),
        platforms=_INVARIANT_ON,
        batch_invariant=True,
        # Below the reference: chosen where batch invariance is asked for, or by name.
        priority=-1,
        why_lower="slower, only chosen for batch_invariant",
        tolerance={"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2},
        waits=op in _WAITING,
    )


# Rounding follows another order of additions; what is rounded to codes is equal, bit for bit.
_DECODE_TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
_EXACT = frozenset(
    {
        "fake_fp8",
        "fake_fp4_ue8m0",
        "round_rows",
        "read_records",
        "read_majors",
        "write_records",
        "ngram_rows",
    }
)
# Take weights that a checkpoint may quantise; NumPy and Numba have no use for codes.
_MULTIPLYING = frozenset({"linear", "grouped_projection", "moe"})


def _few_rows(op: str, name: str, module: ModuleType, priority: int) -> Implementation:
    return Implementation(
        op,
        name,
        getattr(module, op),
        platforms=("cpu",),
        dtypes=("float64", "float32"),
        priority=priority,
        tolerance=dict.fromkeys(_DECODE_TOLERANCE, 0.0) if op in _EXACT else _DECODE_TOLERANCE,
        numbers_only=op in _MULTIPLYING,
    )


def _few_rows_set(
    name: str, modules: tuple[ModuleType, ...], priority: int
) -> Iterator[Implementation]:
    return (
        _few_rows(op, name, module, priority)
        for module in modules
        for op in OPS
        if op in vars(module)
    )


def _triton(op: str) -> Implementation:
    return Implementation(
        op,
        "triton",
        triton.function(op),
        platforms=("cuda",),
        dtypes=("float32", "bfloat16"),
        # One way to add up, whatever the number of rows, but for those that have two.
        batch_invariant=op not in triton.BY_ROWS,
        invariant_on=("cuda",),
        priority=2,
        tolerance=dict.fromkeys(("float32", "bfloat16"), 0.0)
        if op in _EXACT
        else {"float32": 1e-5, "bfloat16": 2e-2},
        probe=triton.missing,
    )


def _triton_invariant(op: str) -> Implementation:
    return Implementation(
        op,
        "triton_invariant",
        triton.function(op, fixed_tile=True),
        platforms=("cuda",),
        dtypes=("float32", "bfloat16"),
        batch_invariant=True,
        invariant_on=("cuda",),
        priority=1,
        why_lower="slower, only chosen for batch_invariant",
        tolerance={"float32": 1e-5, "bfloat16": 2e-2},
        probe=triton.missing,
    )


def _compiled_modules() -> tuple[ModuleType, ...]:
    """Empty where Numba is not installed, does not fit this NumPy or cannot be loaded."""
    try:
        from headrace.ops.cpu import compiled
    except Exception:  # a broken installation raises anything: OSError of a library, AttributeError
        return ()
    return compiled.MODULES


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(_reference(op) for op in OPS),
    *(_fixed_tile(op) for op in OPS if op not in _ROW_WISE),
    *(_triton(op) for op in triton.MODULES),
    *(_triton_invariant(op) for op in triton.BY_ROWS),
    *_few_rows_set("decode", decode.MODULES, 1),
    *_few_rows_set("compiled", _compiled_modules(), 2),
)
