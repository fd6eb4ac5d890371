"""Taking one learned part out of a loaded model, to see what it is good for.

A part whose loss changes no score was not trained. Used by `run` and `english`.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from headrace.model.deepseek.model import Model


class Ablation(StrEnum):
    """What is taken out."""

    NONE = "none"
    RANDOM_TOP_K = "random-top-k"  # index scores are random: any entries are selected
    NO_ENGRAM = "no-engram"  # the n-gram memory adds nothing
    HALF_CANDIDATES = "half-candidates"  # the two-level search keeps half as many blocks


def ablate(model: Model, ablation: Ablation) -> None:
    """Change `model` for good."""
    if ablation is Ablation.RANDOM_TOP_K:
        model.ops = replace(model.ops, index_scores=_random_scores)
    elif ablation is Ablation.NO_ENGRAM:
        model.ops = replace(model.ops, engram_add=_unchanged)
    elif ablation is Ablation.HALF_CANDIDATES:
        blocks = max(1, model.spec.candidate_blocks // 2)
        model.spec = replace(model.spec, candidate_blocks=blocks)


def _random_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores [..., rows, keys] that depend on the keys' number alone, so that runs repeat."""
    generator = torch.Generator().manual_seed(keys.shape[-2])
    shape = (*q.shape[:2], keys.shape[-2])
    return torch.rand(shape, generator=generator, dtype=q.dtype)


def _unchanged(streams: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    return streams
