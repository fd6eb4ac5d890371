"""Conditions that hold between fields of a ModelSpec: divisibility, order of layers, draft targets.

Called once by `spec_parse` after the single fields have been read. Raises ModelConfigError with the
config name of the field that has to change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from headrace.errors import ModelConfigError
from headrace.model.spec import ModelSpec

# Numbers that share one scale in the stored FP8/FP4 formats.
GROUP = 32
_Need = Callable[[bool, str, str], None]


def check_spec(spec: ModelSpec, prefix: str) -> None:
    """Raise ModelConfigError for the first impossible combination; `prefix` is "text_config."."""

    def need(holds: bool, name: str, problem: str) -> None:
        if not holds:
            full = prefix + name
            raise ModelConfigError(f"config.json: {full}: {problem}.", param=full)

    need(
        spec.num_heads % spec.o_groups == 0,
        "o_groups",
        f"{spec.o_groups} must divide num_attention_heads {spec.num_heads}",
    )
    for name, value in _grouped_sizes(spec).items():
        group = max(GROUP, spec.quant.act_group) if spec.quant is not None else GROUP
        # Heads and Engram rows are stored per 32 whatever the weights' blocks are.
        group = GROUP if name in ("head_dim", "index_head_dim", "engram_head_dim") else group
        need(value % group == 0, name, f"{value} must be a multiple of {group}")
    need(spec.rope_dim % 2 == 0, "qk_rope_head_dim", f"{spec.rope_dim} must be even")
    need(
        spec.rope_dim < spec.head_dim,
        "qk_rope_head_dim",
        f"{spec.rope_dim} must be below head_dim {spec.head_dim}",
    )
    need(
        spec.rope_dim <= spec.index_dim,
        "qk_rope_head_dim",
        f"{spec.rope_dim} must not exceed index_head_dim {spec.index_dim}",
    )
    need(
        spec.experts_per_token <= spec.num_experts,
        "num_experts_per_tok",
        f"{spec.experts_per_token} exceeds n_routed_experts {spec.num_experts}",
    )
    need(
        spec.num_hash_layers <= spec.num_layers,
        "num_hash_layers",
        f"{spec.num_hash_layers} exceeds num_hidden_layers {spec.num_layers}",
    )
    need(
        not spec.index_hadamard or spec.index_dim & (spec.index_dim - 1) == 0,
        "index_head_dim",
        f"{spec.index_dim} must be a power of two for the Hadamard rotation",
    )
    if spec.yarn is not None:
        name, theta = "compress_rope_theta", spec.compress_rope_theta
        need(theta > 1.0, name, f"must be above 1 with YaRN, got {theta}")
    _check_candidates(spec, need)
    _check_engram(spec, need)
    _check_draft(spec, need)


def _grouped_sizes(spec: ModelSpec) -> dict[str, int]:
    """Input widths of quantised layers and row widths of quantised caches."""
    sizes = {
        "hidden_size": spec.hidden,
        "q_lora_rank": spec.q_lora_rank,
        "head_dim": spec.head_dim,
        "num_attention_heads": spec.num_heads * spec.head_dim // spec.o_groups,
        "o_lora_rank": spec.o_groups * spec.o_lora_rank,
        "moe_intermediate_size": spec.moe_inter,
        "index_head_dim": spec.index_dim,
    }
    if spec.engram is not None:
        sizes["engram_head_dim"] = spec.engram.head_dim
        sizes["engram_n_heads"] = spec.engram.columns * spec.engram.head_dim
    return sizes


def _check_candidates(spec: ModelSpec, need: _Need) -> None:
    source = spec.candidate_source
    if source is None:
        return
    name = "candidate_source_layer_id"
    need(
        source < spec.num_layers and spec.layers[source].indexes,
        name,
        f"layer {source} must be one of index_source_layer_ids",
    )
    need(
        all(x.ratio == 1 for x in spec.layers[source:] if x.indexes),
        name,
        f"layer {source} and the index sources after it must have compress ratio 1",
    )


def _check_engram(spec: ModelSpec, need: _Need) -> None:
    if spec.engram is None:
        return
    border = spec.n_prefill_layer
    need(
        spec.engram.layers[-1] < border,
        "engram_layer_ids",
        f"layer {spec.engram.layers[-1]} must come before the first ratio-1 layer {border}",
    )


def _check_draft(spec: ModelSpec, need: _Need) -> None:
    draft = spec.draft
    if draft is None:
        return
    name = "dspark_target_layer_ids"
    targets = draft.targets
    ascending = all(a < b for a, b in itertools.pairwise(targets))
    need(bool(targets) and ascending, name, "must be a strictly ascending, non-empty list")
    need(targets[-1] < spec.num_layers, name, f"names layer {targets[-1]} of {spec.num_layers}")
    need(
        targets[0] >= spec.n_prefill_layer,
        name,
        f"layer {targets[0]} must not come before the first ratio-1 layer {spec.n_prefill_layer}",
    )
    need(
        draft.experts_per_token <= draft.num_experts,
        "dspark_num_experts_per_tok",
        f"{draft.experts_per_token} exceeds dspark_n_routed_experts {draft.num_experts}",
    )
