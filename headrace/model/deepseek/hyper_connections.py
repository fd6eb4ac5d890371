"""Hyper-connection weights of a sublayer and the call of the mixing operator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.model.deepseek.parameters import Parameters
from headrace.model.spec import ModelSpec
from headrace.ops.reference.hyper_connections import scaled
from headrace.ops.signatures import OpTable


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """fn [(2 + hc) * hc, hc * D] times its scales, base [(2 + hc) * hc]; fp32 (fp64 in that mode).

    Of the head: [hc, hc * D] and [hc].
    """

    fn: Tensor
    base: Tensor

    @classmethod
    def load(cls, p: Parameters, name: str) -> HyperConnection:
        """`name` is "hc_attn" or "hc_ffn" inside the layer's scope, "hc_head" outside."""
        fn = scaled(p.wide(f"{name}_fn"), p.wide(f"{name}_scale"))
        return cls(fn, p.wide(f"{name}_base"))

    def enter(
        self, streams: Tensor, before: Tensor, norm: Tensor, spec: ModelSpec, ops: OpTable
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalised input x [T, D] of the sublayer, pre and post [T, hc], comb [T, hc, hc].

        before [T, hc]: pre of the sublayer before this one, which V4.1 collapses the streams with.
        """
        return ops.hc_enter(
            streams,
            before if spec.hc_shifted else None,
            self.fn,
            self.base,
            norm,
            rms_eps=spec.rms_eps,
            hc_eps=spec.hc_eps,
            iterations=spec.hc_iters,
        )
