"""Mixture of experts of one layer: router, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.model.deepseek.parameters import Parameters
from headrace.model.spec import ModelSpec
from headrace.ops.signatures import OpTable
from headrace.ops.stored_weights import Weight


@dataclass(frozen=True, slots=True)
class MoE:
    """gate [E, D]; bias [E] (selection only) or token_experts int64 [V, k] in V4's hash layers.

    w13 [E, 2I, D]: w1 above w3, w2 [E, D, I]; shared13 [2I, D], shared2 [D, I]: of the shared one.
    """

    gate: Tensor
    bias: Tensor | None
    token_experts: Tensor | None
    w13: Weight
    w2: Weight
    shared13: Weight
    shared2: Weight
    experts_per_token: int
    act_group: int

    @classmethod
    def load(
        cls, p: Parameters, num_experts: int, experts_per_token: int, hashed: bool = False
    ) -> MoE:
        """Weights below a layer's "ffn." scope."""

        numbers = range(num_experts)
        shared = p.scope("shared_experts.")
        return cls(
            gate=p.wide("gate.weight"),
            bias=None if hashed else p.wide("gate.bias"),
            token_experts=p.stored("gate.tid2eid") if hashed else None,
            w13=p.stack([[f"experts.{e}.{w}.weight" for w in ("w1", "w3")] for e in numbers]),
            w2=p.stack([[f"experts.{e}.w2.weight"] for e in numbers]),
            shared13=shared.above("w1.weight", "w3.weight"),
            shared2=shared.weight("w2.weight"),
            experts_per_token=experts_per_token,
            act_group=p.act_group,
        )

    def forward(self, x: Tensor, token_ids: Tensor, spec: ModelSpec, ops: OpTable) -> Tensor:
        """x [T, D], token_ids int64 [T] -> [T, D]."""
        chosen = None if self.token_experts is None else self.token_experts[token_ids]
        experts, weights = ops.router(
            x,
            self.gate,
            self.bias,
            chosen,
            self.experts_per_token,
            spec.norm_topk_prob,
            spec.routed_scaling,
        )
        routed, shared = (self.w13, self.w2), (self.shared13, self.shared2)
        return ops.moe(x, experts, weights, *routed, *shared, spec.swiglu_limit, self.act_group)
