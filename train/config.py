"""config.json of the embedded model: V4.1 in full, small enough for two CPU cores.

The sizes are bounded by the exported bytes (<= 28 MB with the draft module and the tokenizer): the
embedding and head in bf16 are a third of them. `python -m train.config TOKENIZER OUT` writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.model.engram_tables import load_tokenizer, ngram_primes, tokenizer_map
from headrace.model.spec import EngramSpec

NOISE = "<｜place▁holder▁no▁799｜>"
IMAGE = "<｜deepseek_image｜>"

_ENGRAM: dict[str, Any] = {
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 6000,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
}

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 256,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 5],
    "index_source_layer_ids": [2, 5, 7],
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 64,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    **_ENGRAM,
}

# The draft module: two stages, so that the second can look up what the first has found; few experts
# and a small Markov table, so that the whole stays below 28 MB. Both experts are chosen: with one,
# whose weight is normalised to 1, the router would learn nothing.
_DRAFT: dict[str, Any] = {
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [6, 7, 8],
    "dspark_target_attn_input": True,
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 2,
    "dspark_num_experts_per_tok": 2,
}


def make_config(tokenizer_json: Path, *, draft: bool = False, **changes: Any) -> dict[str, Any]:
    """The decoded config.json for a tokenizer. draft: with the mtp.* part. changes: text fields."""
    tokenizer = load_tokenizer(tokenizer_json)
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    text = {**_TEXT, "vocab_size": vocabulary, **changes}
    text["engram_compressed_vocab_size"] = int(tokenizer_map(tokenizer, vocabulary).max()) + 1
    text["engram_num_embeddings"] = table_rows(text)
    text["num_nextn_predict_layers"] = 0
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "text_config": text,
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0},
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
    return with_draft(config, tokenizer_json) if draft else config


def with_draft(config: Mapping[str, Any], tokenizer_json: Path, **changes: Any) -> dict[str, Any]:
    """The config with the fields of a draft module. changes: of these."""
    draft = {**_DRAFT, **changes}
    draft["dspark_noise_token_id"] = load_tokenizer(tokenizer_json).token_to_id(NOISE)
    text = {**without_draft(config)["text_config"], **draft}
    stages = text["num_nextn_predict_layers"]
    text["compress_ratios"] = [*text["compress_ratios"], *[0] * stages]
    return {**config, "text_config": text}


def without_draft(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model alone."""
    text = {k: v for k, v in config["text_config"].items() if not k.startswith("dspark_")}
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    return {**config, "text_config": text}


def table_rows(text: dict[str, Any]) -> list[int]:
    """Rows of each Engram table: the sums of its bucket primes."""
    spec = EngramSpec(
        layers=tuple(text["engram_layer_ids"]),
        num_embeddings=(),
        max_ngram=text["engram_max_ngram_size"],
        vocab_size=text["engram_vocab_size"],
        heads=text["engram_n_heads"],
        head_dim=text["engram_head_dim"],
        pad_id=text["engram_pad_token_id"],
        compressed_vocab=1,
    )
    return [sum(map(sum, sizes)) for sizes in ngram_primes(spec)]


if __name__ == "__main__":
    made = make_config(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
