"""Cases of the indexer: scores of cached index keys, candidate blocks, the best entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.ops.case_inputs import Builder, Case, Inputs
from headrace.ops.case_views import written_view

MAJORS, MINORS = 9, 16


def _entry_scores(
    record: str,
    heads: int,
    blocks: int,
    *,
    sequences: int | None = None,
    minors: int = MINORS,
    count: int | None = None,
    restricted: bool = False,
) -> Builder:
    """One row of `rows` sequences each, or `rows` rows of each of so many sequences.

    Row 0 sees nothing; blocks that no row sees are NaN. restricted: rows may have few entries only.
    """

    def build(i: Inputs, rows: int) -> Case:
        view = written_view(i, record, MAJORS, minors)
        b, each = (rows, 1) if sequences is None else (sequences, rows)
        q, weights = i.normal(b * each, heads, view.width), i.normal(b * each, heads)
        most = blocks * minors if count is None else count
        visible = i.integers(0, most + 1, b * each)
        visible[:1] = 0
        table = i.integers(0, MAJORS - 1, b, blocks)
        if each:
            newest = visible.view(b, each).amax(1, keepdim=True)
            table[torch.arange(blocks) * minors >= newest] = MAJORS - 1
        # A row has a place of its own in every argument only where sequences are rows, or one.
        alike: tuple[int, ...] = {None: (0, 1, 3, 4), 1: (0, 1, 4)}.get(sequences, ())
        args: tuple[Any, ...] = (q, weights, view, table, visible)
        if restricted:
            args += (count, i.integers(0, 9, b * each, -(-most // 8)) == 0)
            args = (*args[:-1], args[-1].repeat_interleave(8, dim=1)[:, :most])
            alike = (*alike, 6) if alike else ()
        elif count is not None:
            args += (count,)
        return Case(args, alike)

    return build


def _scores(i: Inputs, rows: int, places: int, *, ties: bool) -> tuple[Tensor, Tensor]:
    """(scores [rows, places], visible [rows]); -inf where not visible."""
    visible = i.integers(0, places + 1, rows)
    found = i.integers(-2, 3, rows, places).to(i.dtype) if ties else i.normal(rows, places)
    hidden = torch.arange(places) >= visible.unsqueeze(-1)
    return found.masked_fill(hidden, -torch.inf), visible


def _candidate_mask(places: int, block: int, keep: int, *, ties: bool) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        return Case((*_scores(i, rows, places, ties=ties), block, keep), (0, 1))

    return build


def _select_top_k(places: int, top_k: int, *, ties: bool) -> Builder:
    def build(i: Inputs, rows: int) -> Case:
        return Case((_scores(i, rows, places, ties=ties)[0], top_k), (0,))

    return build


def _strided_top_k(i: Inputs, rows: int) -> Case:
    """Columns cut off a wider table; zeros of both signs are equal."""
    scores = _scores(i, rows, 70, ties=True)[0]
    scores[:, ::3] = scores[:, ::3].masked_fill(scores[:, ::3] == 0.0, -0.0)
    return Case((scores[:, 3:50], 9), (0,))


CASES: dict[str, dict[str, Builder]] = {
    "entry_scores": {
        "decode": _entry_scores("plain", 16, 5),
        "prefill": _entry_scores("fp4_ue8m0_planar", 16, 3, sequences=1),
        "sequences": _entry_scores("fp4_ue8m0_planar", 5, 4, sequences=3),
        "cut": _entry_scores("fp4_ue8m0", 3, 4, sequences=1, count=53),
        "restricted": _entry_scores("plain", 3, 25, sequences=1, restricted=True),
        "restricted_cut": _entry_scores("fp4_ue8m0_planar", 2, 4, count=50, restricted=True),
        "fp8": _entry_scores("fp8", 3, 2, sequences=1),
        "one_key": _entry_scores("plain", 2, 1, minors=1),
        "released": _entry_scores("fp4_ue8m0_planar", 32, 9),
    },
    "candidate_mask": {
        "ties": _candidate_mask(14, 4, 2, ties=True),
        "blocks_of_8": _candidate_mask(67, 8, 3, ties=False),
        "keeps_all": _candidate_mask(9, 4, 5, ties=True),
        "blocks_of_1": _candidate_mask(33, 1, 7, ties=True),
        "released": _candidate_mask(20_000, 8, 2048, ties=False),
    },
    "select_top_k": {
        "ties": _select_top_k(40, 8, ties=True),
        "fewer_than_k": _select_top_k(5, 8, ties=True),
        "strided": _strided_top_k,
        "released": _select_top_k(1000, 512, ties=False),
        "released_long": _select_top_k(40_000, 512, ties=True),
    },
}
