"""Indexer: which compressed entries each row attends to.

An index source scores all visible entries of its sequence and keeps the best `index_topk`; the
candidate source also names the blocks that later sources may select from. Index keys come from
the compressor's latent (V4.1) or from a compressor of the indexer's own (V4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.deepseek.compressor import Compressor
from headrace.model.deepseek.decode_step import AnyStep
from headrace.model.deepseek.parameters import Linear, Parameters
from headrace.model.deepseek.step import Selection, Span
from headrace.model.spec import LayerSpec, ModelSpec
from headrace.ops.numerics import Numerics
from headrace.ops.records import RecordView
from headrace.ops.signatures import OpTable


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

    def scores(self, span: Span, allowed: Tensor | None) -> bool:
        """Whether rows of the span may see more than they take, so that scores are needed."""
        entries = span.end // self.ratio
        restricted = self.is_candidate_source and self.restricts(entries)
        return allowed is not None or restricted or entries > self.top_k

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


@dataclass(frozen=True, slots=True)
class Indexer:
    """wq_b [h * d, q_lora_rank], weights_proj [h, D]; wk, k_norm or `compressor` for key owners.

    rotates: whether queries and keys go through the Hadamard rotation. It spreads outliers before
    they are quantised and cancels in their products, so that plain caches do without.
    """

    wq_b: Linear
    weights_proj: Tensor
    wk: Tensor | None
    k_norm: Tensor | None
    compressor: Compressor | None
    rotates: bool

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
            rotates=spec.index_hadamard and p.numerics.kv_quant,
        )

    def keys(
        self,
        x: Tensor,
        latent: Tensor | None,
        step: AnyStep,
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
        rotation: Tensor,
        spec: ModelSpec,
        numerics: Numerics,
        ops: OpTable,
    ) -> Tensor:
        """Index queries [T, h, d] of the normalised query latent qr [T, q_lora_rank]."""
        q = self.wq_b(qr, ops).view(-1, spec.index_heads, spec.index_dim)
        q = ops.rope(q, rotation, False)
        if self.rotates:
            q = ops.hadamard(q)
        return ops.fake_fp4_ue8m0(q) if numerics.kv_quant else q

    def head_weights(self, x: Tensor, spec: ModelSpec, ops: OpTable) -> Tensor:
        """Weights [T, h] of the index heads; may be negative."""
        scale = spec.index_dim**-0.5 * spec.index_heads**-0.5
        return ops.linear(x, self.weights_proj) * scale


def select(
    rule: SelectionRule,
    step: AnyStep,
    query: Callable[[], tuple[Tensor, Tensor]],
    keys: RecordView,
    before: Selection | None,
    ops: OpTable,
) -> Selection:
    """Select entries for all rows; keys are those of the index-key owner.

    query: gives q [T, h, d] and weights [T, h]; not called where every row takes all it sees.
    `before` is the candidate source's selection for later sources of the two-level search.
    """
    allowed: list[Tensor | None] = [None] * len(step.spans)
    if before is not None and not rule.is_candidate_source and before.candidates:
        allowed = before.candidates
    scored = [rule.scores(s, a) for s, a in zip(step.spans, allowed, strict=True)]
    if step.row_tile == 1 and not any(scored):
        return step.everything(rule.ratio)
    chosen: list[Tensor] = []
    candidates: list[Tensor | None] = []
    q, weights = query() if any(scored) else (None, None)
    for span, mask in zip(step.spans, allowed, strict=True):
        if q is None or weights is None or not rule.scores(span, mask):
            chosen.append(span.of(step.everything(rule.ratio).places))
            found = None
        else:
            places, found = _select_span(rule, step, span, q, weights, keys, mask, ops)
            chosen.append(places)
        candidates.append(found if rule.is_candidate_source else mask)
    # A fixed width keeps a row's attention the same in every batch.
    width = max(p.shape[1] for p in chosen) if step.row_tile == 1 else rule.top_k
    if len(chosen) == 1 and chosen[0].shape[1] == width:
        places = chosen[0]
    else:
        shape = (step.total_rows, width)
        places = torch.full(shape, -1, dtype=torch.int64, device=step.device)
        for span, part in zip(step.spans, chosen, strict=True):
            part = part[:, :width]
            if span.rows is None:
                places[:, : part.shape[1]] = part
            else:
                places[span.rows, : part.shape[1]] = part
    block, offset = step.entry_slots(places, rule.ratio)
    return Selection(places, block, offset, candidates)


def _select_span(
    rule: SelectionRule,
    step: AnyStep,
    span: Span,
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    allowed: Tensor | None,
    ops: OpTable,
) -> tuple[Tensor, Tensor | None]:
    """(places [rows, k], candidate mask) of one rectangle of rows."""
    count = step.entries(span, rule.ratio)
    blocks, visible = step.entry_blocks(span, rule.ratio), span.of(step.visible(rule.ratio))
    scores = ops.entry_scores(span.of(q), span.of(weights), keys, blocks, visible, count, allowed)
    mask = None
    if rule.is_candidate_source and rule.restricts(span.end // rule.ratio):
        mask = ops.candidate_mask(scores, visible, rule.candidate_block_size, rule.candidate_blocks)
    return ops.select_top_k(scores, rule.top_k), mask
