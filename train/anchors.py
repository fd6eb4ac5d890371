"""Which blocks of a packed batch a draft module learns from: anchors, labels and windows.

An anchor is a token of an answer that is followed by another one; it stands for the newest sampled
token of a decode round. A place of its block counts as long as the answer goes on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.model.deepseek.step import angles, inverse_frequencies
from headrace.model.spec import ModelSpec
from train.draft_forward import Blocks, draft_spec


def sample_anchors(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Flat places int64 [count] of anchors in weights fp32 [B, S], the loss weights of the tokens.

    Drawn without replacement, more often where the weight is higher. Where the batch has fewer, the
    rest are places whose blocks count nowhere.
    """
    follows = torch.nn.functional.pad(weights[:, 1:], (0, 1))
    allowed = (weights > 0) & (follows > 0)
    drawn = torch.rand(weights.shape, generator=generator).to(weights.device)
    # The largest u^(1/w) are a sample with probabilities proportional to w.
    score = drawn.clamp_min(1e-9).log() / weights.clamp_min(1e-6)
    return score.masked_fill(~allowed, -torch.inf).flatten().topk(count).indices


class BlockMaker:
    """Cuts blocks out of batches on one device."""

    def __init__(self, spec: ModelSpec, device: torch.device, wide: torch.dtype) -> None:
        self.spec = spec
        self.draft = draft_spec(spec)
        self.wide = wide
        self.device = device
        self.frequencies = inverse_frequencies(spec.rope_theta, spec.rope_dim, None).to(device)

    def turns(self, positions: Tensor) -> Tensor:
        """Rotations [n, R, 2] of positions int64 [n]."""
        return angles(positions, self.frequencies, self.wide)

    def make(self, anchors: Tensor, ids: Tensor, positions: Tensor, weights: Tensor) -> Blocks:
        """anchors int64 [A], flat places; ids, positions int64 and weights fp32 [B, S]."""
        n, length = self.draft.block_size, ids.shape[1]
        steps = torch.arange(n, device=self.device)
        place = anchors.unsqueeze(-1) + steps  # of the token before each label
        after = place + 1
        position = positions.flatten()[anchors].unsqueeze(-1)
        last = ids.numel() - 1
        inside = after // length == (anchors // length).unsqueeze(-1)
        inside &= positions.flatten()[after.clamp_max(last)] == position + steps + 1
        answer = weights.flatten()[after.clamp_max(last)] > 0
        start = weights.flatten()[anchors].unsqueeze(-1) > 0
        counts = (inside & answer & start).long().cumprod(-1).bool()
        place, after = place.clamp_max(last), after.clamp_max(last)
        flat = ids.flatten()
        tokens = torch.full_like(place, self.draft.noise_id)
        tokens[:, 0] = flat[anchors]
        back = torch.arange(self.spec.window, device=self.device) - self.spec.window
        return Blocks(
            ids=tokens,
            turn=self.turns((position + steps).flatten()),
            window=(anchors.unsqueeze(-1) + back).clamp_min(0),
            exists=position + back >= 0,
            previous=flat[place],
            labels=flat[after],
            source=place,
            counts=counts,
        )
