"""Indexer: which compressed entries each row attends to.

An index source scores all visible entries of its sequence and keeps the best `index_topk`; the
candidate source also names the blocks that later sources may select from. Index keys come from
the compressor's latent (V4.1) or from a compressor of the indexer's own (V4).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.model.deepseek.compressor import Compressor
from headrace.model.deepseek.parameters import Linear, Parameters
from headrace.model.deepseek.step import Span, Step
from headrace.model.spec import LayerSpec, ModelSpec
from headrace.ops.numerics import Numerics
from headrace.ops.records import RecordView
from headrace.ops.signatures import OpTable


@dataclass(slots=True)
class Selection:
    """What flows from index sources to the layers after them, within one step.

    places int64 [T, K]: entry indices ascending, -1 = none. block, offset [T, K]: where they lie.
    candidates: per span, bool [rows, N] or None (no restriction).
    """

    places: Tensor
    block: Tensor
    offset: Tensor
    candidates: list[Tensor | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Indexer:
    """wq_b [h * d, q_lora_rank], weights_proj [h, D]; wk, k_norm or `compressor` for key owners."""

    wq_b: Linear
    weights_proj: Tensor
    wk: Tensor | None
    k_norm: Tensor | None
    compressor: Compressor | None

    @classmethod
    def load(cls, p: Parameters, layer: LayerSpec, spec: ModelSpec) -> Indexer:
        """Weights below a layer's "attn.indexer." scope."""
        own = layer.owns_index_key
        latent = own and spec.index_key_from_latent
        compressor = None
        if own and not latent:
            overlap = spec.overlaps(layer.ratio)
            compressor = Compressor.load(
                p.scope("compressor."), layer.ratio, spec.index_dim, overlap
            )
        return cls(
            wq_b=p.linear("wq_b.weight"),
            weights_proj=p.plain("weights_proj.weight"),
            wk=p.plain("wk.weight") if latent else None,
            k_norm=p.wide("k_norm.weight") if latent else None,
            compressor=compressor,
        )

    def keys(
        self,
        x: Tensor,
        latent: Tensor | None,
        step: Step,
        state: RecordView | None,
        spec: ModelSpec,
        ops: OpTable,
    ) -> Tensor | None:
        """Un-rotated index keys [E, d] of the completed entries; None if another layer has them."""
        if self.wk is not None and latent is not None:
            return ops.rms_norm(ops.linear(latent, self.wk), self.k_norm, spec.rms_eps)
        if self.compressor is not None:
            return self.compressor.forward(x, step, state, spec.rms_eps, ops)
        return None

    def queries(
        self,
        qr: Tensor,
        rotation: tuple[Tensor, Tensor],
        spec: ModelSpec,
        numerics: Numerics,
        ops: OpTable,
    ) -> Tensor:
        """Index queries [T, h, d] of the normalised query latent qr [T, q_lora_rank]."""
        q = self.wq_b(qr, ops).unflatten(-1, (spec.index_heads, spec.index_dim))
        q = ops.rope(q, *rotation, False)
        if spec.index_hadamard:
            q = ops.hadamard(q)
        return ops.fake_fp4_ue8m0(q) if numerics.kv_quant else q

    def head_weights(self, x: Tensor, spec: ModelSpec, ops: OpTable) -> Tensor:
        """Weights [T, h] of the index heads; may be negative."""
        scale = spec.index_dim**-0.5 * spec.index_heads**-0.5
        return ops.linear(x, self.weights_proj) * scale


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """How one index source selects: its ratio, and its part in the two-level search."""

    ratio: int
    top_k: int
    is_candidate_source: bool
    candidate_blocks: int
    candidate_block_size: int

    def restricts(self, entries: int) -> bool:
        """Whether the two-level search can leave anything out of this many entries."""
        if not self.candidate_blocks:
            return False
        return -(-entries // self.candidate_block_size) > self.candidate_blocks

    @classmethod
    def of(cls, layer: LayerSpec, spec: ModelSpec) -> SelectionRule:
        """Rule of an index source; layers before the candidate source search alone."""
        source = spec.candidate_source
        two_level = source is not None and layer.index >= source
        return cls(
            ratio=layer.ratio,
            top_k=spec.index_topk,
            is_candidate_source=layer.index == source,
            candidate_blocks=spec.candidate_blocks if two_level else 0,
            candidate_block_size=spec.candidate_block_size,
        )


def select(
    rule: SelectionRule,
    step: Step,
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    before: Selection | None,
    ops: OpTable,
) -> Selection:
    """Select entries for all rows: q [T, h, d], weights [T, h], keys of the index-key owner.

    `before` is the candidate source's selection for later sources of the two-level search.
    """
    chosen: list[Tensor] = []
    candidates: list[Tensor | None] = []
    for number, span in enumerate(step.spans):
        allowed = None
        if before is not None and not rule.is_candidate_source and before.candidates:
            allowed = before.candidates[number]
        places, mask = _select_span(rule, step, span, q, weights, keys, allowed, ops)
        chosen.append(places)
        candidates.append(mask if rule.is_candidate_source else allowed)
    # A fixed width keeps a row's attention the same in every batch.
    width = max(p.shape[1] for p in chosen) if step.row_tile == 1 else rule.top_k
    places = torch.full((q.shape[0], width), -1, dtype=torch.int64)
    for span, found in zip(step.spans, chosen, strict=True):
        places[span.rows, : found.shape[1]] = found
    rows = torch.arange(q.shape[0])
    block, offset = step.entry_slots(places, rows, rule.ratio)
    return Selection(places, block, offset, candidates)


def _select_span(
    rule: SelectionRule,
    step: Step,
    span: Span,
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    allowed: Tensor | None,
    ops: OpTable,
) -> tuple[Tensor, Tensor | None]:
    """(places [rows, k], candidate mask) of one rectangle of rows."""
    entries = span.end // rule.ratio
    visible = step.visible(rule.ratio)[span.rows]
    restricted = allowed is not None or (rule.is_candidate_source and rule.restricts(entries))
    if entries <= rule.top_k and not restricted:
        return all_visible(visible, entries), None
    block, offset = step.entry_rows(span, rule.ratio)
    key_rows = ops.read_records(keys, block, offset, q.dtype)
    shape = (len(span.sequences), span.q_len)
    scores = ops.index_scores(
        q[span.rows].unflatten(0, shape), weights[span.rows].unflatten(0, shape), key_rows
    )
    scores = scores.flatten(0, 1)
    unseen = torch.arange(scores.shape[-1]) >= visible.unsqueeze(-1)
    scores = scores.masked_fill(unseen, -torch.inf)
    mask = None
    if rule.is_candidate_source and rule.restricts(entries):
        mask = ops.candidate_mask(scores, visible, rule.candidate_block_size, rule.candidate_blocks)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return ops.select_top_k(scores, rule.top_k), mask


def all_visible(visible: Tensor, entries: int) -> Tensor:
    """Places 0..entries-1 of each row, -1 where not visible: int64 [rows, entries]."""
    places = torch.arange(entries)
    return torch.where(places < visible.unsqueeze(-1), places, -1)
