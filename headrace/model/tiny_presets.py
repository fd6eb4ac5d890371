"""config.json of the tiny presets: all the released model's features at toy sizes.

tiny-8 is V4.1 (8 layers, both ratios, shared caches, candidates, Engram, one DSpark stage), v4-tiny
is V4 (hash layers, ratios 4 and 128). Used by `tiny`.
"""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError, OutputError
from headrace.model import tiny_tokenizer

PRESETS = ("tiny-8", "v4-tiny")
MAX_SHARDS = 64
MAX_SEED = 2**63 - 1


def check_arguments(directory: Path, *, preset: str, seed: int, shards: int, force: bool) -> None:
    """Refuse what `write_tiny` cannot do. Raises ConfigError, OutputError (unreadable directory).

    Here rather than in `tiny`, so that the command line can say no without importing torch.
    """
    _check_preset(preset)
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed must be in [0, {MAX_SEED}], got {seed}.", param="seed")
    if not 1 <= shards <= MAX_SHARDS:
        raise ConfigError(f"shards must be in [1, {MAX_SHARDS}], got {shards}.", param="shards")
    try:
        filled = directory.exists() and any(directory.iterdir())
    except OSError as error:
        raise OutputError(f"{directory} cannot be written: {error.strerror}.") from error
    if filled and not force:
        raise ConfigError(
            f"{directory} is not empty; choose another --out or overwrite with --force.",
            param="out",
        )


def _check_preset(preset: str) -> None:
    if preset not in PRESETS:
        raise ConfigError(
            f"preset {preset!r} is unknown, allowed: {', '.join(PRESETS)}.", param="preset"
        )


def preset_config(preset: str, *, quantised: bool, compressed_vocab: int) -> dict[str, object]:
    """The config of a preset. Raises ConfigError for an unknown one.

    compressed_vocab: distinct normalised tokens of the tiny tokenizer, for Engram.
    """
    _check_preset(preset)
    if preset == "tiny-8":
        return _tiny_8(quantised, compressed_vocab)
    return _v4_tiny(quantised)


def _common() -> dict[str, object]:
    """Fields with the same value in both presets."""
    return {
        "vocab_size": tiny_tokenizer.VOCAB_SIZE,
        "hidden_size": 256,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 8,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
    }


def _token_ids() -> dict[str, object]:
    controls = tiny_tokenizer.control_ids()
    return {
        "bos_token_id": controls[tiny_tokenizer.BOS],
        "eos_token_id": controls[tiny_tokenizer.EOS],
        "pad_token_id": controls[tiny_tokenizer.PAD],
    }


def _quantisation(block: int) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "scale_fmt": "ue8m0",
    }


def _tiny_8(quantised: bool, compressed_vocab: int) -> dict[str, object]:
    controls = tiny_tokenizer.control_ids()
    text = {
        "model_type": "deepseek_v41_text",
        **_common(),
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 64,
        "rms_norm_eps": 1e-20,
        "moe_intermediate_size": 64,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "engram_layer_ids": [1],
        # The sum of the bucket primes 503, 509 (2-grams) and 521, 523 (3-grams).
        "engram_num_embeddings": [2056],
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 500,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": controls[tiny_tokenizer.PAD],
        "engram_compressed_vocab_size": compressed_vocab,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 3,
        "dspark_noise_token_id": controls[tiny_tokenizer.NOISE],
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 1,
    }
    config: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **_token_ids(),
        "image_token_id": controls[tiny_tokenizer.IMAGE],
        "text_config": text,
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0},
    }
    if quantised:
        config["quantization_config"] = {**_quantisation(32), "expert_dtype": "fp4"}
    return config


def _v4_tiny(quantised: bool) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        **_token_ids(),
        **_common(),
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "qk_rope_head_dim": 16,
        # Widths are multiples of 128: the scale blocks of V4.
        "q_lora_rank": 128,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 128,
        "compress_ratios": [0, 4, 128, 4, 128, 4],
        "num_hash_layers": 2,
        "num_nextn_predict_layers": 0,
    }
    if quantised:
        config |= {"expert_dtype": "fp4", "quantization_config": _quantisation(128)}
    return config
