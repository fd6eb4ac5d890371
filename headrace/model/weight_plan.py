"""Which tensors a checkpoint of a given ModelSpec holds: names, shapes, stored formats.

The official layout as a list; `weights` compares files with it before anything is loaded and `tiny`
writes checkpoints from it. Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.model.spec import LayerSpec, ModelSpec, QuantSpec

# linear: FP8 with block scales if quantised, else BF16. expert: packed FP4 (or as linear).
# engram: FP8 with one scale per row and 32 columns. The rest is stored as named.
Kind = Literal["linear", "expert", "engram", "bf16", "f32", "i64"]
GROUP = 32
SKIPPED_PREFIXES = ("vision.", "aligner.")
SKIPPED_NAMES = ("image_start", "image_newline", "image_end")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the model sees it: `shape` counts numbers, whatever their stored format is."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it stands in a file; `dtype` is the safetensors name ("BF16", "F8_E8M0", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def scale_name(name: str) -> str:
    """Name of the scales that belong to the quantised tensor `name` ("x.weight" -> "x.scale")."""
    return name.removesuffix(".weight") + ".scale"


def effective_kind(kind: Kind, quant: QuantSpec | None) -> Kind:
    """`kind` with the config's quantisation applied: "bf16" where nothing is quantised."""
    if kind not in ("linear", "expert", "engram"):
        return kind
    if quant is None:
        return "bf16"
    return "linear" if kind == "expert" and quant.expert_dtype == "fp8" else kind


def stored_tensors(tensor: TensorSpec, quant: QuantSpec | None) -> tuple[StoredTensor, ...]:
    """The one or two (weight, scale) stored tensors of `tensor`."""
    name, shape = tensor.name, tensor.shape
    kind = effective_kind(tensor.kind, quant)
    if quant is None or kind in ("bf16", "f32", "i64"):
        return (StoredTensor(name, kind.upper(), shape),)
    rows, columns = shape
    if kind == "linear":
        block_rows, block_columns = quant.weight_block
        blocks = (-(-rows // block_rows), -(-columns // block_columns))
        weight, scales = StoredTensor(name, "F8_E4M3", shape), blocks
    elif kind == "expert":
        weight = StoredTensor(name, "I8", (rows, columns // 2))
        scales = (rows, columns // GROUP)
    else:
        weight, scales = StoredTensor(name, "F8_E4M3", shape), (rows, columns // GROUP)
    return weight, StoredTensor(scale_name(name), "F8_E8M0", scales)


def skipped(name: str, spec: ModelSpec) -> bool:
    """Whether a stored tensor is known but unused: vision, copies of embed and head in drafts.

    Draft tensors are unused where the spec has no draft module (V4's own next-token block).
    """
    if name.startswith(SKIPPED_PREFIXES) or name in SKIPPED_NAMES:
        return True
    if not name.startswith("mtp."):
        return False
    if spec.draft is None:
        return True
    stage, _, rest = name.removeprefix("mtp.").partition(".")
    return stage.isdecimal() and rest in ("embed.weight", "head.weight")


def weight_plan(spec: ModelSpec) -> list[TensorSpec]:
    """All tensors of a checkpoint, backbone first, in layer order."""
    return list(planned_tensors(spec))


def planned_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """The same one by one: a config that no checkpoint backs may ask for any number of them."""
    hidden, streams = spec.hidden, spec.hc_mult
    yield TensorSpec("embed.weight", (spec.vocab_size, hidden), "bf16")
    for layer in spec.layers:
        yield from _layer(spec, layer)
    if not spec.hc_shifted:
        yield TensorSpec("hc_head_fn", (streams, streams * hidden), "f32")
        yield TensorSpec("hc_head_base", (streams,), "f32")
        yield TensorSpec("hc_head_scale", (1,), "f32")
    yield TensorSpec("norm.weight", (hidden,), "bf16")
    yield TensorSpec("head.weight", (spec.vocab_size, hidden), "bf16")
    yield from _draft(spec)


def _layer(spec: ModelSpec, layer: LayerSpec) -> Iterator[TensorSpec]:
    prefix = f"layers.{layer.index}."
    if layer.engram:
        yield from _engram(spec, layer.index, prefix + "engram.")
    yield from _norms_and_streams(spec, prefix)
    yield from _attention(spec, prefix + "attn.")
    if layer.compresses:
        yield from _compressor(spec, layer.ratio, spec.head_dim, prefix + "attn.compressor.")
    if layer.indexes:
        yield from _indexer(spec, layer, prefix + "attn.indexer.")
    yield from _experts(spec, prefix + "ffn.", spec.num_experts, layer.hash_routing)


def _norms_and_streams(spec: ModelSpec, prefix: str) -> Iterator[TensorSpec]:
    streams = spec.hc_mult
    outputs = (2 + streams) * streams
    for part in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}{part}_norm.weight", (spec.hidden,), "bf16")
        yield TensorSpec(f"{prefix}hc_{part}_fn", (outputs, streams * spec.hidden), "f32")
        yield TensorSpec(f"{prefix}hc_{part}_base", (outputs,), "f32")
        yield TensorSpec(f"{prefix}hc_{part}_scale", (3,), "f32")


def _attention(spec: ModelSpec, prefix: str) -> Iterator[TensorSpec]:
    heads_width = spec.num_heads * spec.head_dim
    latent = spec.o_groups * spec.o_lora_rank
    yield TensorSpec(prefix + "wq_a.weight", (spec.q_lora_rank, spec.hidden), "linear")
    yield TensorSpec(prefix + "q_norm.weight", (spec.q_lora_rank,), "bf16")
    yield TensorSpec(prefix + "wq_b.weight", (heads_width, spec.q_lora_rank), "linear")
    yield TensorSpec(prefix + "wkv.weight", (spec.head_dim, spec.hidden), "linear")
    yield TensorSpec(prefix + "kv_norm.weight", (spec.head_dim,), "bf16")
    yield TensorSpec(prefix + "wo_a.weight", (latent, heads_width // spec.o_groups), "linear")
    yield TensorSpec(prefix + "wo_b.weight", (spec.hidden, latent), "linear")
    yield TensorSpec(prefix + "attn_sink", (spec.num_heads,), "f32")


def _compressor(spec: ModelSpec, ratio: int, dim: int, prefix: str) -> Iterator[TensorSpec]:
    width = spec.compressor_width(ratio, dim)
    yield TensorSpec(prefix + "wkv.weight", (width, spec.hidden), "bf16")
    if ratio > 1:
        yield TensorSpec(prefix + "wgate.weight", (width, spec.hidden), "bf16")
    yield TensorSpec(prefix + "norm.weight", (dim,), "bf16")
    if spec.use_ape:
        yield TensorSpec(prefix + "ape", (ratio, width), "f32")


def _indexer(spec: ModelSpec, layer: LayerSpec, prefix: str) -> Iterator[TensorSpec]:
    width = spec.index_heads * spec.index_dim
    yield TensorSpec(prefix + "wq_b.weight", (width, spec.q_lora_rank), "linear")
    yield TensorSpec(prefix + "weights_proj.weight", (spec.index_heads, spec.hidden), "bf16")
    if not layer.owns_index_key:
        return
    if spec.index_key_from_latent:
        yield TensorSpec(prefix + "wk.weight", (spec.index_dim, spec.head_dim), "bf16")
        yield TensorSpec(prefix + "k_norm.weight", (spec.index_dim,), "bf16")
    else:
        yield from _compressor(spec, layer.ratio, spec.index_dim, prefix + "compressor.")


def _experts(
    spec: ModelSpec, prefix: str, experts: int, hash_routing: bool
) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate.weight", (experts, spec.hidden), "bf16")
    if hash_routing:
        table = (spec.vocab_size, spec.experts_per_token)
        yield TensorSpec(prefix + "gate.tid2eid", table, "i64")
    else:
        yield TensorSpec(prefix + "gate.bias", (experts,), "f32")
    if spec.has_vision_bias:
        yield TensorSpec(prefix + "gate.bias_vl", (experts,), "f32")
    for expert in range(experts):
        yield from _mlp(spec, f"{prefix}experts.{expert}.", "expert")
    yield from _mlp(spec, prefix + "shared_experts.", "linear")


def _mlp(spec: ModelSpec, prefix: str, kind: Kind) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "w1.weight", (spec.moe_inter, spec.hidden), kind)
    yield TensorSpec(prefix + "w2.weight", (spec.hidden, spec.moe_inter), kind)
    yield TensorSpec(prefix + "w3.weight", (spec.moe_inter, spec.hidden), kind)


def _engram(spec: ModelSpec, layer: int, prefix: str) -> Iterator[TensorSpec]:
    engram, hidden, streams = spec.engram, spec.hidden, spec.hc_mult
    if engram is None:
        return
    rows = engram.num_embeddings[engram.layers.index(layer)]
    gathered = engram.columns * engram.head_dim
    yield TensorSpec(prefix + "embed.weight", (rows, engram.head_dim), "engram")
    yield TensorSpec(prefix + "wkv.weight", ((streams + 1) * hidden, gathered), "linear")
    yield TensorSpec(prefix + "q_weight", (streams, hidden), "bf16")
    yield TensorSpec(prefix + "k_weight", (streams, hidden), "bf16")


def _draft(spec: ModelSpec) -> Iterator[TensorSpec]:
    draft, hidden = spec.draft, spec.hidden
    if draft is None:
        return
    for stage in range(draft.stages):
        prefix = f"mtp.{stage}."
        if stage == 0:
            features = len(draft.targets) * hidden
            yield TensorSpec(prefix + "main_proj.weight", (hidden, features), "linear")
            yield TensorSpec(prefix + "main_norm.weight", (hidden,), "bf16")
        yield from _norms_and_streams(spec, prefix)
        yield from _attention(spec, prefix + "attn.")
        yield from _experts(spec, prefix + "ffn.", draft.num_experts, hash_routing=False)
    last = f"mtp.{draft.stages - 1}."
    markov = (spec.vocab_size, draft.markov_rank)
    yield TensorSpec(last + "norm.weight", (hidden,), "bf16")
    yield TensorSpec(last + "markov_head.embed.weight", markov, "bf16")
    yield TensorSpec(last + "markov_head.head.weight", markov, "bf16")
    confidence = (1, hidden + draft.markov_rank)
    yield TensorSpec(last + "confidence_head.proj.weight", confidence, "bf16")
