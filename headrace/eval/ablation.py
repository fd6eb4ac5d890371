"""Taking one learned part out of a loaded model, to see what it is good for.

A part whose loss changes no score was not trained. Used by `run` and `english`.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from headrace.model.deepseek.model import Model
from headrace.model.spec import ModelSpec
from headrace.ops.records import RecordView


class Ablation(StrEnum):
    """What is taken out."""

    NONE = "none"
    RANDOM_TOP_K = "random-top-k"  # index scores are random: any entries are selected
    NO_ENGRAM = "no-engram"  # the n-gram memory adds nothing
    HALF_CANDIDATES = "half-candidates"  # the two-level search keeps half as many blocks


def ablate(model: Model, ablation: Ablation) -> None:
    """Change `model` for good."""
    if ablation is Ablation.RANDOM_TOP_K:
        model.ops = replace(model.ops, entry_scores=_random_scores)
    elif ablation is Ablation.NO_ENGRAM:
        model.ops = replace(model.ops, engram_add=_unchanged)
    elif ablation is Ablation.HALF_CANDIDATES:
        model.spec = replace(model.spec, candidate_blocks=_half(model.spec))


def reach(spec: ModelSpec, ablation: Ablation) -> int | None:
    """Least length of a context, in tokens, at which the ablation can change anything.

    Shorter ones select every entry they see anyway. None: at no length, since the model (`spec`
    before the ablation) lacks the part.
    """
    ratios = [layer.ratio for layer in spec.layers if layer.indexes]
    if ablation is Ablation.NO_ENGRAM:
        return 1 if spec.engram is not None else None
    if ablation is Ablation.RANDOM_TOP_K:
        return min((spec.index_topk + 1) * ratio for ratio in ratios) if ratios else None
    if ablation is Ablation.HALF_CANDIDATES:
        source = spec.candidate_source
        # The source itself searches everything; who comes after it selects among the candidates.
        if source is None or not any(x.indexes and x.index > source for x in spec.layers):
            return None
        entries = max(_half(spec) * spec.candidate_block_size, spec.index_topk) + 1
        return entries * spec.layers[source].ratio
    return None


def _half(spec: ModelSpec) -> int:
    return max(1, spec.candidate_blocks // 2)


def _random_scores(
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    blocks: Tensor,
    visible: Tensor,
    count: int | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Scores [T, count] that depend on `count` and the place alone, so that runs repeat."""
    total = blocks.shape[1] * keys.data.shape[1] if count is None else count
    generator = torch.Generator().manual_seed(total)
    scores = torch.rand((q.shape[0], total), generator=generator, dtype=q.dtype)
    hidden = torch.arange(total) >= visible.unsqueeze(-1)
    if allowed is not None:
        hidden |= ~allowed
    return scores.masked_fill_(hidden, -torch.inf)


def _unchanged(streams: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    return streams
