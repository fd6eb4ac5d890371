"""Attention of one layer: queries, private window keys, shared compressed entries, output.

A layer reads the compressed cache of its KV source and the selection of its index source; only
sources own a compressor or an indexer. Keys and values are the same vector. The draft module uses
the same weights and steps with another window (`dspark.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.deepseek.compressor import Compressor
from headrace.model.deepseek.indexer import Indexer, Selection, SelectionRule, all_visible, select
from headrace.model.deepseek.parameters import Linear, Parameters
from headrace.model.deepseek.step import Step
from headrace.model.spec import LayerSpec, ModelSpec
from headrace.ops.numerics import Numerics
from headrace.ops.records import RecordView
from headrace.ops.signatures import OpTable


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """The cache views a layer touches: its window, and those of its sources (None = has none)."""

    window: RecordView
    entries: RecordView | None = None
    index_keys: RecordView | None = None
    state: RecordView | None = None
    index_state: RecordView | None = None


@dataclass(frozen=True, slots=True)
class Projections:
    """Query, key and output weights; names as in the checkpoint."""

    wq_a: Linear
    q_norm: Tensor
    wq_b: Linear
    wkv: Linear
    kv_norm: Tensor
    wo_a: Tensor
    wo_b: Linear
    sink: Tensor

    @classmethod
    def load(cls, p: Parameters) -> Projections:
        """Weights below an "attn." scope."""
        return cls(
            wq_a=p.linear("wq_a.weight"),
            q_norm=p.wide("q_norm.weight"),
            wq_b=p.linear("wq_b.weight"),
            wkv=p.linear("wkv.weight"),
            kv_norm=p.wide("kv_norm.weight"),
            # The released path dequantises wo_a and leaves its input alone.
            wo_a=p.plain("wo_a.weight"),
            wo_b=p.linear("wo_b.weight"),
            sink=p.wide("attn_sink"),
        )

    def query(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], spec: ModelSpec, ops: OpTable
    ) -> tuple[Tensor, Tensor]:
        """(query latent [T, q_lora_rank], rotated queries [T, H, d]) of x [T, D]."""
        qr = ops.rms_norm(self.wq_a(x, ops), self.q_norm, spec.rms_eps)
        q = self.wq_b(qr, ops).unflatten(-1, (spec.num_heads, spec.head_dim))
        if spec.q_head_norm:
            q = ops.rms_norm(q, None, spec.rms_eps)
        return qr, ops.rope(q, *rotation, False)

    def key(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], spec: ModelSpec, ops: OpTable
    ) -> Tensor:
        """Rotated window keys [T, d] of x [T, D], not yet rounded to the cache format."""
        kv = ops.rms_norm(self.wkv(x, ops), self.kv_norm, spec.rms_eps)
        return ops.rope(kv, *rotation, False)

    def output(
        self, o: Tensor, rotation: tuple[Tensor, Tensor], spec: ModelSpec, ops: OpTable
    ) -> Tensor:
        """Attention output o [T, H, d] rotated back, through the grouped projection -> [T, D]."""
        o = ops.rope(o, *rotation, True)
        return self.wo_b(ops.grouped_projection(o, self.wo_a, spec.o_groups), ops)


@dataclass(frozen=True, slots=True)
class Attention:
    """One backbone layer's attention; `compressor` and `indexer` only in source layers."""

    layer: LayerSpec
    projections: Projections
    compressor: Compressor | None
    indexer: Indexer | None

    @classmethod
    def load(cls, p: Parameters, layer: LayerSpec, spec: ModelSpec) -> Attention:
        """Weights below a layer's "attn." scope."""
        compressor = None
        if layer.compresses:
            overlap = spec.overlaps(layer.ratio)
            compressor = Compressor.load(
                p.scope("compressor."), layer.ratio, spec.head_dim, overlap
            )
        indexer = Indexer.load(p.scope("indexer."), layer, spec) if layer.indexes else None
        return cls(layer, Projections.load(p), compressor, indexer)

    def forward(
        self,
        x: Tensor,
        step: Step,
        caches: LayerCaches,
        selection: Selection | None,
        spec: ModelSpec,
        numerics: Numerics,
        ops: OpTable,
        *,
        stored: bool = False,
    ) -> tuple[Tensor, Selection | None]:
        """x [T, D] -> (output [T, D], the selection that following layers reuse).

        stored: `store_entries` has run already, with more rows than these.
        """
        ratio = self.layer.ratio
        rotation = step.compressed if ratio else step.plain
        qr, q = self.projections.query(x, rotation, spec, ops)
        window = self._window(x, rotation, step, caches.window, spec, ops)
        if not stored:
            self.store_entries(x, step, caches, spec, ops)
        if ratio:
            selection = self._select(x, qr, step, caches, selection, spec, numerics, ops)
        none = torch.empty((x.shape[0], 0), dtype=torch.int64)
        use = selection if ratio else None
        o = ops.sparse_attention(
            q,
            window,
            step.window_index,
            caches.entries if ratio else None,
            use.block if use is not None else none,
            use.offset if use is not None else none,
            self.projections.sink,
            spec.head_dim**-0.5,
        )
        return self.projections.output(o, rotation, spec, ops), selection

    def _window(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        step: Step,
        view: RecordView,
        spec: ModelSpec,
        ops: OpTable,
    ) -> Tensor:
        """Window keys [B * (W - 1) + T, d]: ring rows before each chunk, then the chunk's rows.

        The ring is read before the chunk's rows are stored: their places overlap.
        """
        kv = self.projections.key(x, rotation, spec, ops)
        history = step.history(spec.window - 1, view.data.shape[1])
        before = ops.read_records(view, history.slots, history.minor, kv.dtype)
        rounded = ops.round_rows(kv, view)
        kept = history.write_rows
        ops.write_records(view, history.write_slots, history.write_minor, kv[kept])
        return torch.cat((before.flatten(0, 1), rounded))

    def store_entries(
        self, x: Tensor, step: Step, caches: LayerCaches, spec: ModelSpec, ops: OpTable
    ) -> None:
        """Store the entries and index keys that this step completes; nothing in other layers."""
        if self.compressor is None or caches.entries is None:
            return
        done = self.compressor.completed(step)
        latent = self.compressor.forward(x, step, caches.state, spec.rms_eps, ops)
        rotation = step.rotation(done.positions, self.layer.ratio)
        if self.indexer is not None and caches.index_keys is not None:
            keys = self.indexer.keys(x, latent, step, caches.index_state, spec, ops)
            if keys is not None:
                keys = ops.rope(keys, *rotation, False)
                keys = ops.hadamard(keys) if spec.index_hadamard else keys
                ops.write_records(caches.index_keys, done.block, done.offset, keys)
        entries = ops.rope(latent, *rotation, False)
        ops.write_records(caches.entries, done.block, done.offset, entries)

    def _select(
        self,
        x: Tensor,
        qr: Tensor,
        step: Step,
        caches: LayerCaches,
        selection: Selection | None,
        spec: ModelSpec,
        numerics: Numerics,
        ops: OpTable,
    ) -> Selection | None:
        """This layer's own selection, the one of its index source, or all visible entries."""
        ratio = self.layer.ratio
        if self.indexer is not None and caches.index_keys is not None:
            q = self.indexer.queries(qr, step.compressed, spec, numerics, ops)
            weights = self.indexer.head_weights(x, spec, ops)
            rule = SelectionRule.of(self.layer, spec)
            return select(rule, step, q, weights, caches.index_keys, selection, ops)
        if self.layer.index_source is not None:
            return selection
        entries = max(span.end for span in step.spans) // ratio
        places = all_visible(step.visible(ratio), entries)
        block, offset = step.entry_slots(places, torch.arange(x.shape[0]), ratio)
        return Selection(places, block, offset)
