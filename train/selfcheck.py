"""Does the fused code of this machine compute what the plain code does? Asked before training.

A kernel that cannot be built or gives other numbers is left out: slower, but right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.model.spec import ModelSpec
from train.attention import Core, FlexCore, dense_core, with_sink
from train.geometry import GeometryMaker
from train.sinkhorn import sinkhorn


def sinkhorn_works(spec: ModelSpec, device: torch.device) -> bool:
    """Value and gradient of the fused Sinkhorn."""
    try:
        generator = torch.Generator().manual_seed(0)
        x, g = (torch.randn((1000, 4, 4), generator=generator).to(device) * 2 for _ in range(2))

        def both(fused: bool) -> tuple[Tensor, Tensor]:
            leaf = x.clone().requires_grad_(True)
            out = sinkhorn(leaf, spec.hc_iters, spec.hc_eps, fused)
            (out * g).sum().backward()
            assert leaf.grad is not None
            return out.detach(), leaf.grad

        pairs = zip(both(False), both(True), strict=True)
        errors = [float((a - b).abs().max()) for a, b in pairs]
        print(f"selfcheck: sinkhorn errors {errors}", flush=True)
        return max(errors) < 1e-4
    except Exception as error:
        print(f"selfcheck: no fused sinkhorn: {type(error).__name__}: {error}", flush=True)
        return False


def fused_core(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Core | None:
    """Flex attention if it equals the dense products, forward and backward, else None."""
    try:
        core = FlexCore()
        for ratio, sparse in ((0, False), (2, False), (1, True)):
            error = _core_error(core, spec, device, dtype, ratio, sparse)
            print(f"selfcheck: attention ratio {ratio} sparse {sparse}: {error:.5f}", flush=True)
            if not error < 0.03:
                return None
        return core
    except Exception as error:
        print(f"selfcheck: no fused attention: {type(error).__name__}: {error}", flush=True)
        return None


def _core_error(
    core: Core,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    ratio: int,
    sparse: bool,
) -> float:
    """Worst relative error of output and gradients in the 2-norm."""
    length, rows = 512, 2
    positions = torch.cat((torch.arange(200), torch.arange(312))).expand(rows, length).to(device)
    maker = GeometryMaker(spec, None, device, torch.float32)
    geometry = maker.make(torch.zeros_like(positions), positions)
    view = geometry.views[ratio, False]
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = random(rows, length, spec.num_heads, spec.head_dim)
    keys = random(rows, view.first.shape[1], spec.head_dim)
    g = random(*q.shape)
    sink = torch.zeros(spec.num_heads, device=device)
    selected = None
    if sparse:
        selected = random(rows, length, view.first.shape[1] - length) > 0
    results = []
    for one in (dense_core, core):
        a, b = q.clone().requires_grad_(True), keys.clone().requires_grad_(True)
        out, _ = with_sink(*one(a, b, view, selected, spec.head_dim**-0.5), sink)
        (out * g).sum().backward()
        assert a.grad is not None and b.grad is not None
        results.append((out.detach(), a.grad, b.grad))
    return max(
        float((x.float() - y.float()).norm() / x.float().norm())
        for x, y in zip(*results, strict=True)
    )
