"""Compressor: pools the tokens of a group into one latent per compressed entry.

Ratio 1 (V4.1's decoder) is a plain projection; other ratios pool `ratio` tokens (V4's ratio 4 also
the group before) by a softmax per channel and keep the open tokens in the request's state rows.
A latent is normalised, not yet rotated and not quantised: index keys are derived from it so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.deepseek.parameters import Parameters
from headrace.model.deepseek.step import Completed, Step
from headrace.ops.records import RecordView
from headrace.ops.reference.norm import wide
from headrace.ops.signatures import OpTable


@dataclass(frozen=True, slots=True)
class Compressor:
    """wkv [c, D], wgate [c, D] (None for ratio 1), ape [ratio, c] or None, norm [width].

    c = 2 * width where groups overlap, else width.
    """

    ratio: int
    width: int
    overlap: bool
    wkv: Tensor
    wgate: Tensor | None
    ape: Tensor | None
    norm: Tensor

    @classmethod
    def load(cls, p: Parameters, ratio: int, width: int, overlap: bool) -> Compressor:
        """Weights below a "compressor." scope."""
        pooled = p.has("wgate.weight")
        return cls(
            ratio=ratio,
            width=width,
            overlap=overlap,
            # The released path promotes pooled projections to fp32.
            wkv=p.wide("wkv.weight") if pooled else p.plain("wkv.weight"),
            wgate=p.wide("wgate.weight") if pooled else None,
            ape=p.wide("ape") if p.has("ape") else None,
            norm=p.wide("norm.weight"),
        )

    def completed(self, step: Step) -> Completed:
        """The entries that this step completes."""
        return step.completed(self.ratio, self.ratio * (2 if self.overlap else 1))

    def forward(
        self, x: Tensor, step: Step, state: RecordView | None, eps: float, ops: OpTable
    ) -> Tensor:
        """Latents [E, width] of the completed entries from x [T, D]; updates the state rows."""
        done = self.completed(step)
        if self.wgate is None or state is None:
            return ops.rms_norm(ops.linear(x, self.wkv)[done.rows], self.norm, eps)
        pooled = self._pool(self._open_rows(x, step, state, ops), done, ops)
        return ops.rms_norm(pooled.to(x.dtype), self.norm, eps)

    def _open_rows(self, x: Tensor, step: Step, state: RecordView, ops: OpTable) -> Tensor:
        """(kv | score) [B * reach + T, 2c] of history and chunk; stores the chunk's last rows."""
        wx = wide(x)
        score = ops.linear(wx, self.wgate)
        if self.ape is not None:
            score = score + self.ape[step.batch.positions % self.ratio]
        rows = torch.cat((ops.linear(wx, self.wkv), score), dim=-1)
        reach = self.ratio * (2 if self.overlap else 1) - 1
        history = step.history(reach, state.data.shape[1], replayed=False)
        before = ops.read_records(state, history.slots, history.minor, rows.dtype)
        kept = history.write_rows
        ops.write_records(state, history.write_slots, history.write_minor, rows[kept])
        return torch.cat((before.flatten(0, 1), rows))

    def _pool(self, rows: Tensor, done: Completed, ops: OpTable) -> Tensor:
        """Pooled channels [E, width] of the groups that completed."""
        present = (done.tokens >= 0).unsqueeze(-1)
        kv, score = rows[done.tokens.clamp_min(0)].chunk(2, dim=-1)
        kv = kv.masked_fill(~present, 0.0)
        score = score.masked_fill(~present, -torch.inf)
        if self.overlap:
            kv, score = self._half_channels(kv), self._half_channels(score)
        return ops.pool_groups(kv, score)

    def _half_channels(self, rows: Tensor) -> Tensor:
        """Overlap: first half of the channels for the group before, second half for this one."""
        before, current = rows[:, : self.ratio, : self.width], rows[:, self.ratio :, self.width :]
        return torch.cat((before, current), dim=1)
