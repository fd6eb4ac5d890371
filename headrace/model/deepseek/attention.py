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
from headrace.model.deepseek.decode_step import AnyStep
from headrace.model.deepseek.indexer import Indexer, SelectionRule, select
from headrace.model.deepseek.parameters import Linear, Parameters
from headrace.model.deepseek.step import Selection
from headrace.model.spec import LayerSpec, ModelSpec
from headrace.ops.numerics import Numerics
from headrace.ops.records import RecordView
from headrace.ops.signatures import OpTable
from headrace.ops.stored_weights import Weight, rows


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
    """Query, key and output weights; names as in the checkpoint. wqkv_a: wq_a above wkv, which
    share its memory."""

    wqkv_a: Linear
    wq_a: Linear
    q_norm: Tensor
    wq_b: Linear
    wkv: Linear
    kv_norm: Tensor
    wo_a: Weight
    wo_b: Linear
    sink: Tensor

    @classmethod
    def load(cls, p: Parameters) -> Projections:
        """Weights below an "attn." scope."""
        both = p.above("wq_a.weight", "wkv.weight")
        rank = p.checkpoint.shape(p.prefix + "wq_a.weight")[0]
        wq_a, wkv = rows(both, 0, rank), rows(both, rank, both.shape[0])
        return cls(
            wqkv_a=Linear(both, p.act_group),
            wq_a=Linear(wq_a, p.act_group),
            q_norm=p.wide("q_norm.weight"),
            wq_b=p.linear("wq_b.weight"),
            wkv=Linear(wkv, p.act_group),
            kv_norm=p.wide("kv_norm.weight"),
            # The released path dequantises wo_a and leaves its input alone.
            wo_a=p.weight("wo_a.weight"),
            wo_b=p.linear("wo_b.weight"),
            sink=p.wide("attn_sink"),
        )

    def query(
        self, x: Tensor, rotation: Tensor, spec: ModelSpec, ops: OpTable
    ) -> tuple[Tensor, Tensor]:
        """(query latent [T, q_lora_rank], rotated queries [T, H, d]) of x [T, D]."""
        return self._query(self.wq_a(x, ops), rotation, spec, ops)

    def query_and_key(
        self, x: Tensor, rotation: Tensor, spec: ModelSpec, ops: OpTable
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(query latent, queries, keys) as `query` and `key` give them."""
        both = self.wqkv_a(x, ops)
        qr, q = self._query(both[:, : spec.q_lora_rank], rotation, spec, ops)
        kv = both[:, spec.q_lora_rank :]
        return qr, q, ops.norm_rope(kv, self.kv_norm, spec.rms_eps, rotation)

    def _query(
        self, latent: Tensor, rotation: Tensor, spec: ModelSpec, ops: OpTable
    ) -> tuple[Tensor, Tensor]:
        qr = ops.rms_norm(latent, self.q_norm, spec.rms_eps)
        q = self.wq_b(qr, ops).view(-1, spec.num_heads, spec.head_dim)
        if spec.q_head_norm:
            return qr, ops.norm_rope(q, None, spec.rms_eps, rotation)
        return qr, ops.rope(q, rotation, False)

    def key(self, x: Tensor, rotation: Tensor, spec: ModelSpec, ops: OpTable) -> Tensor:
        """Rotated window keys [T, d] of x [T, D], not yet rounded to the cache format."""
        return ops.norm_rope(self.wkv(x, ops), self.kv_norm, spec.rms_eps, rotation)

    def output(self, o: Tensor, rotation: Tensor, spec: ModelSpec, ops: OpTable) -> Tensor:
        """Attention output o [T, H, d] rotated back, through the grouped projection -> [T, D]."""
        o = ops.rope(o, rotation, True)
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
        step: AnyStep,
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
        qr, q, kv = self.projections.query_and_key(x, rotation, spec, ops)
        window, window_index = self._window(kv, step, caches.window, spec, ops)
        if not stored:
            self.store_entries(x, step, caches, spec, ops)
        if ratio:
            selection = self._select(x, qr, step, caches, selection, spec, numerics, ops)
        use = selection if ratio else None
        o = ops.sparse_attention(
            q,
            window,
            window_index,
            caches.entries if ratio else None,
            use.block if use is not None else step.nothing,
            use.offset if use is not None else step.nothing,
            self.projections.sink,
            spec.head_dim**-0.5,
        )
        return self.projections.output(o, rotation, spec, ops), selection

    def _window(
        self,
        kv: Tensor,
        step: AnyStep,
        view: RecordView,
        spec: ModelSpec,
        ops: OpTable,
    ) -> tuple[Tensor, Tensor]:
        """Window keys [n, d] and, for each row, which of them it sees: int64 [T, W].

        The keys are ring rows before each chunk, then the chunk's rows. The ring is read before
        the chunk's rows are stored: their places overlap.
        """
        ring = view.data.shape[1]
        kept = step.kept(ring)
        if step.single:
            # The ring has room for the whole window: one row each overlaps with nothing.
            ops.write_records(view, kept.slots, kept.minor, kv)
            keys = ops.read_majors(view, step.slots, kv.dtype)
            return keys.flatten(0, 1), step.recent(ring)
        slots, minor = step.history(spec.window - 1, ring)
        before = ops.read_records(view, slots, minor, kv.dtype)
        rounded = ops.round_rows(kv, view)
        ops.write_records(view, kept.slots, kept.minor, kept.of(kv))
        return torch.cat((before.flatten(0, 1), rounded)), step.window_index

    def store_entries(
        self, x: Tensor, step: AnyStep, caches: LayerCaches, spec: ModelSpec, ops: OpTable
    ) -> None:
        """Store the entries and index keys that this step completes; nothing in other layers."""
        if self.compressor is None or caches.entries is None:
            return
        done = self.compressor.completed(step)
        latent = self.compressor.forward(x, step, caches.state, spec.rms_eps, ops)
        if self.indexer is not None and caches.index_keys is not None:
            # Called even if no entry is complete: it may keep a state of its own.
            keys = self.indexer.keys(x, latent, step, caches.index_state, spec, ops)
            if keys is not None and done.count:
                keys = ops.rope(keys, done.rotation, False)
                keys = ops.hadamard(keys) if self.indexer.rotates else keys
                ops.write_records(caches.index_keys, done.block, done.offset, keys)
        if done.count:
            entries = ops.rope(latent, done.rotation, False)
            ops.write_records(caches.entries, done.block, done.offset, entries)

    def _select(
        self,
        x: Tensor,
        qr: Tensor,
        step: AnyStep,
        caches: LayerCaches,
        selection: Selection | None,
        spec: ModelSpec,
        numerics: Numerics,
        ops: OpTable,
    ) -> Selection | None:
        """This layer's own selection, the one of its index source, or all visible entries."""
        ratio = self.layer.ratio
        if self.indexer is not None and caches.index_keys is not None:
            indexer = self.indexer

            def query() -> tuple[Tensor, Tensor]:
                q = indexer.queries(qr, step.compressed, spec, numerics, ops)
                return q, indexer.head_weights(x, spec, ops)

            rule = SelectionRule.of(self.layer, spec)
            return select(rule, step, query, caches.index_keys, selection, ops)
        if self.layer.index_source is not None:
            return selection
        return step.everything(ratio)
