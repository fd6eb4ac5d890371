"""Hyper-connection weights of a sublayer and the call of the mixing operator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from headrace.model.deepseek.parameters import Parameters
from headrace.model.spec import ModelSpec
from headrace.ops.reference.hyper_connections import row_scales
from headrace.ops.signatures import OpTable


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """fn [(2 + hc) * hc, hc * D], base and scale per row of fn; fp32 (fp64 in the fp64 mode).

    Of the head: fn [hc, hc * D].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor

    @classmethod
    def load(cls, p: Parameters, name: str) -> HyperConnection:
        """`name` is "hc_attn" or "hc_ffn" inside the layer's scope, "hc_head" outside."""
        fn, base, scale = (p.wide(f"{name}_{part}") for part in ("fn", "base", "scale"))
        hc = math.isqrt(len(base) + 1) - 1  # len(base) = (2 + hc) * hc
        return cls(fn, base, scale.expand(len(base)) if len(scale) == 1 else row_scales(scale, hc))

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
            self.scale,
            norm,
            rms_eps=spec.rms_eps,
            hc_eps=spec.hc_eps,
            iterations=spec.hc_iters,
        )
