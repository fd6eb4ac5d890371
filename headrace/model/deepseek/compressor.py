"""Compressor: pools the tokens of a group into one latent per compressed entry.

Ratio 1 (V4.1's decoder) is a plain projection; other ratios pool `ratio` tokens (V4's ratio 4 also
the group before) by a softmax per channel and keep the open tokens in the request's state rows.
A latent is normalised, not yet rotated and not quantised: index keys are derived from it so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.deepseek.decode_step import AnyStep
from headrace.model.deepseek.parameters import Parameters
from headrace.model.deepseek.step import Completed
from headrace.ops.records import RecordView
from headrace.ops.reference.norm import wide
from headrace.ops.signatures import OpTable


@dataclass(frozen=True, slots=True)
class Compressor:
    """weight [c, D] for ratio 1, else wkv above wgate [2c, D]; norm [width].

    c = 2 * width where groups overlap, else width. ape [ratio, c] or None: added to the score by
    place in the group.
    """

    ratio: int
    width: int
    overlap: bool
    pooled: bool
    weight: Tensor
    ape: Tensor | None
    norm: Tensor

    @classmethod
    def load(cls, p: Parameters, ratio: int, width: int, overlap: bool) -> Compressor:
        """Weights below a "compressor." scope."""
        pooled = p.has("wgate.weight")
        # The released path promotes pooled projections to fp32.
        weight = (
            torch.cat((p.wide("wkv.weight"), p.wide("wgate.weight")))
            if pooled
            else p.plain("wkv.weight")
        )
        return cls(
            ratio=ratio,
            width=width,
            overlap=overlap,
            pooled=pooled,
            weight=weight,
            ape=p.wide("ape") if p.has("ape") else None,
            norm=p.wide("norm.weight"),
        )

    @property
    def reach(self) -> int:
        """Tokens that an entry pools."""
        return self.ratio * (2 if self.overlap else 1)

    def completed(self, step: AnyStep) -> Completed:
        """The entries that this step completes."""
        return step.completed(self.ratio, self.reach)

    def forward(
        self, x: Tensor, step: AnyStep, state: RecordView | None, eps: float, ops: OpTable
    ) -> Tensor:
        """Latents [E, width] of the completed entries from x [T, D]; updates the state rows."""
        done = self.completed(step)
        if not self.pooled or state is None:
            return ops.rms_norm(ops.linear(done.of(x), self.weight), self.norm, eps)
        rows = ops.linear(wide(x), self.weight)  # kv | score
        before = None
        if done.count:
            # Read before the chunk's rows are stored: their places overlap.
            slots, minor = step.history(self.reach - 1, state.data.shape[1])
            before = ops.read_records(state, slots, minor, rows.dtype)
        kept = step.kept(state.data.shape[1], replayed=False)
        ops.write_records(state, kept.slots, kept.minor, kept.of(rows))
        if before is None:
            return x.new_empty((0, self.width))
        both = torch.cat((before.flatten(0, 1), rows))
        pooled = ops.pool_entries(both, done.tokens, self.ape, self.overlap)
        return ops.rms_norm(pooled.to(x.dtype), self.norm, eps)
