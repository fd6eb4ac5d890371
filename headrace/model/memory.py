"""What the weights of a model take, by kind and in a given format, from its spec alone.

Contract: `weight_memory` counts what `model/loader` keeps, without reading a checkpoint. Imports no
torch. Called by the loader, before it reads, and by `headrace plan memory`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import InternalError
from headrace.model.spec import ModelSpec
from headrace.model.weight_plan import (
    TensorSpec,
    effective_kind,
    planned_tensors,
    stored_tensors,
)

# Quantised matrices in the checkpoint's own formats, the rest in the dtype of the model or wider;
# other names are dtypes that all weights are converted to.
STORED = "stored"
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
# Stored in bf16, kept in fp32: the released path computes with them so.
_WIDE = ("norm.weight", "gate.weight", "head.weight", "head.proj.weight", "q_weight")
_POOLED = (*_WIDE, "compressor.wkv.weight")
# Not loaded, or multiplied into another one.
_UNUSED = ("gate.bias_vl", "k_weight")
_STORED_BYTES = {"F32": 4, "BF16": 2, "I64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes of the weights.

    experts: routed ones of the backbone. embeddings: embedding and head. draft: the draft module,
    its routed experts, which `draft_experts` counts alone, included. dense: all else. engram: the
    tables, which stay on the host.
    """

    experts_bytes: int
    dense_bytes: int
    embeddings_bytes: int
    draft_bytes: int
    draft_experts_bytes: int
    engram_bytes: int

    @property
    def device_bytes(self) -> int:
        """All but the Engram tables."""
        return self.experts_bytes + self.dense_bytes + self.embeddings_bytes + self.draft_bytes


def weight_memory(
    spec: ModelSpec, weights: str, *, with_draft: bool, dtype: str = "bfloat16"
) -> WeightMemory:
    """Bytes by kind; weights: "stored", "float64", "float32" or "bfloat16". dtype: of the model,
    for what is not quantised where weights is "stored"."""
    if weights != STORED and weights not in _BYTES:
        raise InternalError(f"weights {weights!r} is no format.")
    number = _BYTES[dtype if weights == STORED else weights]
    sums = dict.fromkeys(("experts", "dense", "embeddings", "draft", "engram"), 0)
    draft_experts = 0
    ratios = {f"layers.{layer.index}": layer.ratio for layer in spec.layers}
    for tensor in planned_tensors(spec):
        size = _bytes(tensor, spec, weights == STORED, number, pooled=_pools(tensor.name, ratios))
        if tensor.name.startswith("mtp."):
            kind = "draft"
            if not with_draft:
                continue
            if tensor.kind == "expert":
                draft_experts += size
        elif tensor.kind in ("expert", "engram"):
            kind = "experts" if tensor.kind == "expert" else "engram"
        else:
            kind = "embeddings" if tensor.name in ("embed.weight", "head.weight") else "dense"
        sums[kind] += size
    return WeightMemory(
        experts_bytes=sums["experts"],
        dense_bytes=sums["dense"],
        embeddings_bytes=sums["embeddings"],
        draft_bytes=sums["draft"],
        draft_experts_bytes=draft_experts,
        engram_bytes=sums["engram"],
    )


def _pools(name: str, ratios: Mapping[str, int]) -> bool:
    """Whether the compressor of a tensor's layer pools several tokens into an entry."""
    return ratios.get(".".join(name.split(".")[:2]), 0) > 1


def _bytes(
    tensor: TensorSpec, spec: ModelSpec, keeps_stored: bool, number: int, *, pooled: bool
) -> int:
    """Of one tensor as it is kept. Engram tables are never converted. number: bytes of one in the
    model's dtype. pooled: whether the layer's compressor pools several tokens, which is done in
    fp32."""
    kind = effective_kind(tensor.kind, spec.quant)
    stored = keeps_stored and kind in ("linear", "expert")
    if stored or tensor.kind in ("engram", "i64"):
        parts = stored_tensors(tensor, spec.quant)
        return sum(math.prod(part.shape) * _STORED_BYTES[part.dtype] for part in parts)
    name = tensor.name
    if name.endswith(_UNUSED):
        return 0
    as_file = ("embed.weight", "head.weight") if keeps_stored else ("embed.weight",)
    if name in as_file or name.endswith("markov_head.embed.weight"):
        number = 2
    elif tensor.kind == "f32" or name.endswith(_POOLED if pooled else _WIDE):
        number = max(4, number)
    return math.prod(tensor.shape) * number
