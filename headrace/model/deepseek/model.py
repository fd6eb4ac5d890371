"""The model: one forward over the rows of a step, for V4.1 and V4 alike.

`Model.forward(batch, cache)` writes the cache rows of all batch rows and returns the logits of the
rows that want them. What differs between the generations are flags of the `ModelSpec`. Called by
`engine/runner` and by `headrace check model`; loaded by `model/loader`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.core.kv import GroupKind, KVGroupSpec
from headrace.errors import UnsupportedError
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch
from headrace.model.deepseek.attention import Attention, LayerCaches
from headrace.model.deepseek.decode_step import AnyStep, DecodeInputs, DecodeStep
from headrace.model.deepseek.dspark import DraftModule, Drafts, Pick, pick_greedy
from headrace.model.deepseek.engram import Engram, compress_ngrams
from headrace.model.deepseek.hyper_connections import HyperConnection
from headrace.model.deepseek.moe import MoE
from headrace.model.deepseek.parameters import Parameters
from headrace.model.deepseek.step import Selection, Step
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


# Rows that belong to nobody and failed requests may hold NaN: values, not reasons to warn.
_quiet = np.errstate(all="ignore")


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


@dataclass(slots=True)
class _Rows:
    """The rows on their way through the layers.

    streams [T, hc, D], pre [T, hc] for the next sublayer, embedded: rows of the Engram tables
    [T, ..] by layer, features: of the draft's target layers so far.
    """

    step: AnyStep
    streams: Tensor
    pre: Tensor
    embedded: dict[int, Tensor]
    selection: Selection | None = None
    features: list[Tensor] = field(default_factory=list)


class Model:
    """A loaded checkpoint bound to an operator table, with all weights on `device`.

    Stateless between steps: all state is in the `KVCache` rows, which lie there too, and in the
    token history that the `Batch` carries. Batches and the map of compressed ids are on the host.
    """

    def __init__(
        self,
        spec: ModelSpec,
        numerics: Numerics,
        ops: OpTable,
        p: Parameters,
        tables: EngramTables | None,
        *,
        with_draft: bool,
        waiting: tuple[str, ...] = (),
    ) -> None:
        """waiting: operators of `ops` in which the host waits for the device."""
        self.spec = spec
        self.numerics = numerics
        self.ops = ops
        self.waiting = waiting
        self.device = p.device
        self.max_ngram = spec.engram.max_ngram if spec.engram is not None else 1
        self.row_tile = ROW_TILE if numerics.batch_invariant else 1
        # Test oracle of the truncation: consumers compute all rows with the narrowed windows.
        self.truncate_by_mask = False
        self._bound: tuple[KVCache, list[LayerCaches]] | None = None
        self._embed = p.stored("embed.weight")
        self._head = p.head("head.weight")
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
        """Views per layer, kept for the cache of the last call: an engine has only one."""
        if self._bound is None or self._bound[0] is not cache:
            self._bound = cache, self._bind(cache)
        return self._bound[1]

    def _bind(self, cache: KVCache) -> list[LayerCaches]:
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
    @_quiet
    def forward(self, batch: Batch, cache: KVCache, observe: Observer | None = None) -> Tensor:
        """Logits [S, V] of the rows that want them, fp32 (fp64 in the fp64 mode)."""
        end, batch = self._backbone(batch, cache, observe or _ignore)
        self._store_draft_context(end, cache, observe or _ignore)
        streams, pre, wanted = end.streams, end.pre, batch.logit_rows
        if len(wanted) < len(streams):  # else all of them, in order
            rows = wanted.to(self.device)
            streams, pre = streams[rows], pre[rows]
        return self._logits(streams, pre, observe or _ignore)

    @torch.no_grad()
    @_quiet
    def decode(self, inputs: DecodeInputs, cache: KVCache) -> Tensor:
        """Logits [B * q, V] of all rows of a decode step of fixed shape, as `forward` gives them.

        Runs the same operators whatever the inputs hold, and never waits for the device.
        """
        step = DecodeStep(self.spec, inputs, self.numerics.accumulate_dtype)
        at = self._start(step, dict(zip(self.engram_layers, inputs.embedded, strict=True)))
        for layer, caches in zip(self._layers, self._layer_caches(cache), strict=True):
            self._whole_layer(layer, at, caches, _ignore, False)
        self._store_draft_context(at, cache, _ignore)
        return self._logits(at.streams, at.pre, _ignore)

    def _store_draft_context(self, end: _Rows, cache: KVCache, observe: Observer) -> None:
        """Store what drafts after these rows will see, where there is a draft module."""
        if self._draft is not None and end.features:
            feature = torch.cat(end.features, dim=-1)
            observe("draft_features", 0, feature)
            self._draft.context(feature, end.step, self._draft_windows(cache), self.ops)

    def _logits(self, streams: Tensor, pre: Tensor, observe: Observer) -> Tensor:
        """Logits [S, V] of streams [S, hc, D] behind the last layer."""
        if self._hc_head is not None:
            head = self._hc_head
            pre = self.ops.hc_head(
                streams, head.fn, head.base, head.scale, self.spec.rms_eps, self.spec.hc_eps
            )
        hidden = self.ops.hc_collapse(streams, pre)
        observe("hidden", self.spec.num_layers, hidden)
        normed = self.ops.rms_norm(hidden, self._norm, self.spec.rms_eps)
        return self.ops.logits(normed, self._head)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, D] in the compute dtype."""
        return self._embed.index_select(0, token_ids).to(self.numerics.torch_dtype)

    def _backbone(self, batch: Batch, cache: KVCache, observe: Observer) -> tuple[_Rows, Batch]:
        """All layers; the consumer layers run on the kept rows only (decoder truncation).

        Returns the rows at the end and the batch that they are.
        """
        embedded = {}
        for number, table in zip(
            self.engram_layers, self.gather_engram(batch, observe), strict=True
        ):
            embedded[number] = table.to(self.device)
        at = self._start(self._step(batch), embedded)
        for layer, caches in zip(self._layers, self._layer_caches(cache), strict=True):
            stored = False
            if layer.spec.index == self.spec.n_prefill_layer and batch.keep_from.any():
                batch, stored = self._enter_consumers(layer, at, batch, caches)
                if batch.total_rows == 0:
                    break  # nothing but prompt rows that the consumers never see
            self._whole_layer(layer, at, caches, observe, stored)
        return at, batch

    def _start(self, step: AnyStep, embedded: dict[int, Tensor]) -> _Rows:
        """The rows in front of the first layer."""
        streams = self.embed(step.token_ids).unsqueeze(1).repeat(1, self.spec.hc_mult, 1)
        dtype = self.numerics.accumulate_dtype
        pre = torch.zeros(streams.shape[:2], dtype=dtype, device=self.device)
        pre[:, 0] = 1.0
        return _Rows(step, streams, pre, embedded)

    def _whole_layer(
        self, layer: Layer, at: _Rows, caches: LayerCaches, observe: Observer, stored: bool
    ) -> None:
        """Engram, attention and experts of one layer; moves `at` on."""
        number = layer.spec.index
        if layer.engram is not None and number in at.embedded:
            at.streams, gate = layer.engram.forward(
                at.streams, at.embedded[number], self.spec, self.ops
            )
            observe("engram_gate", number, gate)
        self._capture(at, number, at_input=True)
        self._layer(layer, at, caches, observe, stored)
        self._capture(at, number, at_input=False)

    def _step(self, batch: Batch) -> Step:
        dtype = self.numerics.accumulate_dtype
        return Step(self.spec, batch, dtype, self.row_tile, self.device)

    def _enter_consumers(
        self, layer: Layer, at: _Rows, batch: Batch, caches: LayerCaches
    ) -> tuple[Batch, bool]:
        """Narrow `at` to what the consumer layers see: (that batch, whether entries are stored).

        The boundary layer stores compressed entries and index keys of all rows first: they are
        all that consumers need of the rows that are left out.
        """
        cut = None if self.truncate_by_mask else batch.kept(self.row_tile)
        if cut is None:
            lowest = batch.q_start - self.spec.window + 1
            if (batch.keep_from > lowest).any():
                batch = batch.consumer_view()
                at.step = self._step(batch)
            return batch, False
        spec, ops = self.spec, self.ops
        x, *_ = layer.hc_attn.enter(at.streams, at.pre, layer.attn_norm, spec, ops)
        layer.attention.store_entries(x, at.step, caches, spec, ops)
        batch, places = cut
        rows = places.to(self.device)
        at.streams, at.pre, at.selection = at.streams[rows], at.pre[rows], None
        at.features = [feature[rows] for feature in at.features]
        at.embedded = {number: table[rows] for number, table in at.embedded.items()}
        if batch.total_rows:
            at.step = self._step(batch)
        return batch, True

    def _layer(
        self, layer: Layer, at: _Rows, caches: LayerCaches, observe: Observer, stored: bool
    ) -> None:
        """Attention and experts of one layer; moves `at` on."""
        spec, ops, number = self.spec, self.ops, layer.spec.index
        x, pre, post, comb = layer.hc_attn.enter(at.streams, at.pre, layer.attn_norm, spec, ops)
        y, at.selection = layer.attention.forward(
            x, at.step, caches, at.selection, spec, self.numerics, ops, stored=stored
        )
        observe("attn_out", number, y)
        if layer.spec.indexes and at.selection is not None:
            observe("top_k", number, at.selection.places)
        streams = ops.hc_merge(y, at.streams, post, comb)
        x, pre, post, comb = layer.hc_ffn.enter(streams, pre, layer.ffn_norm, spec, ops)
        y = layer.moe.forward(x, at.step.token_ids, spec, ops)
        observe("ffn_out", number, y)
        at.streams, at.pre = ops.hc_merge(y, streams, post, comb), pre
        observe("stream_out", number, at.streams)

    @property
    def engram_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have an Engram."""
        return tuple(layer.spec.index for layer in self._layers if layer.engram is not None)

    def gather_engram(self, batch: Batch, observe: Observer | None = None) -> list[Tensor]:
        """Rows of each Engram layer's table, [T, ..] on the host, see `Engram.gather`."""
        if self._token_map is None:
            return []
        compressed = compress_ngrams(batch.ngrams, self._token_map, self._pad)
        found = []
        for layer in self._layers:
            if layer.engram is not None:
                rows = layer.engram.rows(compressed, self.ops)
                (observe or _ignore)("engram_rows", layer.spec.index, rows)
                found.append(layer.engram.gather(rows, self.numerics.torch_dtype, self.device))
        return found

    def _capture(self, at: _Rows, layer: int, *, at_input: bool) -> None:
        """Append the draft's feature of a target layer: the mean over the copies [T, D]."""
        draft = self.spec.draft
        if self._draft is None or draft is None or draft.targets_attn_input != at_input:
            return
        if layer in draft.targets:
            wide = at.streams.to(self.numerics.accumulate_dtype)
            at.features.append(wide.mean(dim=1).to(at.streams.dtype))

    # --- draft ---------------------------------------------------------------------------------

    def _draft_windows(self, cache: KVCache) -> list[RecordView]:
        draft = self.spec.draft
        stages = 0 if draft is None else draft.stages
        return [cache.view("window_draft", stage) for stage in range(stages)]

    @torch.no_grad()
    @_quiet
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

        The arguments may lie on the host; the drafts are on the model's device.
        Raises UnsupportedError where the checkpoint has no draft module or it was not loaded.
        """
        if self._draft is None:
            raise UnsupportedError(
                "This model was loaded without a draft module: load it with with_draft=True, or "
                "take a checkpoint that has mtp.* tensors."
            )
        return self._draft.draft(
            next_ids.to(self.device),
            positions.to(self.device),
            slots.to(self.device),
            self._draft_windows(cache),
            self.embed,
            self._head,
            self.ops,
            length=length,
            pick=pick,
        )


def _ignore(what: str, layer: int, value: Tensor) -> None:
    """The observer of a run that nobody watches."""
