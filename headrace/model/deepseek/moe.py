"""Mixture of experts of one layer: router, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.model.deepseek.parameters import Parameters
from headrace.model.spec import ModelSpec
from headrace.ops.signatures import OpTable


@dataclass(frozen=True, slots=True)
class MoE:
    """gate [E, D]; bias [E] (selection only) or token_experts int64 [V, k] in V4's hash layers.

    w1, w3 [E, I, D], w2 [E, D, I]; shared: w1, w3, w2 of the shared expert.
    """

    gate: Tensor
    bias: Tensor | None
    token_experts: Tensor | None
    w1: Tensor
    w3: Tensor
    w2: Tensor
    shared: tuple[Tensor, Tensor, Tensor]
    experts_per_token: int
    act_group: int

    @classmethod
    def load(
        cls, p: Parameters, num_experts: int, experts_per_token: int, hashed: bool = False
    ) -> MoE:
        """Weights below a layer's "ffn." scope."""

        def experts(w: str) -> Tensor:
            return p.stack([f"experts.{e}.{w}.weight" for e in range(num_experts)])

        return cls(
            gate=p.wide("gate.weight"),
            bias=None if hashed else p.wide("gate.bias"),
            token_experts=p.stored("gate.tid2eid") if hashed else None,
            w1=experts("w1"),
            w3=experts("w3"),
            w2=experts("w2"),
            shared=(
                p.plain("shared_experts.w1.weight"),
                p.plain("shared_experts.w3.weight"),
                p.plain("shared_experts.w2.weight"),
            ),
            experts_per_token=experts_per_token,
            act_group=p.act_group,
        )

    def forward(self, x: Tensor, token_ids: Tensor, spec: ModelSpec, ops: OpTable) -> Tensor:
        """x [T, D], token_ids int64 [T] -> [T, D]."""
        scores = ops.router_scores(x, self.gate)
        if self.token_experts is not None:
            chosen, weights = ops.route_hashed(
                scores, self.token_experts[token_ids], spec.norm_topk_prob, spec.routed_scaling
            )
        else:
            chosen, weights = ops.route(
                scores, self.bias, self.experts_per_token, spec.norm_topk_prob, spec.routed_scaling
            )
        limit, group = spec.swiglu_limit, self.act_group
        routed = ops.moe_experts(x, chosen, weights, self.w1, self.w3, self.w2, limit, group)
        shared = ops.expert_mlp(x, *self.shared, None, limit, group)
        return (routed + shared.to(routed.dtype)).to(x.dtype)
