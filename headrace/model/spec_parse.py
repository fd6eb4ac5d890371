"""config.json -> ModelSpec: the nested V4.1 form and the flat V4 form.

Every field that changes the arithmetic is used or checked; unknown keys are ignored. Whatever the
input is, the only error is ModelConfigError, whose `param` is the dotted name of the field.
Called by `ModelSpec.from_config` and `ModelSpec.from_directory` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headrace.core.files import CONFIG_FILE, MAX_CONFIG_BYTES, read_regular
from headrace.errors import ModelConfigError
from headrace.model.config_fields import MAX_INTEGER, Fields, shown
from headrace.model.spec import (
    DraftSpec,
    EngramSpec,
    LayerSpec,
    ModelSpec,
    QuantSpec,
    YarnSpec,
)
from headrace.model.spec_check import check_spec

V41 = "deepseek_v41"
V4 = "deepseek_v4"
ARCHITECTURES = {
    V41: ("DeepseekV41ForCausalLM", "DeepseekV41ForConditionalGeneration"),
    V4: ("DeepseekV4ForCausalLM",),
}
RATIOS = {V41: (0, 1, 2), V4: (0, 4, 128)}
# Far above every model, low enough that no config alone can ask for unbounded work.
MAX_LAYERS = 1024
MAX_VOCAB = 2**22
MAX_COUNT = 2**16  # heads, experts, selected entries
MAX_TOKENS = 2**31  # context lengths
MAX_ENGRAM_LAYERS = 16


def read_config(directory: Path) -> Mapping[str, object]:
    """The decoded config.json of a checkpoint directory.

    Raises CheckpointError where it cannot be read, ModelConfigError where it is no JSON object.
    """
    return read_config_file(directory / CONFIG_FILE)


def read_config_file(path: Path) -> Mapping[str, object]:
    """As `read_config`, of a config.json whatever its name."""
    data = read_regular(path, MAX_CONFIG_BYTES)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}.", param="config") from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} must hold a JSON object.", param="config")
    return config


def parse_config(config: Mapping[str, object]) -> ModelSpec:
    """Parse and validate; see `ModelSpec.from_config`."""
    top = Fields(config, "")
    architecture = _architecture(top)
    top.fixed("dtype", "bfloat16", alias="torch_dtype")
    text = top.section("text_config") if architecture == V41 else top
    if architecture == V41:
        text.fixed("model_type", "deepseek_v41_text")
    spec = _spec(top, text, architecture)
    check_spec(spec, text.prefix)
    return spec


def _architecture(top: Fields) -> str:
    model_type = top.string("model_type")
    if model_type not in ARCHITECTURES:
        raise top.error(
            "model_type", f"{shown(model_type)} is unknown, supported: {', '.join(ARCHITECTURES)}"
        )
    names = top.strings("architectures", default=ARCHITECTURES[model_type][:1])
    if not set(names) & set(ARCHITECTURES[model_type]):
        raise top.error(
            "architectures",
            f"{shown(list(names))} fits none of {', '.join(ARCHITECTURES[model_type])}",
        )
    return model_type


def _check_fixed(text: Fields) -> None:
    """Fields that this code supports one value of."""
    text.fixed("num_key_value_heads", 1)
    text.fixed("hidden_act", "silu")
    text.fixed("scoring_func", "sqrtsoftplus")
    text.fixed("topk_method", "noaux_tc")
    text.fixed("tie_word_embeddings", False)
    text.fixed("attention_bias", False)
    text.fixed("n_shared_experts", 1)
    text.fixed("n_group", 1)
    text.fixed("topk_group", 1)


def _check_v41_only(top: Fields, text: Fields, hash_layers: int, vision_layers: int) -> None:
    if hash_layers:
        raise text.error("num_hash_layers", "hash-routed layers exist in deepseek_v4 only")
    vocab_size = text.integer("vocab_size", high=MAX_VOCAB)
    if vision_layers and _optional_token(top, "image_token_id", vocab_size) is None:
        raise top.error("image_token_id", "is missing, but vision_config has layers")


# What V4 does and V4.1 does not.
_V4_FLAGS = ("q_head_norm", "compress_overlap", "use_ape", "index_hadamard")


def _candidates(text: Fields) -> tuple[int | None, int, int]:
    """(source layer, blocks, block size) of the two-level search; (None, 0, 0) without one."""
    source = _candidate_source(text)
    if source is None:
        return None, 0, 0
    return source, text.integer("candidate_topk_blocks"), text.integer("candidate_block_size")


def _spec(top: Fields, text: Fields, architecture: str) -> ModelSpec:
    _check_fixed(text)
    v41 = architecture == V41
    vocab_size = text.integer("vocab_size", high=MAX_VOCAB)
    num_layers = text.integer("num_hidden_layers", high=MAX_LAYERS)
    vision_layers = _vision_layers(top) if v41 else 0
    eos_id = _token(top, text, "eos_token_id", vocab_size)
    candidate, blocks, block_size = _candidates(text) if v41 else (None, 0, 0)
    hash_layers = text.integer("num_hash_layers", low=0, default=0)
    if v41:
        _check_v41_only(top, text, hash_layers, vision_layers)
    layers = _layers_v41(text, num_layers) if v41 else _layers_v4(text, num_layers, hash_layers)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden=text.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=text.integer("num_attention_heads", high=MAX_COUNT),
        head_dim=text.integer("head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        q_lora_rank=text.integer("q_lora_rank"),
        o_groups=text.integer("o_groups", high=MAX_COUNT),
        o_lora_rank=text.integer("o_lora_rank"),
        swiglu_limit=text.number("swiglu_limit"),
        rms_eps=text.number("rms_norm_eps"),
        max_position=text.integer("max_position_embeddings", high=MAX_TOKENS),
        rope_theta=text.number("rope_theta"),
        compress_rope_theta=text.number("compress_rope_theta"),
        yarn=_yarn(text),
        num_experts=text.integer("n_routed_experts", high=MAX_COUNT),
        num_shared_experts=1,
        experts_per_token=text.integer("num_experts_per_tok", high=MAX_COUNT),
        moe_inter=text.integer("moe_intermediate_size"),
        routed_scaling=text.number("routed_scaling_factor"),
        norm_topk_prob=text.boolean("norm_topk_prob"),
        num_hash_layers=hash_layers,
        window=text.integer("sliding_window"),
        layers=layers,
        index_heads=text.integer("index_n_heads", high=MAX_COUNT),
        index_dim=text.integer("index_head_dim"),
        index_topk=text.integer("index_topk", high=MAX_COUNT),
        candidate_source=candidate,
        candidate_blocks=blocks,
        candidate_block_size=block_size,
        hc_mult=text.integer("hc_mult", high=64),
        hc_iters=text.integer("hc_sinkhorn_iters", high=1000),
        hc_eps=text.number("hc_eps"),
        hc_shifted=text.boolean("hc_shifted", default=v41),
        index_key_from_latent=v41,
        **dict.fromkeys(_V4_FLAGS, not v41),
        engram=_engram(text, vocab_size) if v41 else None,
        draft=_draft(text, vocab_size) if v41 else None,
        quant=_quant(top),
        bos_id=_token(top, text, "bos_token_id", vocab_size),
        eos_id=eos_id,
        pad_id=_token(top, text, "pad_token_id", vocab_size, default=eos_id),
        image_id=_optional_token(top, "image_token_id", vocab_size),
        kv_fp4=text.boolean("use_fp4_sparse_kv", default=True) if v41 else False,
        vision_layers=vision_layers,
    )


def _token(
    top: Fields, text: Fields, name: str, vocab_size: int, default: int | None = None
) -> int:
    """A token id that stands in either section."""
    fields = top if top.has(name) else text
    return fields.integer(name, low=0, high=vocab_size - 1, default=default)


def _optional_token(top: Fields, name: str, vocab_size: int) -> int | None:
    return top.integer(name, low=0, high=vocab_size - 1) if top.has(name) else None


def _vision_layers(top: Fields) -> int:
    if not top.has("vision_config"):
        return 0
    return top.section("vision_config").integer("num_hidden_layers", low=0, high=MAX_LAYERS)


def _yarn(text: Fields) -> YarnSpec | None:
    if not text.has("rope_scaling"):
        return None
    scaling = text.section("rope_scaling")
    scaling.fixed("rope_type", "yarn", alias="type", required=True)
    beta_slow = scaling.number("beta_slow")
    beta_fast = scaling.number("beta_fast")
    if beta_fast < beta_slow:
        raise scaling.error("beta_fast", f"{beta_fast} is below beta_slow {beta_slow}")
    factor = scaling.number("factor")
    if factor < 1.0:
        raise scaling.error("factor", f"must be at least 1, got {factor}")
    original = scaling.integer("original_max_position_embeddings", high=MAX_TOKENS)
    return YarnSpec(factor, beta_fast, beta_slow, original)


def _quant(top: Fields) -> QuantSpec | None:
    if not top.has("quantization_config"):
        return None
    quant = top.section("quantization_config")
    quant.fixed("quant_method", "fp8", required=True)
    quant.fixed("activation_scheme", "dynamic")
    quant.fixed("scale_fmt", "ue8m0", required=True)
    block = quant.integers("weight_block_size")
    if len(block) != 2 or block[0] != block[1] or block[0] not in (32, 128):
        raise quant.error(
            "weight_block_size", f"must be [32, 32] or [128, 128], got {shown(list(block))}"
        )
    # V4 has the expert format at the top level.
    holder = quant if quant.has("expert_dtype") or not top.has("expert_dtype") else top
    expert_dtype = holder.string("expert_dtype")
    if expert_dtype not in ("fp4", "fp8"):
        raise holder.error("expert_dtype", f"{shown(expert_dtype)} is unknown, supported: fp4, fp8")
    return QuantSpec((block[0], block[1]), block[1], expert_dtype)


def _ratios(text: Fields, num_layers: int, architecture: str) -> tuple[int, ...]:
    """One ratio per backbone layer, validated; entries of draft layers must be 0."""
    name = "compress_ratios"
    ratios = text.integers(name, low=0)
    stages = text.integer("num_nextn_predict_layers", low=0, high=64, default=0)
    # V4 files carry 0, 1 or 3 draft entries whatever num_nextn_predict_layers says.
    fits = len(ratios) == num_layers + stages if architecture == V41 else len(ratios) >= num_layers
    if not fits:
        raise text.error(
            name,
            f"has {len(ratios)} entries for {num_layers} layers and {stages} draft layers",
        )
    allowed = RATIOS[architecture]
    for layer, ratio in enumerate(ratios):
        if ratio not in (allowed if layer < num_layers else (0,)):
            raise text.error(name, f"entry {layer} is {ratio}, allowed: {allowed}, 0 for drafts")
    return ratios[:num_layers]


def _sources(
    text: Fields, name: str, ratios: tuple[int, ...], default: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """An ascending list of layers with a compressed cache."""
    sources = text.layer_ids(name, len(ratios), default=default)
    for layer in sources:
        if ratios[layer] == 0:
            raise text.error(name, f"layer {layer} has compress ratio 0 and cannot be a source")
    return sources


def _nearest(
    text: Fields, name: str, sources: tuple[int, ...], ratios: tuple[int, ...]
) -> list[int | None]:
    """Per layer the last source not after it; ratios of reader and source must agree."""
    found: list[int | None] = []
    current: int | None = None
    for layer, ratio in enumerate(ratios):
        current = layer if layer in sources else current
        if ratio == 0:
            found.append(None)
        elif current is None or ratios[current] != ratio:
            raise text.error(
                name, f"layer {layer} (ratio {ratio}) has no source of that ratio before it"
            )
        else:
            found.append(current)
    return found


def _layers_v41(text: Fields, num_layers: int) -> tuple[LayerSpec, ...]:
    ratios = _ratios(text, num_layers, V41)
    kv_ids = _sources(text, "kv_source_layer_ids", ratios)
    index_ids = _sources(text, "index_source_layer_ids", ratios)
    key_ids = _sources(text, "index_k_source_layer_ids", ratios, default=kv_ids)
    if not set(kv_ids) <= set(index_ids):
        raise text.error(
            "index_source_layer_ids", "must contain every layer of kv_source_layer_ids"
        )
    if not set(key_ids) <= set(kv_ids):
        raise text.error(
            "index_k_source_layer_ids", "must lie in kv_source_layer_ids (keys come from them)"
        )
    kv = _nearest(text, "kv_source_layer_ids", kv_ids, ratios)
    index = _nearest(text, "index_source_layer_ids", index_ids, ratios)
    keys = _nearest(text, "index_k_source_layer_ids", key_ids, ratios)
    engram = text.layer_ids("engram_layer_ids", num_layers, default=())
    return tuple(
        LayerSpec(
            index=layer,
            ratio=ratio,
            kv_source=kv[layer],
            index_source=index[layer],
            index_key_source=keys[layer],
            compresses=layer in kv_ids,
            indexes=layer in index_ids,
            owns_index_key=layer in key_ids,
            engram=layer in engram,
            hash_routing=False,
        )
        for layer, ratio in enumerate(ratios)
    )


def _layers_v4(text: Fields, num_layers: int, hash_layers: int) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(
            index=layer,
            ratio=ratio,
            kv_source=layer if ratio else None,
            index_source=layer if ratio == 4 else None,
            index_key_source=layer if ratio == 4 else None,
            compresses=ratio > 0,
            indexes=ratio == 4,
            owns_index_key=ratio == 4,
            engram=False,
            hash_routing=layer < hash_layers,
        )
        for layer, ratio in enumerate(_ratios(text, num_layers, V4))
    )


def _candidate_source(text: Fields) -> int | None:
    source = text.integer("candidate_source_layer_id", low=-MAX_LAYERS, default=-1)
    return source if source >= 0 else None


def _engram(text: Fields, vocab_size: int) -> EngramSpec | None:
    layers = text.integers("engram_layer_ids", low=0, default=())
    if not layers:
        return None
    if len(layers) > MAX_ENGRAM_LAYERS:
        raise text.error(
            "engram_layer_ids", f"names {len(layers)} layers, at most {MAX_ENGRAM_LAYERS}"
        )
    rows = text.integers("engram_num_embeddings", low=1)
    if len(rows) != len(layers):
        raise text.error(
            "engram_num_embeddings", f"has {len(rows)} entries for {len(layers)} Engram layers"
        )
    return EngramSpec(
        layers=layers,
        num_embeddings=rows,
        max_ngram=text.integer("engram_max_ngram_size", low=2, high=8),
        vocab_size=text.integer("engram_vocab_size", low=2, high=MAX_INTEGER),
        heads=text.integer("engram_n_heads", high=64),
        head_dim=text.integer("engram_head_dim"),
        pad_id=text.integer("engram_pad_token_id", low=0, high=vocab_size - 1),
        compressed_vocab=text.integer("engram_compressed_vocab_size", high=vocab_size),
    )


def _draft(text: Fields, vocab_size: int) -> DraftSpec | None:
    stages = text.integer("num_nextn_predict_layers", low=0, high=64, default=0)
    block_size = text.integer("dspark_block_size", low=0, high=256, default=0)
    if not stages or not block_size:
        return None
    return DraftSpec(
        stages=stages,
        block_size=block_size,
        noise_id=text.integer("dspark_noise_token_id", low=0, high=vocab_size - 1),
        targets=text.integers("dspark_target_layer_ids", low=0),
        targets_attn_input=text.boolean("dspark_target_attn_input", default=True),
        markov_rank=text.integer("dspark_markov_rank"),
        num_experts=text.integer("dspark_n_routed_experts", high=MAX_COUNT),
        experts_per_token=text.integer("dspark_num_experts_per_tok", high=MAX_COUNT),
        confidence_temperatures=text.numbers(
            "dspark_confidence_temperatures", block_size, default=1.0
        ),
    )
