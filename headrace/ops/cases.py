"""Input cases per operator: what every implementation is compared with the reference on.

`CASES[op][variant]` builds the arguments of one call for a number of batch rows and a dtype, from a
seed of its own, so that a case is the same wherever it is built. Variants cover tiny and released
sizes, odd widths, missing keys (-1), -inf scores, ties and experts nobody chose. Used by
tests/conformance for each implementation of the catalogue, also for kernels on other devices.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from headrace.ops import index_cases
from headrace.ops.case_inputs import Builder as Builder
from headrace.ops.case_inputs import Case as Case
from headrace.ops.case_inputs import Inputs as Inputs
from headrace.ops.case_views import RECORDS
from headrace.ops.case_views import record_view as record_view
from headrace.ops.case_views import written_view as written_view
from headrace.ops.weight_cases import WEIGHT_CASES

# 0 rows occur: a step that completes no compressed entry, or wants no logits.
ROWS = (0, 1, 2, 3, 7, 31, 33, 64, 100)
# Released sizes are slower; these row counts lie on both sides of a 32-row tile.
RELEASED_ROWS = (1, 33, 64)


# --- norm and linear ---------------------------------------------------------------------------


def _rms_norm(width: int, weight: bool, *inner: int, scale: float = 1.0) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        # Norm weights stay in the dtype of the checkpoint.
        w = i.wide(width).to(torch.bfloat16) if weight else None
        return Case((i.normal(rows, *inner, width, scale=scale), w, 1e-20), (0,))

    return build


def _strided_rms_norm(i: Inputs, rows: int) -> Case:
    return Case((i.normal(rows, 96)[:, 32:], i.normal(64), 1e-6), (0,))


def _linear(inputs: int, outputs: int, *inner: int) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        return Case((i.normal(rows, *inner, inputs), i.weight(outputs, inputs)), (0,))

    return build


def _rope(shape: tuple[int, ...], pairs: int, inverse: bool) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        return Case((i.normal(rows, *shape), i.turn(rows, pairs), inverse), (0, 1))

    return build


def _norm_rope(shape: tuple[int, ...], pairs: int, weight: bool) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        w = i.wide(shape[-1]) if weight else None
        return Case((i.normal(rows, *shape), w, 1e-20, i.turn(rows, pairs)), (0, 3))

    return build


def _one_input(*shape: int, edges: bool = False, extra: tuple[Any, ...] = ()) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        x = i.edges(rows, *shape) if edges else i.normal(rows, *shape)
        return Case((x, *extra), (0,))

    return build


# --- cache rows --------------------------------------------------------------------------------


def _round_rows(name: str) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        view = record_view(i, name, 2, 3)
        x = torch.cat((i.normal(rows, view.width), i.edges(rows, view.width)))
        return Case((x, view), (0,))

    return build


def _read_records(name: str) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        view = written_view(i, name, 5, 6)
        major, minor = i.integers(0, 4, rows, 3), i.integers(0, 6, rows, 3)
        return Case((view, major, minor, i.dtype), (1, 2))

    return build


def _read_majors(name: str) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        view = written_view(i, name, 5, 6)
        return Case((view, i.integers(0, 4, rows, 2), i.dtype), (1,))

    return build


def _write_records(name: str) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        minors = 7
        majors = rows // minors + 2
        view = record_view(i, name, majors, minors)
        place = i.distinct(1, rows, majors * minors)[0]
        x = i.normal(rows, view.width)
        x[1::2] = i.edges(rows, view.width)[1::2]
        return Case((view, place // minors, place % minors, x), (1, 2, 3), in_place=0)

    return build


# --- hyper-connections -------------------------------------------------------------------------


def _hc_enter(hc: int, hidden: int, iterations: int = 20, shifted: bool = True) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        count = (2 + hc) * hc
        fn = i.wide(count, hc * hidden, scale=(hc * hidden) ** -0.5)
        pre = i.wide(rows, hc) if shifted else None
        weights = (fn, i.wide(count), i.wide(count), i.wide(hidden))
        options = {"rms_eps": 1e-20, "hc_eps": 1e-6, "iterations": iterations}
        batch_rows = (0, 1) if shifted else (0,)
        return Case((i.normal(rows, hc, hidden), pre, *weights), batch_rows, options)

    return build


def _hc_head(hc: int, hidden: int) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        fn = i.wide(hc, hc * hidden, scale=(hc * hidden) ** -0.5)
        return Case((i.normal(rows, hc, hidden), fn, i.wide(hc), i.wide(1), 1e-6, 1e-6), (0,))

    return build


def _hc_collapse(hc: int, hidden: int) -> Builder:
    return lambda i, rows: Case((i.normal(rows, hc, hidden), i.wide(rows, hc)), (0, 1))


def _hc_merge(hc: int, hidden: int) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        y, streams = i.normal(rows, hidden), i.normal(rows, hc, hidden)
        return Case((y, streams, i.wide(rows, hc), i.wide(rows, hc, hc)), (0, 1, 2, 3))

    return build


# --- compressor and indexer --------------------------------------------------------------------


def _pool_entries(
    size: int, channels: int, *, overlap: bool = False, with_ape: bool = True
) -> Builder:
    """Groups of `size` tokens out of a few rows; the first entries pool an incomplete history."""

    def build(i: Inputs, rows: int) -> Case:
        data = i.wide(40, 2 * channels, scale=3.0)
        data[-1] = torch.nan
        tokens = i.integers(0, 39, rows, size)
        if overlap:  # the first group of a sequence has no group before it
            tokens[: rows // 2, : size // 2] = -1
        ratio = size // 2 if overlap else size
        ape = i.wide(ratio, channels) if with_ape else None
        return Case((data, tokens, ape, overlap), (1,))

    return build


# --- attention ---------------------------------------------------------------------------------


def _attention(record: str | None, heads: int, width: int, window: int, top_k: int) -> Builder:
    """Row 0 has no key at all; unused window and cache rows are NaN."""

    def build(i: Inputs, rows: int) -> Case:
        keys = i.normal(rows + window + 1, width)
        keys[-1] = torch.nan
        index = torch.arange(rows).unsqueeze(-1) + torch.arange(window)
        index[i.integers(0, 3, rows, window) == 0] = -1
        index[:1] = -1
        view = None if record is None else written_view(i, record, 5, 16)
        place = i.distinct(rows, top_k if view is not None else 0, 64)
        absent = i.integers(0, 4, *place.shape) == 0
        absent[:1] = True
        major = (place // 16).masked_fill(absent, -1)
        minor = (place % 16).masked_fill(absent, -1)
        sink, scale = i.wide(heads, scale=2.0), width**-0.5
        q = i.normal(rows, heads, width, scale=2.0)
        return Case((q, keys, index, view, major, minor, sink, scale), (0, 2, 4, 5))

    return build


def _grouped_projection(heads: int, width: int, groups: int, rank: int) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        weight = i.weight(groups * rank, heads * width // groups)
        return Case((i.normal(rows, heads, width), weight, groups), (0,))

    return build


# --- mixture of experts ------------------------------------------------------------------------


def _router(
    hidden: int,
    experts: int,
    top_k: int,
    *,
    scale: float = 1.0,
    ties: bool = False,
    hashed: bool = False,
    normalise: bool = True,
) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        gate = i.wide(experts, hidden, scale=hidden**-0.5)
        if ties:  # experts in pairs: equal scores, equal bias
            gate = gate[: experts // 2].repeat_interleave(2, dim=0)
        bias = None if hashed else i.wide(experts // 2).repeat_interleave(2)
        chosen = i.distinct(rows, top_k, experts) if hashed else None
        x = i.normal(rows, hidden, scale=scale)
        args = (x, gate, bias, chosen, top_k, normalise, 1.5)
        return Case(args, (0, 3) if hashed else (0,))

    return build


def _moe(
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    *,
    limit: float = 10.0,
    act_group: int = 0,
    chosen: str = "all",
) -> Builder:
    """chosen: "all" experts, "few" (half of them by no row), or "none" in some places (-1)."""

    def build(i: Inputs, rows: int) -> Case:
        pick = i.distinct(rows, top_k, experts // 2 if chosen == "few" else experts)
        if chosen == "none":
            pick = pick.masked_fill(i.integers(0, 3, rows, top_k) == 0, -1)
        weights = i.wide(rows, top_k).abs()
        routed = i.weight(experts, 2 * inner, hidden), i.weight(experts, hidden, inner)
        shared = i.weight(2 * inner, hidden), i.weight(hidden, inner)
        x = i.normal(rows, hidden)
        return Case((x, pick, weights, *routed, *shared, limit, act_group), (0, 1, 2))

    return build


# --- engram and head ---------------------------------------------------------------------------


def _ngram_rows(ngram: int, vocabulary: int, primes: tuple[int, ...]) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        bound = (2**63 - 1) // vocabulary // 2
        multipliers = i.integers(0, bound, ngram) * 2 + 1
        p = torch.tensor(primes).view(ngram - 1, -1)
        offsets = (p.flatten().cumsum(0) - p.flatten()).view_as(p)
        return Case((i.integers(0, vocabulary, rows, ngram), multipliers, p, offsets), (0,))

    return build


def _engram_gate(hc: int, hidden: int) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        # Keys come as a slice of a wider projection.
        kv = i.normal(rows, (hc + 1) * hidden)
        key = kv[:, : hc * hidden].unflatten(-1, (hc, hidden))
        streams = i.normal(rows, hc, hidden)
        streams[: rows // 4] = 0.0  # dot = 0
        return Case((streams, key, i.wide(hc, hidden), 1e-20), (0, 1))

    return build


def _engram_add(hc: int, hidden: int) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        gate = torch.sigmoid(i.wide(rows, hc))
        return Case((i.normal(rows, hc, hidden), gate, i.normal(rows, hidden)), (0, 1, 2))

    return build


_CASES: dict[str, dict[str, Builder]] = {
    "rms_norm": {
        "tiny": _rms_norm(32, True),
        "odd": _rms_norm(5, True),
        "heads_without_weight": _rms_norm(64, False, 4),
        "small_numbers": _rms_norm(64, True, scale=1e-12),
        "strided": _strided_rms_norm,
        "released": _rms_norm(5120, True),
    },
    "linear": {
        "tiny": _linear(16, 24),
        "odd": _linear(7, 5),
        "inner_dims": _linear(16, 24, 3),
        "released": _linear(1280, 512),
    },
    "rope": {
        "heads": _rope((2, 32), 8, False),
        "inverse": _rope((2, 32), 8, True),
        "all_dims": _rope((32,), 16, False),
        "released": _rope((4, 512), 32, False),
        "released_index": _rope((128,), 32, False),
    },
    "norm_rope": {
        "heads": _norm_rope((2, 32), 8, False),
        "key": _norm_rope((32,), 16, True),
        "released": _norm_rope((512,), 32, True),
    },
    "hadamard": {
        "pair": _one_input(2),
        "tiny": _one_input(2, 32),
        "released": _one_input(4, 128),
    },
    "fake_fp8": {
        "tiny": _one_input(32, extra=(32,)),
        "edges": _one_input(96, edges=True, extra=(32,)),
        "group_128": _one_input(256, extra=(128,)),
        "released": _one_input(1280, extra=(32,)),
    },
    "fake_fp4_ue8m0": {
        "tiny": _one_input(32),
        "edges": _one_input(2, 64, edges=True),
        "released": _one_input(32, 128),
    },
    "round_rows": {name: _round_rows(name) for name in RECORDS},
    "read_records": {name: _read_records(name) for name in RECORDS},
    "read_majors": {name: _read_majors(name) for name in RECORDS},
    "write_records": {name: _write_records(name) for name in RECORDS},
    "hc_enter": {
        "tiny": _hc_enter(4, 32),
        "own_pre": _hc_enter(4, 32, shifted=False),
        "two_odd": _hc_enter(2, 5, iterations=1),
        "released": _hc_enter(4, 5120),
    },
    "hc_head": {"tiny": _hc_head(4, 32), "two_odd": _hc_head(2, 5), "released": _hc_head(4, 4096)},
    "hc_collapse": {
        "tiny": _hc_collapse(4, 32),
        "two_odd": _hc_collapse(2, 5),
        "released": _hc_collapse(4, 5120),
    },
    "hc_merge": {
        "tiny": _hc_merge(4, 32),
        "two_odd": _hc_merge(2, 5),
        "released": _hc_merge(4, 5120),
    },
    "pool_entries": {
        "ratio_2": _pool_entries(2, 32, with_ape=False),
        "overlap": _pool_entries(8, 64, overlap=True),
        "ratio_128_odd": _pool_entries(128, 5),
        "released": _pool_entries(2, 512, with_ape=False),
    },
    **index_cases.CASES,
    "sparse_attention": {
        "window_only": _attention(None, 2, 32, 8, 0),
        "plain": _attention("plain", 3, 24, 16, 5),
        "fp4": _attention("fp4_e4m3", 4, 32, 16, 24),
        "fp8": _attention("fp8", 2, 64, 70, 64),
        "nope": _attention("fp8_nope", 2, 48, 3, 9),
        "released": _attention("fp4_e4m3_released", 8, 512, 128, 64),
        "released_heads": _attention("fp4_e4m3_released", 64, 512, 128, 64),
        "released_nope": _attention("fp8_nope_released", 8, 512, 128, 64),
    },
    "grouped_projection": {
        "tiny": _grouped_projection(4, 16, 2, 8),
        "one_group_odd": _grouped_projection(3, 5, 1, 7),
        "released": _grouped_projection(16, 512, 8, 64),
    },
    "router": {
        "tiny": _router(32, 6, 2),
        "odd": _router(5, 14, 3),
        "large_logits": _router(32, 8, 2, scale=30.0),
        "ties": _router(32, 8, 3, ties=True),
        "all": _router(16, 4, 4),
        "hashed": _router(32, 8, 2, hashed=True),
        "hashed_unnormalised": _router(32, 8, 3, hashed=True, normalise=False),
        "released": _router(1280, 384, 6),
        "released_hashed": _router(1280, 256, 6, hashed=True),
    },
    "moe": {
        "tiny": _moe(32, 32, 6, 2),
        "odd_clamped": _moe(10, 6, 3, 2, limit=0.5),
        "never_chosen": _moe(32, 32, 16, 2, chosen="few"),
        "none": _moe(32, 32, 4, 2, chosen="none"),
        "act_fp8": _moe(64, 32, 6, 2, act_group=32),
        "released": _moe(512, 288, 12, 6, chosen="few"),
    },
    "ngram_rows": {
        "tiny": _ngram_rows(3, 358, (503, 509, 521, 523)),
        "released": _ngram_rows(4, 99092, (16000057, 16000079, 16000189, 16000207, 16000339, 7)),
    },
    "engram_gate": {
        "tiny": _engram_gate(4, 32),
        "two_odd": _engram_gate(2, 5),
        "released": _engram_gate(4, 5120),
    },
    "engram_add": {
        "tiny": _engram_add(4, 32),
        "two_odd": _engram_add(2, 5),
        "released": _engram_add(4, 5120),
    },
    "logits": {
        "tiny": _linear(32, 17),
        "odd": _linear(5, 3),
        "released": _linear(1280, 1024),
    },
}

CASES = {op: {**variants, **WEIGHT_CASES.get(op, {})} for op, variants in _CASES.items()}


def row_counts(variant: str) -> tuple[int, ...]:
    """Row counts to run a variant with."""
    return RELEASED_ROWS if "released" in variant else ROWS


def build(op: str, variant: str, rows: int, dtype: torch.dtype) -> Case:
    """The case of an operator; equal arguments give equal numbers in every process."""
    seed = zlib.crc32(f"{op}/{variant}/{rows}".encode())
    return CASES[op][variant](Inputs(seed, dtype), rows)
