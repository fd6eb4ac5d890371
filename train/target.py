"""The frozen model that a draft module learns from: an exported checkpoint, read as training reads.

What it computes is `train.forward` with the checkpoint's own (dequantised) weights and cache rows
rounded as the product keeps them: the numbers of the product up to rounding ties, and on a GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.model.engram_tables import engram_tables
from headrace.model.spec import ModelSpec
from headrace.model.weights import Checkpoint
from train import parameters, selfcheck
from train.attention import dense_core
from train.config import with_draft, without_draft
from train.draft_forward import draft_spec
from train.forward import Forward, Mode
from train.geometry import GeometryMaker, random_cuts
from train.loader import Loaded

# Borders of prefix hits and truncated prompts, as the product has them (see `geometry.Cuts`).
CUTS = (0.1, 0.3)


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What a draft module learns from: ids, positions int64 and weights fp32 [B, S], and of every
    token features [B * S, targets * D] and hidden [B * S, D] (see `forward.Outcome`)."""

    ids: Tensor
    positions: Tensor
    weights: Tensor
    families: Tensor
    features: Tensor
    hidden: Tensor


class Target:
    """A checkpoint directory as the training forward reads it.

    config: config.json with the fields of the draft module, spec: the same parsed.
    """

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        compiled: bool = False,
        **draft: Any,
    ) -> None:
        """compiled: with fused kernels, on a GPU. draft: fields that differ from `train.config`.

        Raises CheckpointError and ModelConfigError of a damaged checkpoint.
        """
        tokenizer = directory / "tokenizer.json"
        stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.config = with_draft(stored, tokenizer, **draft)
        self.spec = ModelSpec.from_config(self.config)
        self.targets = draft_spec(self.spec).targets
        alone = ModelSpec.from_config(without_draft(stored))
        checkpoint = Checkpoint.open(directory, alone)
        self.working = {
            name: tensor.to(device)
            for name, tensor in parameters.working(
                parameters.from_official(_numbers(checkpoint, alone), alone),
                parameters.kinds(alone),
                dtype,
                quantised=False,
            ).items()
        }
        self.forward = fast_forward(alone, device, dtype) if compiled else Forward(alone)
        tables = engram_tables(alone, tokenizer)
        self.geometry = GeometryMaker(alone, tables, device, torch.float32)

    @torch.no_grad()
    def read(self, batch: Loaded, generator: torch.Generator) -> TargetRows:
        """Run the model over a batch."""
        cuts = random_cuts(batch.positions, CUTS, generator)
        geometry = self.geometry.make(batch.ids, batch.positions, cuts)
        mode = Mode(sparse=True, rounded=True)
        outcome = self.forward(self.working, geometry, mode, targets=self.targets)
        assert outcome.features is not None and outcome.hidden is not None
        return TargetRows(
            batch.ids,
            batch.positions,
            batch.weights,
            batch.families,
            outcome.features,
            outcome.hidden,
        )


def fast_forward(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Forward:
    """The forward with the kernels that pass their self-check; what cannot be compiled runs."""
    torch._dynamo.config.cache_size_limit = 64
    core = selfcheck.fused_core(spec, device, dtype) or dense_core
    fused = selfcheck.sinkhorn_works(spec, device)
    torch._dynamo.config.suppress_errors = True
    return Forward(spec, core=core, fused_sinkhorn=fused, compiled=True)


def _numbers(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Tensor]:
    """All tensors of the checkpoint, fp32."""
    numbers = {}
    for tensor in parameters.plan(spec):
        if tensor.kind == "engram":
            table = checkpoint.engram_rows(int(tensor.name.split(".")[1]))
            numbers[tensor.name] = table.gather(torch.arange(table.rows))
        else:
            numbers[tensor.name] = checkpoint.dequantised(tensor.name, torch.float32)
    return numbers
