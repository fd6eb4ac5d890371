"""Attention over window keys and compressed entries: one softmax with a sink, keys are values.

Two ways with the same result: dense products (any device, the reference of the other) and PyTorch's
flex attention, a fused GPU kernel that skips tiles without visible pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from train.geometry import BLOCK, Visibility

# (q [B, S, H, d], keys [B, K, d], visibility, selected [B, S, N] or None, scale)
# -> (out [B, S, H, d], log-sum-exp [B, H, S])
Core = Callable[[Tensor, Tensor, Visibility, Tensor | None, float], tuple[Tensor, Tensor]]


def dense_core(
    q: Tensor, keys: Tensor, view: Visibility, selected: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """All pairs in fp32; memory grows with length squared."""
    rows = torch.arange(q.shape[1], device=q.device)
    mask = view.mask(rows)
    if selected is not None:
        mask = mask.clone()
        mask[:, :, q.shape[1] :] &= selected
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    logits = torch.einsum("bshd,bkd->bhsk", q.to(wide), keys.to(wide)) * scale
    logits = logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    p = torch.exp(logits - lse.unsqueeze(-1)).to(q.dtype)
    return torch.einsum("bhsk,bkd->bshd", p, keys), lse


class FlexCore:
    """The fused kernel; compiled once per shape and kind of mask."""

    def __init__(self, compiled: bool = True) -> None:
        self._flex = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def __call__(
        self, q: Tensor, keys: Tensor, view: Visibility, selected: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Core`."""
        kv = keys.unsqueeze(1)
        out, aux = self._flex(
            q.transpose(1, 2),
            kv,
            kv,
            block_mask=block_mask(view, selected, q.shape[1]),
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        return out.transpose(1, 2), aux.lse


def block_mask(view: Visibility, selected: Tensor | None, length: int) -> BlockMask:
    """The tiles to compute and the test of each pair in them."""
    first, last = view.first, view.last

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= first[b, k]) & (q <= last[b, k])

    def chosen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (q >= first[b, k]) & (q <= last[b, k])
        entry = k - length
        return inside & ((entry < 0) | selected[b, q, entry.clamp_min(0)])

    tiles = view.blocks.unsqueeze(1)
    count = tiles.sum(-1).int()
    order = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        count,
        order,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible if selected is None else chosen,
        seq_lengths=(length, first.shape[1]),
    )


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sink's share to the denominator: (out, log-sum-exp with the sink)."""
    total = torch.logaddexp(lse, sink.to(lse.dtype).view(1, -1, 1))
    share = torch.exp(lse - total).transpose(1, 2).unsqueeze(-1)
    return (out * share).to(out.dtype), total
