"""DSpark draft module: a few V4.1 blocks that draft a block of tokens from the target's streams.

Forward only: the engine's drafting loop is built on `context` (window keys of rows that the target
has processed) and `draft` (one block per sequence). The block of noise tokens attends to all of
itself and to the window before it; a Markov head then chains the drafts left to right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import UnsupportedError
from headrace.model.deepseek.attention import Projections
from headrace.model.deepseek.decode_step import AnyStep
from headrace.model.deepseek.hyper_connections import HyperConnection
from headrace.model.deepseek.moe import MoE
from headrace.model.deepseek.parameters import Linear, Parameters
from headrace.model.deepseek.step import angles, frequencies_of
from headrace.model.spec import DraftSpec, ModelSpec
from headrace.ops.records import RecordView
from headrace.ops.signatures import OpTable

# (place in the block, logits [B, V]) -> token ids [B]
Pick = Callable[[int, Tensor], Tensor]


def pick_greedy(place: int, logits: Tensor) -> Tensor:
    """The lowest id among the highest logits."""
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class Drafts:
    """token_ids int64 [B, 1 + n] (column 0: the given next token); logits fp32 [B, n, V] before
    (`base_logits`) and after the Markov bias; confidence [B, n], before sigmoid and temperature."""

    token_ids: Tensor
    base_logits: Tensor
    logits: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class Stage:
    """One block of the draft module: window attention and a small mixture of experts."""

    attn_norm: Tensor
    ffn_norm: Tensor
    projections: Projections
    moe: MoE
    hc_attn: HyperConnection
    hc_ffn: HyperConnection

    @classmethod
    def load(cls, p: Parameters, draft: DraftSpec) -> Stage:
        """Weights below an "mtp.i." scope."""
        return cls(
            attn_norm=p.wide("attn_norm.weight"),
            ffn_norm=p.wide("ffn_norm.weight"),
            projections=Projections.load(p.scope("attn.")),
            moe=MoE.load(p.scope("ffn."), draft.num_experts, draft.experts_per_token),
            hc_attn=HyperConnection.load(p, "hc_attn"),
            hc_ffn=HyperConnection.load(p, "hc_ffn"),
        )


@dataclass(frozen=True, slots=True)
class DraftModule:
    """main_proj [D, targets * D] and main_norm turn target features into what the stages' window
    keys are made of; norm, Markov and confidence heads belong to the last stage."""

    spec: ModelSpec
    draft_spec: DraftSpec
    main_proj: Linear
    main_norm: Tensor
    stages: tuple[Stage, ...]
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor

    @classmethod
    def load(cls, p: Parameters, spec: ModelSpec, draft: DraftSpec) -> DraftModule:
        """Weights "mtp.*" of the checkpoint."""
        first, last = p.scope("mtp.0."), p.scope(f"mtp.{draft.stages - 1}.")
        return cls(
            spec=spec,
            draft_spec=draft,
            main_proj=first.linear("main_proj.weight"),
            main_norm=first.wide("main_norm.weight"),
            stages=tuple(Stage.load(p.scope(f"mtp.{i}."), draft) for i in range(draft.stages)),
            norm=last.wide("norm.weight"),
            markov_embed=last.stored("markov_head.embed.weight"),
            markov_head=last.wide("markov_head.head.weight"),
            confidence=last.wide("confidence_head.proj.weight"),
        )

    def context(
        self, features: Tensor, step: AnyStep, windows: list[RecordView], ops: OpTable
    ) -> None:
        """Store each stage's window keys for the step's rows; features [T, targets * D]."""
        x = ops.rms_norm(self.main_proj(features, ops), self.main_norm, self.spec.rms_eps)
        for stage, view in zip(self.stages, windows, strict=True):
            kept = step.kept(view.data.shape[1])
            key = stage.projections.key(x, step.plain, self.spec, ops)
            ops.write_records(view, kept.slots, kept.minor, kept.of(key))

    def draft(
        self,
        next_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        windows: list[RecordView],
        embed: Callable[[Tensor], Tensor],
        head: Tensor,
        ops: OpTable,
        *,
        length: int | None = None,
        pick: Pick = pick_greedy,
    ) -> Drafts:
        """Draft `length` tokens (default: the checkpoint's block size) after `next_ids` [B].

        positions int64 [B]: where next_ids stand; slots int64 [B]. `embed` maps ids to [n, D],
        head [V, D] is the target's. Raises UnsupportedError for a length above the block size.
        """
        n = self.draft_spec.block_size if length is None else length
        if not 1 <= n <= self.draft_spec.block_size:
            raise UnsupportedError(
                f"draft length {n} is not in [1, {self.draft_spec.block_size}]: this checkpoint "
                f"was trained with blocks of {self.draft_spec.block_size}.",
                param="draft_length",
            )
        hidden = self._block(next_ids, positions, slots, windows, embed, n, ops)
        normed = ops.rms_norm(hidden, self.norm, self.spec.rms_eps)
        base = ops.logits(normed.flatten(0, 1), head).unflatten(0, (-1, n))
        return self._chain(next_ids, hidden, base, pick)

    def _block(
        self,
        next_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        windows: list[RecordView],
        embed: Callable[[Tensor], Tensor],
        n: int,
        ops: OpTable,
    ) -> Tensor:
        """Collapsed hidden [B, n, D], before the final norm."""
        spec, batch, device = self.spec, next_ids.shape[0], next_ids.device
        ids = torch.full((batch, n), self.draft_spec.noise_id, dtype=torch.int64, device=device)
        ids[:, 0] = next_ids
        ids = ids.flatten()
        places = (positions.unsqueeze(-1) + torch.arange(n, device=device)).flatten()
        streams = embed(ids).unsqueeze(1).repeat(1, spec.hc_mult, 1)
        wide = torch.float64 if streams.dtype == torch.float64 else torch.float32
        frequencies = frequencies_of(spec, 0, wide, str(device))
        rotation = angles(places, frequencies, wide)
        index = self._key_index(positions, n)
        pre = torch.zeros((batch * n, spec.hc_mult), dtype=wide, device=device)
        pre[:, 0] = 1.0
        for stage, view in zip(self.stages, windows, strict=True):
            x, pre, post, comb = stage.hc_attn.enter(streams, pre, stage.attn_norm, spec, ops)
            y = self._attend(stage, x, positions, slots, view, index, rotation, ops)
            streams = ops.hc_merge(y, streams, post, comb)
            x, pre, post, comb = stage.hc_ffn.enter(streams, pre, stage.ffn_norm, spec, ops)
            streams = ops.hc_merge(stage.moe.forward(x, ids, spec, ops), streams, post, comb)
        return ops.hc_collapse(streams, pre).unflatten(0, (batch, n))

    def _key_index(self, positions: Tensor, n: int) -> Tensor:
        """int64 [B * n, W + n] into (context [B * W], block [B * n]); the same for all n rows."""
        batch, width = positions.shape[0], self.spec.window
        device = positions.device
        sequence = torch.arange(batch, device=device).unsqueeze(-1)
        before = torch.arange(width, device=device)
        exists = positions.unsqueeze(-1) - width + before >= 0
        context = torch.where(exists, sequence * width + before, -1)
        block = batch * width + sequence * n + torch.arange(n, device=device)
        return torch.cat((context, block), dim=-1).repeat_interleave(n, dim=0)

    def _attend(
        self,
        stage: Stage,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: RecordView,
        index: Tensor,
        rotation: Tensor,
        ops: OpTable,
    ) -> Tensor:
        """Attention of the block's rows over the W positions before it and all of its own rows."""
        spec, projections = self.spec, stage.projections
        _, q = projections.query(x, rotation, spec, ops)
        own = ops.round_rows(projections.key(x, rotation, spec, ops), view)
        reach = torch.arange(-spec.window, 0, device=positions.device)
        before = (positions.unsqueeze(-1) + reach).clamp_min(0)
        minor = before % view.data.shape[1]
        context = ops.read_records(view, slots.unsqueeze(-1).expand_as(minor), minor, own.dtype)
        keys = torch.cat((context.flatten(0, 1), own))
        none = torch.empty((x.shape[0], 0), dtype=torch.int64, device=x.device)
        scale = spec.head_dim**-0.5
        o = ops.sparse_attention(q, keys, index, None, none, none, projections.sink, scale)
        return projections.output(o, rotation, spec, ops)

    def _chain(self, next_ids: Tensor, hidden: Tensor, base: Tensor, pick: Pick) -> Drafts:
        """Add the Markov bias of each chosen token to the next place's logits."""
        ids, logits, confidence = [next_ids], [], []
        for place in range(base.shape[1]):
            previous = self.markov_embed[ids[-1]].to(base.dtype)
            logits.append(base[:, place] + previous @ self.markov_head.to(base.dtype).T)
            # The confidence head reads the hidden before the final norm, and the token before.
            seen = torch.cat((hidden[:, place].to(base.dtype), previous), dim=-1)
            confidence.append((seen @ self.confidence.to(base.dtype).T).squeeze(-1))
            ids.append(pick(place, logits[-1]))
        return Drafts(
            torch.stack(ids, dim=1), base, torch.stack(logits, dim=1), torch.stack(confidence, 1)
        )
