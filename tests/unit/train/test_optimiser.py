"""Muon, AdamW and the router biases' rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.train.small import SPEC, masters
from train import optimiser as module
from train.optimiser import BIAS_STEP, Optimiser, balance, orthogonalised
from train.parameters import Parameters, trainable


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 64, 32), (2, 32, 96)])
def test_muon_brings_singular_values_to_about_one_and_keeps_the_directions(
    shape: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(1)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    # Two decades of singular values, at any scale of the whole.
    s = torch.logspace(0, -2, min(shape[1:]))
    g = u @ torch.diag(s).expand(shape[0], -1, -1) @ v
    for scale in (1e-6, 1.0, 1e6):
        found = u.mT @ orthogonalised(g * scale) @ v.mT
        values = found.diagonal(dim1=-2, dim2=-1)
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
        assert float((found - torch.diag_embed(values)).abs().max()) < 1e-3


def gradients(step: int) -> Parameters:
    generator = torch.Generator().manual_seed(100 + step)
    found = {
        name: torch.randn(master.shape, generator=generator)
        for name, master in masters().items()
        if trainable(name)
    }
    # None so small that AdamW's epsilon shows.
    return {name: gradient + 0.01 * gradient.sign() for name, gradient in found.items()}


def stepped(run: Optimiser, *steps: int, rate: float = 0.5) -> Parameters:
    for step in steps:
        for name, gradient in gradients(step).items():
            run.masters[name].grad = gradient.clone()
        run.step(rate)
    return {name: master.detach().clone() for name, master in run.masters.items()}


def test_every_trainable_master_is_moved_by_one_of_the_two_and_no_other() -> None:
    run = Optimiser(masters(), SPEC)
    by_muon = [name for names in run.muon.values() for name in names]
    assert sorted(by_muon + run.by_adam) == sorted(n for n in run.masters if trainable(n))
    assert not set(by_muon) & set(run.by_adam)
    assert "layers.0.attn.wq_b.weight" in by_muon and "layers.2.ffn.experts.w2" in by_muon
    for part in ("embed.weight", "head.weight", "ffn.gate.weight", "hc_attn_fn", "attn_sink"):
        assert not [name for name in by_muon if name.endswith(part)], part
    assert not [name for name in by_muon if "indexer" in name]
    after = stepped(run, 1)
    for name, master in masters().items():
        assert torch.equal(after[name], master) != trainable(name), name
    assert all(master.grad is None for master in run.masters.values())


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("layers.1.engram.embed.weight", 6e-3),
        ("embed.weight", 4e-3),
        ("head.weight", 2e-3),
        ("layers.0.hc_attn_fn", 5e-4),
        ("layers.0.ffn.gate.weight", 1e-3),
        ("layers.2.attn.indexer.wq_b.weight", 2e-3),
        ("norm.weight", 2e-3),
    ],
)
def test_adamw_moves_each_group_by_its_rate(name: str, rate: float) -> None:
    # The first step of AdamW is the rate times the gradient's sign.
    moved = masters()[name] - stepped(Optimiser(masters(), SPEC), 1, rate=0.5)[name]
    expected = 0.5 * rate * gradients(1)[name].sign()
    assert torch.allclose(moved, expected, rtol=1e-3, atol=1e-6)


def test_muon_steps_are_those_of_one_matrix_at_a_time() -> None:
    after = stepped(Optimiser(masters(), SPEC), 1, 2)
    for name in (
        "layers.0.attn.wq_a.weight",
        "layers.0.attn.wo_a.weight",
        "layers.3.ffn.experts.w1",
        "layers.3.ffn.shared_experts.w2.weight",
    ):
        master, moment = masters()[name], torch.zeros_like(masters()[name])
        for step in (1, 2):
            gradient = gradients(step)[name]
            moment = 0.95 * moment + 0.05 * gradient
            ahead = 0.05 * gradient + 0.95 * moment  # Nesterov
            update = torch.stack([orthogonalised(m) for m in matrices(name, ahead)])
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            master = master * (1 - 0.01 * module.DECAY) - 0.01 * scale * update.reshape(
                master.shape
            )
        assert torch.allclose(after[name], master, atol=1e-5), name


def matrices(name: str, x: Tensor) -> list[Tensor]:
    """Experts and the output groups of wo_a are matrices of their own."""
    if name.endswith("wo_a.weight"):
        return list(x.chunk(SPEC.o_groups))
    return list(x) if x.ndim == 3 else [x]


def test_restored_state_goes_on_as_if_nothing_had_happened() -> None:
    whole = stepped(Optimiser(masters(), SPEC), 1, 2, 3)
    first = Optimiser(masters(), SPEC)
    between = stepped(first, 1, 2)
    state = {name: value.clone() for name, value in first.state().items()}
    second = Optimiser({name: master.clone() for name, master in between.items()}, SPEC)
    second.restore(state)
    resumed = stepped(second, 3)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    # A fresh one goes elsewhere: the state matters for every master.
    fresh = stepped(Optimiser({n: m.clone() for n, m in between.items()}, SPEC), 3)
    assert [n for n in whole if trainable(n) and torch.equal(fresh[n], whole[n])] == []


def test_state_of_another_model_is_refused() -> None:
    run = Optimiser(masters(), SPEC)
    with pytest.raises(KeyError):
        run.restore({"momentum/layers.99.x": torch.zeros(1)})
    with pytest.raises(KeyError):
        run.restore({"exp_avg/layers.99.x": torch.zeros(1)})


BIAS = "layers.0.ffn.gate.bias"


def test_router_biases_move_against_the_load_by_a_bounded_step() -> None:
    found = {BIAS: torch.zeros(4)}
    balance(found, {0: torch.tensor([10.0, 2.0, 3.0, 1.0])}, rate=0.5, kind="layers")
    # One expert of four is above the mean load of 4.
    step = 0.5 * BIAS_STEP
    assert torch.allclose(found[BIAS], step * torch.tensor([-1.5, 0.5, 0.5, 0.5]))
    assert float(found[BIAS].mean().abs()) < 1e-9
    # However uneven: the size of the step does not depend on the load.
    balance(found, {0: torch.tensor([1e9, 0.0, 0.0, 0.0])}, rate=0.5, kind="layers")
    assert torch.allclose(found[BIAS], step * torch.tensor([-3.0, 1.0, 1.0, 1.0]))
    before = found[BIAS].clone()
    balance(found, {0: torch.tensor([4.0, 4.0, 4.0, 4.0])}, rate=1.0, kind="layers")
    assert torch.allclose(found[BIAS], before, atol=1e-9)
    # Stages of a draft module have numbers of their own.
    found["mtp.0.ffn.gate.bias"] = torch.zeros(2)
    balance(found, {0: torch.tensor([3.0, 1.0])}, rate=1.0, kind="mtp")
    assert torch.allclose(found["mtp.0.ffn.gate.bias"], BIAS_STEP * torch.tensor([-1.0, 1.0]))
    assert torch.allclose(found[BIAS], before, atol=1e-9)


def test_the_rule_evens_out_a_router_that_prefers_one_expert() -> None:
    generator = torch.Generator().manual_seed(3)
    found = {BIAS: torch.zeros(4)}
    preference = torch.tensor([0.3, 0.1, 0.0, -0.2])
    shares = []
    for _ in range(600):
        scores = torch.rand((512, 4), generator=generator) + preference
        load = torch.bincount((scores + found[BIAS]).topk(2).indices.flatten(), minlength=4)
        shares.append(float(load.max() / load.float().mean()))
        balance(found, {0: load.float()}, rate=1.0, kind="layers")
    assert shares[0] > 1.5 and sum(shares[-20:]) / 20 < 1.1
