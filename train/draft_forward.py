"""The training forward of a draft module: many blocks of packed rows at once, differentiable.

A block is what the product drafts in one round: an anchor (the newest token) and noise tokens,
which see the target's rows before the anchor, at most a window of them, and each other. A stage is
a layer of `train.forward` but for its keys; `tests/unit/train/test_draft_forward.py` holds the
whole to `headrace.model.deepseek.dspark`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ModelConfigError
from headrace.model.spec import DraftSpec, ModelSpec
from headrace.ops.reference.attention import attend
from headrace.ops.reference.hyper_connections import hc_collapse
from headrace.ops.reference.norm import linear, norm_rope, rms_norm, wide
from train import quantise
from train.forward import ENTER, LEAVE, Forward
from train.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Blocks:
    """A blocks of n rows, cut out of packed rows with T tokens.

    ids int64 [A, n]: anchor, then noise. turn [A * n, R, 2]: rotation of its rows. window int64
    [A, W]: the tokens before the anchor; exists bool [A, W]. previous, labels int64 [A, n]: the
    tokens that a place follows and that it shall draft. source int64 [A, n]: the token whose target
    logits say what the label may be. counts bool [A, n]: places that have a label.
    """

    ids: Tensor
    turn: Tensor
    window: Tensor
    exists: Tensor
    previous: Tensor
    labels: Tensor
    source: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """hidden [A * n, D], before the final norm; loads: rows per expert [E] by stage."""

    hidden: Tensor
    loads: dict[int, Tensor]


def draft_spec(spec: ModelSpec) -> DraftSpec:
    """The spec's draft module. Raises ModelConfigError where it has none."""
    if spec.draft is None:
        raise ModelConfigError(
            "config.json describes no draft module: set num_nextn_predict_layers and the dspark_* "
            "fields (`train.config.with_draft` adds them).",
            param="num_nextn_predict_layers",
        )
    return spec.draft


class DraftForward:
    """The draft module as a function of its working parameters (see `parameters.working`)."""

    def __init__(
        self, spec: ModelSpec, *, fused_sinkhorn: bool = False, compiled: bool = False
    ) -> None:
        self.spec = spec
        self.draft = draft_spec(spec)
        narrow = replace(
            spec,
            num_experts=self.draft.num_experts,
            experts_per_token=self.draft.experts_per_token,
        )
        self._layer = Forward(narrow, fused_sinkhorn=fused_sinkhorn, compiled=compiled)

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._keys = wrap(self.keys)
        self._attend = wrap(self.attend)

    def __call__(
        self,
        p: Parameters,
        embed: Tensor,
        features: Tensor,
        turn: Tensor,
        blocks: Blocks,
        rounded: bool,
    ) -> Drafted:
        """embed [V, D] is the target's; features [T, targets * D] and turn [T, R, 2] of all rows.

        rounded: window keys are rounded to their stored format, as the product keeps them.
        """
        spec, (count, rows) = self.spec, blocks.ids.shape
        x = rms_norm(
            linear(features, p["mtp.0.main_proj.weight"]),
            p["mtp.0.main_norm.weight"],
            spec.rms_eps,
        )
        tokens = torch.nn.functional.embedding(blocks.ids.flatten(), embed)
        streams = tokens.unsqueeze(1).repeat(1, spec.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2], dtype=wide(streams[:1]).dtype, device=streams.device)
        pre[:, 0] = 1.0
        loads = {}
        for stage in range(self.draft.stages):
            name = f"mtp.{stage}."
            context = self._keys(
                x, turn, p[name + "attn.wkv.weight"], p[name + "attn.kv_norm.weight"], rounded
            )
            enter = (p[name + part] for part in ENTER)
            _, _, q, own, pre, post, comb = self._layer.run_enter_attention(
                streams, pre, blocks.turn, rounded, *enter
            )
            o = self._attend(
                q.view(count, rows, *q.shape[1:]),
                context[blocks.window],
                own.view(count, rows, -1),
                blocks.exists,
                p[name + "attn.attn_sink"],
            )
            streams, pre, loads[stage] = self._layer.run_leave_attention(
                o, streams, post, comb, pre, blocks.turn, *(p[name + part] for part in LEAVE)
            )
        return Drafted(hc_collapse(streams, pre), loads)

    def keys(self, x: Tensor, turn: Tensor, wkv: Tensor, norm: Tensor, rounded: bool) -> Tensor:
        """Window keys [T, d] of the target's rows x [T, D]."""
        key = norm_rope(linear(x, wkv), norm, self.spec.rms_eps, turn)
        return quantise.fp8_groups(key) if rounded else key

    def attend(
        self, q: Tensor, context: Tensor, own: Tensor, exists: Tensor, sink: Tensor
    ) -> Tensor:
        """q [A, n, H, d] over context [A, W, d] where `exists` and own [A, n, d] -> [A * n, H, d].

        All rows of a block see the same keys, so that they count as further heads.
        """
        count, rows, heads, _ = q.shape
        keys = torch.cat((context, own), dim=1)
        valid = torch.cat((exists, torch.ones_like(exists[:, :1]).expand(count, rows)), dim=1)
        o = attend(q.flatten(1, 2), keys, valid, sink.repeat(rows), self.spec.head_dim**-0.5)
        return o.view(count * rows, heads, -1)


@dataclass(frozen=True, slots=True)
class Judged:
    """What the losses compare, [A, n]: cross (entropy of the labels), distance (sum of absolute
    differences to the target's distribution), agreement (1 - distance / 2, no gradient), confidence
    (before the sigmoid), right (the highest logit is the target's)."""

    cross: Tensor
    distance: Tensor
    agreement: Tensor
    confidence: Tensor
    right: Tensor


def judge(
    p: Parameters,
    stage: str,
    head: Tensor,
    eps: float,
    hidden: Tensor,
    target_hidden: Tensor,
    previous: Tensor,
    labels: Tensor,
) -> Judged:
    """Compare the drafts of rows [N] with the target's distribution, at temperature 1.

    stage: prefix of the last one. head [V, D] and target_hidden [N, D] (after its final norm) are
    the target's; hidden [N, D]; previous, labels int64 [N].
    """
    before = torch.nn.functional.embedding(previous, p[stage + "markov_head.embed.weight"])
    normed = rms_norm(hidden, p[stage + "norm.weight"], eps)
    # Products in fp32: a logit rounded to bf16 is off by more than drafts and target differ.
    head = wide(head)
    logits = linear(wide(normed), head)
    logits = logits + linear(wide(before), wide(p[stage + "markov_head.head.weight"]))
    with torch.no_grad():
        wanted = linear(wide(target_hidden), head)
        right = wanted.argmax(-1) == logits.argmax(-1)
        wanted = torch.softmax(wanted, -1)
    log_p = torch.log_softmax(logits, -1)
    distance = (log_p.exp() - wanted).abs().sum(-1)
    cross = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    seen = torch.cat((hidden, before.to(hidden.dtype)), -1)
    confidence = wide(linear(seen, p[stage + "confidence_head.proj.weight"])).squeeze(-1)
    agreement = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)
    return Judged(cross, distance, agreement, confidence, right)
