"""The training forward of V4.1: the product's formulas, batched over packed rows, differentiable.

Formulas come from `headrace.ops.reference`; what differs is only how rows are laid out: attention
over whole rows with masks instead of caches, and all experts in one product with weight 0 where
they were not chosen. `tests/unit/train/test_forward.py` holds it to the product's forward.

A layer is a few pure functions of tensors (`enter_attention`, `make_entries`, `leave_attention`,
`add_engram`, `token_losses`): on the GPU each is compiled once and serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.model.spec import LayerSpec, ModelSpec
from headrace.ops.reference import engram as engram_ops
from headrace.ops.reference.attention import grouped_projection
from headrace.ops.reference.hyper_connections import hc_collapse, hc_merge
from headrace.ops.reference.indexer import pool_groups
from headrace.ops.reference.moe import swiglu
from headrace.ops.reference.norm import linear, norm_rope, rms_norm, rope, wide
from train import indexer, quantise
from train.attention import Core, dense_core, with_sink
from train.geometry import Geometry
from train.parameters import Parameters
from train.sinkhorn import sinkhorn

Pieces = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Mode:
    """How a step runs. sparse: entries are chosen by the indexer, else all visible ones are read.
    rounded: cache rows are rounded to their stored formats. index_rows: queries per row at which
    the indexer learns, 0 = it does not."""

    sparse: bool = False
    rounded: bool = False
    index_rows: int = 0


@dataclass(slots=True)
class Outcome:
    """token_losses fp32 [B, S - 1]: of predicting token i + 1 at i. index_losses by index source.
    loads: rows per expert [E] by layer. logits: only if asked for. With target layers, what a draft
    module learns from: features [B * S, layers * D], the mean of the streams at the input of those
    layers, and hidden [B * S, D], after the final norm."""

    token_losses: Tensor | None
    index_losses: dict[int, Tensor]
    loads: dict[int, Tensor]
    logits: Tensor | None = None
    features: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(slots=True)
class _State:
    """On its way through the layers; the rest belongs to the current sources."""

    streams: Tensor
    pre: Tensor
    entries: Tensor | None = None
    index_keys: Tensor | None = None
    selected: Tensor | None = None
    candidates: Tensor | None = None
    masses: dict[int, Tensor] = field(default_factory=dict)
    predicted: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Forward:
    """The model as a function of its working parameters (see `parameters.working`)."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        core: Core = dense_core,
        fused_sinkhorn: bool = False,
        compiled: bool = False,
        backend: str = "inductor",
    ) -> None:
        self.spec = spec
        self.core = core
        self.fused = fused_sinkhorn

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            if not compiled:
                return function
            # A whole graph is demanded in tests only: in a run a failure shall fall back.
            whole = backend != "inductor"
            return torch.compile(function, dynamic=False, fullgraph=whole, backend=backend)

        self.run_enter_attention = wrap(self.enter_attention)
        self._make_entries = wrap(self.make_entries)
        self.run_leave_attention = wrap(self.leave_attention)
        self._add_engram = wrap(self.add_engram)
        self._token_losses = wrap(self.token_losses)
        self._scores = wrap(indexer.scores)
        self._with_sink = wrap(with_sink)

    # --- whole model ---------------------------------------------------------------------------

    def __call__(
        self,
        p: Parameters,
        geometry: Geometry,
        mode: Mode,
        *,
        index_sample: Tensor | None = None,
        with_logits: bool = False,
        targets: tuple[int, ...] = (),
    ) -> Outcome:
        """index_sample int64 [R]: the queries at which the indexer learns (mode.index_rows).

        targets: layers whose input is wanted, for a draft module; token losses are left out then.
        """
        spec, (rows, length) = self.spec, geometry.shape
        embedded = torch.nn.functional.embedding(geometry.ids.flatten(), p["embed.weight"])
        streams = embedded.unsqueeze(1).repeat(1, spec.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2], dtype=wide(streams[:1]).dtype, device=streams.device)
        pre[:, 0] = 1.0
        at = _State(streams, pre)
        loads = {}
        features: list[Tensor] = []
        for layer in spec.layers:
            self._enter_layer(layer, p, at, geometry)
            if layer.index in targets:
                features.append(wide(at.streams).mean(1).to(at.streams.dtype))
            loads[layer.index] = self._layer(layer, p, at, geometry, mode, index_sample)
        outcome = Outcome(None, self._index_losses(at), loads)
        if with_logits or targets:
            hidden = rms_norm(hc_collapse(at.streams, at.pre), p["norm.weight"], spec.rms_eps)
            if targets:
                outcome.features, outcome.hidden = torch.cat(features, -1), hidden
            if with_logits:
                outcome.logits = linear(hidden, p["head.weight"]).view(rows, length, -1)
        else:
            targets = torch.nn.functional.pad(geometry.ids[:, 1:], (0, 1)).flatten()
            losses = self._token_losses(
                at.streams, at.pre, targets, p["norm.weight"], p["head.weight"]
            )
            outcome.token_losses = losses.view(rows, length)[:, :-1]
        return outcome

    def _enter_layer(self, layer: LayerSpec, p: Parameters, at: _State, geometry: Geometry) -> None:
        """Add the layer's Engram, if it has one."""
        if layer.engram:
            at.streams = self._add_engram(
                at.streams,
                geometry.hashed[layer.index],
                *(p[f"layers.{layer.index}.engram.{part}"] for part in _ENGRAM),
            )

    def _layer(
        self,
        layer: LayerSpec,
        p: Parameters,
        at: _State,
        geometry: Geometry,
        mode: Mode,
        sample: Tensor | None,
    ) -> Tensor:
        """Attention and experts of one layer; moves `at` on and returns the experts' loads."""
        name = f"layers.{layer.index}."
        turn = geometry.compressed if layer.ratio else geometry.plain
        x, qr, q, window, pre, post, comb = self.run_enter_attention(
            at.streams, at.pre, turn, mode.rounded, *(p[name + part] for part in ENTER)
        )
        rows, length = geometry.shape
        keys = window.view(rows, length, -1)
        q = q.view(rows, length, *q.shape[1:])
        if layer.compresses:
            self._store(layer, p, x, at, geometry, mode)
        if layer.indexes:
            self._index(layer, p, x, qr, at, geometry, mode, sample)
        selected = None
        if layer.ratio and at.entries is not None:
            keys = torch.cat((keys, at.entries), dim=1)
            selected = at.selected
        kind = (layer.ratio, layer.index >= self.spec.n_prefill_layer)
        o, lse = self.core(q, keys, geometry.views[kind], selected, self.spec.head_dim**-0.5)
        o, lse = self._with_sink(o, lse, p[name + "attn.attn_sink"])
        if layer.index_source is not None and mode.index_rows and sample is not None:
            self._learn_mass(layer, q, lse, at, geometry, sample)
        at.streams, at.pre, load = self.run_leave_attention(
            o.flatten(0, 1), at.streams, post, comb, pre, turn, *(p[name + s] for s in LEAVE)
        )
        return load

    # --- entries and indexer -------------------------------------------------------------------

    def _store(
        self, layer: LayerSpec, p: Parameters, x: Tensor, at: _State, geometry: Geometry, mode: Mode
    ) -> None:
        name, rows = f"layers.{layer.index}.attn.", geometry.shape[0]
        gate = p.get(name + "compressor.wgate.weight")
        entries, index_keys = self._make_entries(
            x,
            geometry.entry_turns[layer.ratio],
            mode.rounded,
            p[name + "compressor.wkv.weight"],
            gate,
            p[name + "compressor.norm.weight"],
            p[name + "indexer.wk.weight"],
            p[name + "indexer.k_norm.weight"],
        )
        at.entries = entries.view(rows, -1, entries.shape[-1])
        at.index_keys = index_keys.view(rows, -1, index_keys.shape[-1])

    def _index(
        self,
        layer: LayerSpec,
        p: Parameters,
        x: Tensor,
        qr: Tensor,
        at: _State,
        geometry: Geometry,
        mode: Mode,
        sample: Tensor | None,
    ) -> None:
        """Scores of one index source: at the sampled queries to learn, at all to select."""
        spec, (rows, length) = self.spec, geometry.shape
        if at.index_keys is None:
            return
        name = f"layers.{layer.index}.attn.indexer."
        weights = (p[name + "wq_b.weight"], p[name + "weights_proj.weight"])
        view = geometry.views[layer.ratio, layer.index >= spec.n_prefill_layer]
        x, qr = x.detach().view(rows, length, -1), qr.detach().view(rows, length, -1)
        turn = geometry.compressed.view(rows, length, -1, 2)
        if mode.index_rows and sample is not None:
            q, w = self._index_query(x[:, sample], qr[:, sample], turn[:, sample], mode, *weights)
            seen = view.mask(sample)[:, :, length:]
            at.predicted[layer.index] = (indexer.scores(q, w, at.index_keys), seen)
        if not mode.sparse:
            return
        with torch.no_grad():
            q, w = self._index_query(x, qr, turn, mode, *weights)
            source = layer.index == spec.candidate_source
            allowed = None if source or layer.ratio != 1 else at.candidates
            at.selected, found = indexer.select(
                q, w, at.index_keys, view, allowed, spec, source, self._scores
            )
            at.candidates = found if source else at.candidates

    def _index_query(
        self, x: Tensor, qr: Tensor, turn: Tensor, mode: Mode, wq_b: Tensor, proj: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries [B, R, h, d] and head weights [B, R, h]."""
        spec = self.spec
        q = linear(qr, wq_b).unflatten(-1, (spec.index_heads, spec.index_dim))
        q = rope(q.flatten(0, 1), turn.flatten(0, 1)).view(q.shape)
        q = quantise.fp4_groups(q) if mode.rounded else q
        scale = spec.index_dim**-0.5 * spec.index_heads**-0.5
        return q, linear(x, proj) * scale

    def _learn_mass(
        self,
        layer: LayerSpec,
        q: Tensor,
        lse: Tensor,
        at: _State,
        geometry: Geometry,
        sample: Tensor,
    ) -> None:
        """Add the layer's attention to what its index source shall predict."""
        if at.entries is None or layer.index_source not in at.predicted:
            return
        spec = self.spec
        seen = at.predicted[layer.index_source][1]
        mass = indexer.attention_mass(q, at.entries, lse, sample, seen, spec.head_dim**-0.5)
        at.masses[layer.index_source] = at.masses.get(layer.index_source, 0.0) + mass
        first = spec.candidate_source
        if first is not None and layer.index_source > first and first in at.masses:
            # Its candidate blocks bound what later sources can find.
            at.masses[first] = at.masses[first] + 0.5 * mass

    def _index_losses(self, at: _State) -> dict[int, Tensor]:
        return {
            source: indexer.divergence(scores, at.masses[source], seen)
            for source, (scores, seen) in at.predicted.items()
        }

    # --- pure pieces ---------------------------------------------------------------------------

    def _enter(
        self, streams: Tensor, pre: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor
    ) -> Pieces:
        """As the product's `hc_enter`: x and the sublayer's (pre, post, comb)."""
        spec, hc = self.spec, self.spec.hc_mult
        flat = streams.flatten(-2)
        # The product in the stream's dtype: bf16 here costs nothing that training would notice.
        m = wide(flat @ fn.to(flat.dtype).T)
        m = m * torch.rsqrt(wide(flat).square().mean(-1, keepdim=True) + spec.rms_eps)
        own = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + spec.hc_eps
        post = 2.0 * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        comb = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc))
        comb = sinkhorn(comb, spec.hc_iters, spec.hc_eps, self.fused)
        return rms_norm(hc_collapse(streams, pre), norm, spec.rms_eps), own, post, comb

    def enter_attention(
        self,
        streams: Tensor,
        pre: Tensor,
        turn: Tensor,
        rounded: bool,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        wq_a: Tensor,
        q_norm: Tensor,
        wq_b: Tensor,
        wkv: Tensor,
        kv_norm: Tensor,
    ) -> Pieces:
        """(x, query latent, queries [T, H, d], window keys [T, d], pre, post, comb)."""
        spec = self.spec
        x, own, post, comb = self._enter(streams, pre, fn, base, scale, norm)
        both = linear(x, torch.cat((wq_a, wkv)))
        qr = rms_norm(both[:, : spec.q_lora_rank], q_norm, spec.rms_eps)
        q = rope(linear(qr, wq_b).unflatten(-1, (spec.num_heads, spec.head_dim)), turn)
        kv = norm_rope(both[:, spec.q_lora_rank :], kv_norm, spec.rms_eps, turn)
        kv = quantise.fp8_groups(kv) if rounded else kv
        return x, qr, q, kv, own, post, comb

    def make_entries(
        self,
        x: Tensor,
        turn: Tensor,
        rounded: bool,
        wkv: Tensor,
        wgate: Tensor | None,
        norm: Tensor,
        wk: Tensor,
        k_norm: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compressed entries and index keys, [B * N, d] each, of x [B * S, D]."""
        eps = self.spec.rms_eps
        if wgate is None:
            latent = linear(x, wkv)
        else:
            ratio = x.shape[0] // turn.shape[0]
            kv, score = (wide(linear(x, w)).unflatten(0, (-1, ratio)) for w in (wkv, wgate))
            latent = pool_groups(kv, score).to(x.dtype)
        latent = rms_norm(latent, norm, eps)
        index_keys = norm_rope(linear(latent.detach(), wk), k_norm, eps, turn)
        entries = rope(latent, turn)
        if rounded:
            entries = quantise.fp4_entries(entries)
            index_keys = quantise.fp4_groups(index_keys)
        return entries, index_keys

    def leave_attention(
        self,
        o: Tensor,
        streams: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor,
        turn: Tensor,
        wo_a: Tensor,
        wo_b: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        gate: Tensor,
        bias: Tensor,
        w13: Tensor,
        w2: Tensor,
    ) -> Pieces:
        """(streams, pre, loads [E]): attention's output merged, then the layer's experts."""
        y = linear(grouped_projection(rope(o, turn, True), wo_a, self.spec.o_groups), wo_b)
        streams = hc_merge(y, streams, post, comb)
        x, own, post, comb = self._enter(streams, pre, fn, base, scale, norm)
        y, load = self._experts(x, gate, bias, w13, w2)
        return hc_merge(y, streams, post, comb), own, load

    def _experts(
        self, x: Tensor, gate: Tensor, bias: Tensor, w13: Tensor, w2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All experts and the shared one (last) on all rows; those not chosen weigh 0."""
        spec = self.spec
        scores = torch.sqrt(torch.nn.functional.softplus(wide(linear(x, gate))))
        chosen = self._chosen(scores.detach() + bias)
        weights = scores * chosen
        if spec.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * spec.routed_scaling
        weights = torch.cat((weights, torch.ones_like(weights[:, :1])), dim=-1)
        g, u = linear(x, w13).chunk(2, dim=-1)
        a = swiglu(g, u, spec.swiglu_limit).unflatten(-1, (spec.num_experts + 1, -1))
        a = (a * weights.unsqueeze(-1)).flatten(-2).to(x.dtype)
        return linear(a, w2), chosen.sum(0)

    def _chosen(self, scores: Tensor) -> Tensor:
        """1 where an expert is among the row's best, else 0; ties to the lowest."""
        number = torch.arange(scores.shape[-1], device=scores.device)
        chosen = torch.zeros_like(scores)
        for _ in range(self.spec.experts_per_token):
            best = scores.masked_fill(chosen > 0, -torch.inf).argmax(-1, keepdim=True)
            chosen = chosen + (number == best).to(scores.dtype)
        return chosen

    def add_engram(
        self,
        streams: Tensor,
        hashed: Tensor,
        table: Tensor,
        wkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
    ) -> Tensor:
        """Streams with the gated memory of the n-grams' rows [T, columns] added."""
        embedded = torch.nn.functional.embedding(hashed, table).flatten(-2)
        kv = linear(embedded, wkv)
        hc, hidden = streams.shape[-2:]
        key = kv[:, : hc * hidden].unflatten(-1, (hc, hidden))
        weight = wide(q_weight) * wide(k_weight)
        gate = engram_ops.engram_gate(streams, key, weight, self.spec.rms_eps)
        return engram_ops.engram_add(streams, gate, kv[:, hc * hidden :])

    def token_losses(
        self, streams: Tensor, pre: Tensor, targets: Tensor, norm: Tensor, head: Tensor
    ) -> Tensor:
        """Cross-entropy [T] of `targets` [T]."""
        hidden = rms_norm(hc_collapse(streams, pre), norm, self.spec.rms_eps)
        logits = wide(linear(hidden, head))
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


_STREAM = ("fn", "base", "scale")
_ENGRAM = ("embed.weight", "wkv.weight", "q_weight", "k_weight")
ENTER = (
    *(f"hc_attn_{part}" for part in _STREAM),
    "attn_norm.weight",
    *(f"attn.{part}.weight" for part in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm")),
)
LEAVE = (
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    *(f"hc_ffn_{part}" for part in _STREAM),
    "ffn_norm.weight",
    "ffn.gate.weight",
    "ffn.gate.bias",
    "ffn.w13",
    "ffn.w2",
)
