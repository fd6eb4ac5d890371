"""Hyper-connection weights of a sublayer and the call of the mixing operator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.model.deepseek.parameters import Parameters
from headrace.model.spec import ModelSpec
from headrace.ops.signatures import OpTable


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """fn [(2 + hc) * hc, hc * D], base [(2 + hc) * hc], scale [3]; fp32 (fp64 in the fp64 mode)."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    @classmethod
    def load(cls, p: Parameters, name: str) -> HyperConnection:
        """`name` is "hc_attn" or "hc_ffn" inside the layer's scope."""
        return cls(p.wide(f"{name}_fn"), p.wide(f"{name}_base"), p.wide(f"{name}_scale"))

    def mix(self, streams: Tensor, spec: ModelSpec, ops: OpTable) -> tuple[Tensor, Tensor, Tensor]:
        """pre [T, hc], post [T, hc], comb [T, hc, hc] of streams [T, hc, D]."""
        return ops.hc_mix(
            streams,
            self.fn,
            self.base,
            self.scale,
            rms_eps=spec.rms_eps,
            hc_eps=spec.hc_eps,
            iterations=spec.hc_iters,
        )
