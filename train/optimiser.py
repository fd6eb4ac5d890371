"""Muon for hidden matrices, AdamW for everything else, and the router biases' own rule.

Muon orthogonalises the momentum of a matrix (Newton-Schulz, bf16), which needs markedly fewer
tokens than AdamW at this size; matrices of equal shape are done in one batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.model.spec import ModelSpec
from train.parameters import Parameters, trainable

MUON_RATE = 0.02
MOMENTUM = 0.95
DECAY = 0.02
BIAS_STEP = 1e-3
# Learning rates of AdamW by the end of the name; the first that fits.
ADAM_RATES = (
    ("engram.embed.weight", 6e-3),
    ("embed.weight", 4e-3),
    ("head.weight", 2e-3),
    ("_fn", 5e-4),
    ("gate.weight", 1e-3),
    ("", 2e-3),
)


def uses_muon(name: str, master: Tensor) -> bool:
    """Matrices between hidden vectors; not tables, heads, routers or the indexer."""
    if name.endswith(("embed.weight", "head.weight", "gate.weight", "_fn")):
        return False
    if any(part in name for part in ("indexer", "q_weight", "k_weight", "confidence_head")):
        return False
    return master.ndim >= 2


def orthogonalised(g: Tensor) -> Tensor:
    """Newton-Schulz iteration on matrices [n, a, b]: singular values to about 1."""
    x = g.to(torch.bfloat16 if g.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


class Optimiser:
    """Both methods over the masters; `step(rate)` scales all learning rates."""

    def __init__(self, masters: Parameters, spec: ModelSpec) -> None:
        self.masters = masters
        self.groups = spec.o_groups
        self.muon: dict[tuple[int, ...], list[str]] = {}
        self.momentum: dict[str, Tensor] = {}
        self.by_adam: list[str] = []
        adam: dict[float, list[Tensor]] = {}
        for name, master in masters.items():
            if not trainable(name):
                continue
            master.requires_grad_(True)
            if uses_muon(name, master):
                self.momentum[name] = torch.zeros_like(master, requires_grad=False)
                shape = self._matrices(name, master).shape[-2:]
                self.muon.setdefault(tuple(shape), []).append(name)
            else:
                rate = next(r for end, r in ADAM_RATES if name.endswith(end))
                adam.setdefault(rate, []).append(master)
                self.by_adam.append(name)
        self.adam = torch.optim.AdamW(
            [{"params": p, "lr": rate, "base": rate} for rate, p in adam.items()],
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=next(iter(masters.values())).is_cuda,
        )

    def _matrices(self, name: str, x: Tensor) -> Tensor:
        """A master as a batch of matrices: experts are one each, as are wo_a's groups."""
        if name.endswith("wo_a.weight"):
            return x.unflatten(0, (self.groups, -1))
        return x if x.ndim == 3 else x.unsqueeze(0)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients with all rates times `rate`, and clear them."""
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for shape, names in self.muon.items():
            self._muon_step(shape, names, MUON_RATE * rate)

    def _muon_step(self, shape: tuple[int, ...], names: list[str], rate: float) -> None:
        names = [n for n in names if self.masters[n].grad is not None]
        if not names:
            return
        gradients = [self.masters[n].grad for n in names]
        moments = [self.momentum[n] for n in names]
        torch._foreach_lerp_(moments, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, moments, MOMENTUM)
        batch = [self._matrices(n, u) for n, u in zip(names, ahead, strict=True)]
        update = orthogonalised(torch.cat(batch)).float()
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        at = 0
        for name, part in zip(names, batch, strict=True):
            master = self.masters[name]
            master.mul_(1 - rate * DECAY)
            piece = update[at : at + len(part)].reshape(master.shape)
            master.add_(piece, alpha=-rate * scale)
            master.grad = None
            at += len(part)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: "momentum/NAME", "step/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME"."""
        state = {f"momentum/{name}": moment for name, moment in self.momentum.items()}
        for name in self.by_adam:
            for key, value in self.adam.state[self.masters[name]].items():
                state[f"{key}/{name}"] = value
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up `state` again. Raises KeyError for a name that this model lacks."""
        for place, value in state.items():
            key, _, name = place.partition("/")
            if key == "momentum":
                self.momentum[name].copy_(value)
            else:
                master = self.masters[name]
                self.adam.state[master][key] = value.to(master.device, torch.float32)


@torch.no_grad()
def balance(masters: Parameters, loads: Mapping[int, Tensor], rate: float, kind: str) -> None:
    """Move router biases against the loads by layer (noaux_tc). kind: "layers", or "mtp" for the
    stages of a draft module."""
    for layer, load in loads.items():
        bias = masters[f"{kind}.{layer}.ffn.gate.bias"]
        load = load.detach().to(bias.dtype)
        bias.add_(torch.sign(load.mean() - load), alpha=BIAS_STEP * rate)
        bias.sub_(bias.mean())
