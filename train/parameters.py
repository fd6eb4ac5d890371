"""Parameters of the model: names, initial values, and what the forward computes with.

Masters are fp32 tensors under their official names, except that a layer's experts are one tensor
per matrix ("layers.3.ffn.experts.w1" [E, I, D]); `official` takes them apart again. Router biases
("gate.bias") are moved by the load, not by gradients.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.model.spec import ModelSpec
from headrace.model.weight_plan import TensorSpec, weight_plan
from train import quantise

Parameters = dict[str, Tensor]
_EXPERT_PART = ".ffn.experts."
# Heads of a draft module that say nothing at first.
_SILENT = ("markov_head.head.weight", "confidence_head.proj.weight")


def plan(spec: ModelSpec, draft: bool = False) -> list[TensorSpec]:
    """The tensors, by official name, of the model without its draft module, or of that alone."""
    return [t for t in weight_plan(spec) if t.name.startswith("mtp.") == draft]


def stacked_name(name: str) -> tuple[str, int | None]:
    """Our name of an official tensor, and the expert's place in it."""
    head, found, tail = name.partition(_EXPERT_PART)
    if not found:
        return name, None
    number, matrix, _ = tail.split(".")
    return f"{head}{_EXPERT_PART}{matrix}", int(number)


def initial(spec: ModelSpec, seed: int, draft: bool = False) -> Parameters:
    """Fresh fp32 masters; the same for the same seed."""
    stacks: dict[str, list[Tensor]] = {}
    for tensor in plan(spec, draft):
        name, _ = stacked_name(tensor.name)
        stacks.setdefault(name, []).append(_initial_tensor(spec, tensor, seed))
    return {
        name: torch.stack(parts) if _EXPERT_PART in name else parts[0]
        for name, parts in stacks.items()
    }


def _initial_tensor(spec: ModelSpec, tensor: TensorSpec, seed: int) -> Tensor:
    name, shape = tensor.name, tensor.shape
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    last = name.rpartition(".")[2]
    if name.endswith("norm.weight") or last in ("q_weight", "k_weight"):
        return torch.ones(shape)
    if last.startswith("hc_"):
        return _initial_streams(spec, name, shape)
    if last in ("attn_sink", "bias", "bias_vl") or name.endswith(_SILENT):
        return torch.zeros(shape)
    normal = torch.randn(shape, generator=generator)
    if name == "embed.weight":
        return normal
    if name.endswith("engram.embed.weight"):
        return normal * 0.2
    if name == "head.weight":
        return normal * (0.5 / math.sqrt(shape[-1]))
    small = name.endswith((".wo_b.weight", ".w2.weight"))
    return normal * ((0.3 if small else 1.0) / math.sqrt(shape[-1]))


def _initial_streams(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Tensor:
    """Start of hyper-connections: layer L reads copy L mod hc, copies are hardly mixed."""
    if name.endswith("_fn"):
        return torch.zeros(shape)
    if name.endswith("_scale"):
        return torch.full(shape, 0.3)
    hc = spec.hc_mult
    base = torch.zeros(shape)
    base[:hc] = -3.0
    base[int(name.split(".")[1]) % hc] = 3.0
    mix = base[2 * hc :].view(hc, hc)
    mix -= 3.0
    mix.diagonal().add_(6.0)
    return base


def official(parameters: Mapping[str, Tensor], spec: ModelSpec, draft: bool = False) -> Parameters:
    """The same numbers under the official names."""
    result = {}
    for tensor in plan(spec, draft):
        name, expert = stacked_name(tensor.name)
        result[tensor.name] = parameters[name] if expert is None else parameters[name][expert]
    return result


def from_official(
    tensors: Mapping[str, Tensor], spec: ModelSpec, draft: bool = False
) -> Parameters:
    """Inverse of `official`, fp32."""
    stacks: dict[str, list[Tensor]] = {}
    for tensor in plan(spec, draft):
        name, _ = stacked_name(tensor.name)
        stacks.setdefault(name, []).append(tensors[tensor.name].float())
    return {
        name: torch.stack(parts) if _EXPERT_PART in name else parts[0].clone()
        for name, parts in stacks.items()
    }


def kinds(spec: ModelSpec, draft: bool = False) -> dict[str, str]:
    """Stored kind ("linear", "expert", "engram", "bf16", "f32") of every master."""
    return {stacked_name(t.name)[0]: t.kind for t in plan(spec, draft)}


def trainable(name: str) -> bool:
    """Whether gradients move this master."""
    return not name.endswith(("gate.bias", "gate.bias_vl"))


def working(
    masters: Mapping[str, Tensor], kind_of: Mapping[str, str], dtype: torch.dtype, quantised: bool
) -> Parameters:
    """What one step computes with: matrices in `dtype`, rounded to their stored formats if asked.

    Differentiable towards the masters (straight through the rounding). Per layer, "ffn.w13" and
    "ffn.w2" hold all experts with the shared one last, so that one product serves them all.
    """
    made: Parameters = {}
    for name, master in masters.items():
        kind = kind_of[name]
        x = _rounded(master, kind) if quantised else master
        made[name] = x if kind == "f32" or x.ndim < 2 else x.to(dtype)
    for name in [n for n in made if n.endswith(_EXPERT_PART + "w1")]:
        prefix = name.removesuffix("experts.w1")
        _merge_experts(made, prefix)
    return made


def _rounded(master: Tensor, kind: str) -> Tensor:
    if kind == "linear":
        return quantise.fp8_blocks(master)
    if kind == "expert":
        return quantise.fp4_groups(master)
    if kind == "engram":
        return quantise.fp8_groups(master)
    if kind == "bf16":
        return quantise.straight_through(master, master.detach().to(torch.bfloat16))
    return master


def _merge_experts(made: Parameters, prefix: str) -> None:
    w1, w2, w3 = (made.pop(f"{prefix}experts.w{i}") for i in (1, 2, 3))
    s1, s2, s3 = (made.pop(f"{prefix}shared_experts.w{i}.weight") for i in (1, 2, 3))
    made[prefix + "w13"] = torch.cat((w1.flatten(0, 1), s1, w3.flatten(0, 1), s3))
    made[prefix + "w2"] = torch.cat((w2.permute(1, 0, 2).flatten(1), s2), dim=1)
