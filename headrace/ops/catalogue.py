"""All operator implementations. Register one by adding a line; conformance tests follow."""

from __future__ import annotations

from headrace.ops.cpu import fixed_tile
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
        *("rms_norm", "rope", "hadamard", "fake_fp8", "fake_fp4_ue8m0"),
        *("round_rows", "read_records", "write_records", "hc_collapse", "hc_merge"),
        *("pool_groups", "candidate_mask", "select_top_k", "route", "route_hashed"),
        *("ngram_rows", "engram_gate", "engram_add"),
    }
)


def _reference(op: str) -> Implementation:
    function = next(getattr(m, op) for m in _MODULES if hasattr(m, op))
    return Implementation(op, "reference", function, batch_invariant=op in _ROW_WISE, priority=0)


def _fixed_tile(op: str) -> Implementation:
    return Implementation(
        op,
        "fixed_tile",
        getattr(fixed_tile, op),
        platforms=("cpu",),
        batch_invariant=True,
        # Below the reference: chosen where batch invariance is asked for, or by name.
        priority=-1,
        why_lower="slower, only chosen for batch_invariant",
        tolerance={"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2},
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(_reference(op) for op in OPS),
    *(_fixed_tile(op) for op in OPS if op not in _ROW_WISE),
)
