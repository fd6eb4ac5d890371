"""The model: one forward over the rows of a step, for V4.1 and V4 alike.

`Model.forward(batch, cache)` writes the cache rows of all batch rows and returns the logits of the
rows that want them. What differs between the generations are flags of the `ModelSpec`. Called by
`engine/runner` and by `headrace check model`; loaded by `model/loader`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.kv import GroupKind, KVGroupSpec
from headrace.errors import UnsupportedError
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch
from headrace.model.deepseek.attention import Attention, LayerCaches
from headrace.model.deepseek.dspark import DraftModule, Drafts, Pick, pick_greedy
from headrace.model.deepseek.engram import Engram, compress_ngrams
from headrace.model.deepseek.hyper_connections import HyperConnection
from headrace.model.deepseek.indexer import Selection
from headrace.model.deepseek.moe import MoE
from headrace.model.deepseek.parameters import Parameters
from headrace.model.deepseek.step import Step
from headrace.model.engram_tables import EngramTables
from headrace.model.spec import LayerSpec, ModelSpec
from headrace.ops.numerics import Numerics
from headrace.ops.records import RecordView
from headrace.ops.signatures import OpTable

# (what, layer, value): sees intermediate results, for checks and debugging.
Observer = Callable[[str, int, Tensor], None]

# Variable row counts are padded to this many in the batch-invariant mode, so that every operator
# call sees whole tiles: vector tails and matrix edges never depend on the batch.
ROW_TILE = 32


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one backbone layer."""

    spec: LayerSpec
    attn_norm: Tensor
    ffn_norm: Tensor
    attention: Attention
    moe: MoE
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    engram: Engram | None

    @classmethod
    def load(
        cls, p: Parameters, layer: LayerSpec, spec: ModelSpec, tables: EngramTables | None
    ) -> Layer:
        """Weights below a "layers.L." scope."""
        engram = None
        if layer.engram and tables is not None and spec.engram is not None:
            number = spec.engram.layers.index(layer.index)
            engram = Engram.load(p.scope("engram."), tables, layer.index, number)
        return cls(
            spec=layer,
            attn_norm=p.wide("attn_norm.weight"),
            ffn_norm=p.wide("ffn_norm.weight"),
            attention=Attention.load(p.scope("attn."), layer, spec),
            moe=MoE.load(
                p.scope("ffn."), spec.num_experts, spec.experts_per_token, layer.hash_routing
            ),
            hc_attn=HyperConnection.load(p, "hc_attn"),
            hc_ffn=HyperConnection.load(p, "hc_ffn"),
            engram=engram,
        )


class Model:
    """A loaded checkpoint bound to an operator table. Stateless between steps: all state is in the
    `KVCache` rows and in the token history that the `Batch` carries."""

    def __init__(
        self,
        spec: ModelSpec,
        numerics: Numerics,
        ops: OpTable,
        p: Parameters,
        tables: EngramTables | None,
        *,
        with_draft: bool,
    ) -> None:
        self.spec = spec
        self.numerics = numerics
        self.ops = ops
        self.max_ngram = spec.engram.max_ngram if spec.engram is not None else 1
        self.row_tile = ROW_TILE if numerics.batch_invariant else 1
        self._embed = p.stored("embed.weight")
        self._head = p.wide("head.weight")
        self._norm = p.wide("norm.weight")
        self._layers = tuple(
            Layer.load(p.scope(f"layers.{x.index}."), x, spec, tables) for x in spec.layers
        )
        self._hc_head = None if spec.hc_shifted else HyperConnection.load(p, "hc_head")
        self._token_map = None if tables is None else torch.from_numpy(tables.token_map).long()
        self._pad = 0 if tables is None else tables.pad
        self._draft = None
        if with_draft and spec.draft is not None:
            self._draft = DraftModule.load(p, spec, spec.draft)

    # --- cache ---------------------------------------------------------------------------------

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """Cache groups; the draft's windows only where the draft module is loaded."""
        groups = self.spec.kv_groups(self.numerics.kv_quant)
        return tuple(g for g in groups if g.name != "window_draft" or self._draft is not None)

    def _group_of(self, prefix: str, layer: int) -> KVGroupSpec | None:
        for group in self.kv_groups():
            if group.name.startswith(prefix) and layer in group.layers:
                return group
        return None

    def _layer_caches(self, cache: KVCache) -> list[LayerCaches]:
        def view(prefix: str, layer: int | None) -> RecordView | None:
            if layer is None:
                return None
            group = self._group_of(prefix, layer)
            return None if group is None else cache.view(group.name, layer)

        rings = {
            layer: group.name
            for group in self.kv_groups()
            if group.kind is GroupKind.RING and group.name != "window_draft"
            for layer in group.layers
        }
        return [
            LayerCaches(
                window=cache.view(rings[x.index], x.index),
                entries=view("main_c", x.kv_source),
                index_keys=view("index_c", x.index_key_source),
                state=view("compressor_c", x.index),
                index_state=view("index_compressor_c", x.index),
            )
            for x in self.spec.layers
        ]

    # --- forward -------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: Batch, cache: KVCache, observe: Observer | None = None) -> Tensor:
        """Logits [S, V] of the rows that want them, fp32 (fp64 in the fp64 mode)."""
        step = Step(self.spec, batch, self.numerics.accumulate_dtype, self.row_tile)
        streams, pre, features = self._backbone(batch, step, cache, observe or _ignore)
        if self._draft is not None and features:
            feature = torch.cat(features, dim=-1)
            if observe is not None:
                observe("draft_features", 0, feature)
            self._draft.context(feature, step, self._draft_windows(cache), self.ops)
        rows = batch.logit_rows
        if self._hc_head is not None:
            head = self._hc_head
            pre = self.ops.hc_head(
                streams, head.fn, head.base, head.scale, self.spec.rms_eps, self.spec.hc_eps
            )
        hidden = self.ops.hc_collapse(streams[rows], pre[rows])
        if observe is not None:
            observe("hidden", self.spec.num_layers, hidden)
        return self.ops.logits(self.ops.rms_norm(hidden, self._norm, self.spec.rms_eps), self._head)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, D] in the compute dtype."""
        return self._embed[token_ids].to(self.numerics.torch_dtype)

    def _backbone(
        self, batch: Batch, step: Step, cache: KVCache, observe: Observer
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(streams [T, hc, D], last pre [T, hc], draft features) after all layers."""
        spec = self.spec
        caches = self._layer_caches(cache)
        streams = self.embed(batch.token_ids).unsqueeze(1).repeat(1, spec.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2], dtype=self.numerics.accumulate_dtype)
        pre[:, 0] = 1.0
        features: list[Tensor] = []
        selection: Selection | None = None
        compressed = self._compressed_ngrams(batch)
        for layer, layer_caches in zip(self._layers, caches, strict=True):
            if layer.engram is not None and compressed is not None:
                streams = self._add_engram(layer, streams, compressed, observe)
            self._capture(features, layer.spec.index, streams, at_input=True)
            streams, pre, selection = self._layer(
                layer, streams, pre, batch, step, layer_caches, selection, observe
            )
            self._capture(features, layer.spec.index, streams, at_input=False)
        return streams, pre, features

    def _layer(
        self,
        layer: Layer,
        streams: Tensor,
        pre: Tensor,
        batch: Batch,
        step: Step,
        caches: LayerCaches,
        selection: Selection | None,
        observe: Observer,
    ) -> tuple[Tensor, Tensor, Selection | None]:
        """Attention and experts of one layer: (streams, pre for the next sublayer, selection)."""
        spec, ops, number = self.spec, self.ops, layer.spec.index
        shifted = spec.hc_shifted
        a_pre, post, comb = layer.hc_attn.mix(streams, spec, ops)
        x = ops.hc_collapse(streams, pre if shifted else a_pre)
        x = ops.rms_norm(x, layer.attn_norm, spec.rms_eps)
        y, selection = layer.attention.forward(x, step, caches, selection, spec, self.numerics, ops)
        observe("attn_out", number, y)
        if layer.spec.indexes and selection is not None:
            observe("top_k", number, selection.places)
        streams = ops.hc_merge(y, streams, post, comb)
        f_pre, post, comb = layer.hc_ffn.mix(streams, spec, ops)
        x = ops.hc_collapse(streams, a_pre if shifted else f_pre)
        x = ops.rms_norm(x, layer.ffn_norm, spec.rms_eps)
        y = layer.moe.forward(x, batch.token_ids, spec, ops)
        observe("ffn_out", number, y)
        streams = ops.hc_merge(y, streams, post, comb)
        observe("stream_out", number, streams)
        return streams, f_pre, selection

    def _compressed_ngrams(self, batch: Batch) -> Tensor | None:
        if self._token_map is None:
            return None
        return compress_ngrams(batch.ngrams, self._token_map, self._pad)

    def _add_engram(
        self, layer: Layer, streams: Tensor, compressed: Tensor, observe: Observer
    ) -> Tensor:
        if layer.engram is None:
            return streams
        rows = layer.engram.rows(compressed, self.ops)
        observe("engram_rows", layer.spec.index, rows)
        streams, gate = layer.engram.forward(streams, rows, self.spec, self.ops)
        observe("engram_gate", layer.spec.index, gate)
        return streams

    def _capture(self, out: list[Tensor], layer: int, streams: Tensor, *, at_input: bool) -> None:
        """Append the draft's feature of a target layer: the mean over the copies [T, D]."""
        draft = self.spec.draft
        if self._draft is None or draft is None or draft.targets_attn_input != at_input:
            return
        if layer in draft.targets:
            wide = streams.to(self.numerics.accumulate_dtype)
            out.append(wide.mean(dim=1).to(streams.dtype))

    # --- draft ---------------------------------------------------------------------------------

    def _draft_windows(self, cache: KVCache) -> list[RecordView]:
        draft = self.spec.draft
        stages = 0 if draft is None else draft.stages
        return [cache.view("window_draft", stage) for stage in range(stages)]

    @torch.no_grad()
    def draft(
        self,
        next_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        *,
        length: int | None = None,
        pick: Pick = pick_greedy,
    ) -> Drafts:
        """One block of drafts per sequence after `next_ids` int64 [B] at `positions` int64 [B].

        Raises UnsupportedError where the checkpoint has no draft module or it was not loaded.
        """
        if self._draft is None:
            raise UnsupportedError(
                "This model was loaded without a draft module: load it with with_draft=True, or "
                "take a checkpoint that has mtp.* tensors."
            )
        return self._draft.draft(
            next_ids,
            positions,
            slots,
            self._draft_windows(cache),
            self.embed,
            self._head,
            self.ops,
            length=length,
            pick=pick,
        )


def _ignore(what: str, layer: int, value: Tensor) -> None:
    """The observer of a run that nobody watches."""
