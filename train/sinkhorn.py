"""Sinkhorn normalisation of the hyper-connections' mixing matrices as one GPU kernel.

Forty small normalisations per token and sublayer would each go through memory; here a token's
matrix stays in registers. The forward keeps the divisors, from which the backward retraces the
steps. `sinkhorn` falls back to the reference formula where there is no Triton or no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from headrace.ops.reference import hyper_connections as reference

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU machines: the reference formula serves
    triton = None

BLOCK = 64

if triton is not None:

    @triton.jit
    def _forward_kernel(x, out, divisors, n, eps, STEPS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        place = token[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        inside = token[:, None, None] < n
        row_inside = token[:, None] < n
        c = tl.load(x + place, mask=inside, other=0.0)
        c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
        c = c / tl.sum(c, axis=2)[:, :, None] + eps
        at = divisors + token[:, None].to(tl.int64) * (STEPS * 4) + i[None, :]
        for step in range(STEPS):
            if step % 2 == 0:
                d = tl.sum(c, axis=1) + eps
                c = c / d[:, None, :]
            else:
                d = tl.sum(c, axis=2) + eps
                c = c / d[:, :, None]
            tl.store(at + step * 4, d, mask=row_inside)
        tl.store(out + place, c, mask=inside)

    @triton.jit
    def _backward_kernel(
        out, divisors, g_out, g_in, n, eps, STEPS: tl.constexpr, BLOCK: tl.constexpr
    ):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        place = token[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        inside = token[:, None, None] < n
        row_inside = token[:, None] < n
        c = tl.load(out + place, mask=inside, other=0.25)
        g = tl.load(g_out + place, mask=inside, other=0.0)
        at = divisors + token[:, None].to(tl.int64) * (STEPS * 4) + i[None, :]
        for back in range(STEPS):
            step = STEPS - 1 - back
            d = tl.load(at + step * 4, mask=row_inside, other=1.0)
            if step % 2 == 0:
                g = (g - tl.sum(g * c, axis=1)[:, None, :]) / d[:, None, :]
                c = c * d[:, None, :]
            else:
                g = (g - tl.sum(g * c, axis=2)[:, :, None]) / d[:, :, None]
                c = c * d[:, :, None]
        p = c - eps
        g = p * (g - tl.sum(g * p, axis=2)[:, :, None])
        tl.store(g_in + place, g, mask=inside)


@custom_op("headrace_train::sinkhorn", mutates_args=())
def _sinkhorn(x: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    steps = 2 * iterations - 1
    x = x.contiguous()
    out = torch.empty_like(x)
    divisors = torch.empty((x.shape[0], steps, 4), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.shape[0], BLOCK),)
    _forward_kernel[grid](x, out, divisors, x.shape[0], eps, STEPS=steps, BLOCK=BLOCK)
    return out, divisors


@_sinkhorn.register_fake
def _(x: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((x.shape[0], 2 * iterations - 1, 4))


@custom_op("headrace_train::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(out: Tensor, divisors: Tensor, g: Tensor, eps: float) -> Tensor:
    g = g.contiguous()
    g_in = torch.empty_like(g)
    grid = (triton.cdiv(g.shape[0], BLOCK),)
    _backward_kernel[grid](
        out, divisors, g, g_in, g.shape[0], eps, STEPS=divisors.shape[1], BLOCK=BLOCK
    )
    return g_in


@_sinkhorn_backward.register_fake
def _(out: Tensor, divisors: Tensor, g: Tensor, eps: float) -> Tensor:
    return g.new_empty(g.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.eps = inputs[2]


def _gradient(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    out, divisors = ctx.saved_tensors
    return _sinkhorn_backward(out, divisors, g, ctx.eps), None, None


_sinkhorn.register_autograd(_gradient, setup_context=_keep)


def sinkhorn(logits: Tensor, iterations: int, eps: float, fused: bool) -> Tensor:
    """Doubly stochastic matrices [T, 4, 4] of logits, as the reference; `fused` on the GPU."""
    if not fused:
        return reference.sinkhorn(logits, iterations, eps)
    return _sinkhorn(logits, iterations, eps)[0]
