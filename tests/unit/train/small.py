"""A V4.1 model with every part, small enough to train on a CPU in tests."""

from __future__ import annotations

from typing import Any

import torch

from headrace.assets import embedded_model
from headrace.model.spec import ModelSpec
from train import parameters
from train.config import make_config
from train.parameters import Parameters

TOKENIZER = embedded_model() / "tokenizer.json"
CONFIG: dict[str, Any] = make_config(
    TOKENIZER,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=32,
    n_routed_experts=4,
    moe_intermediate_size=32,
    sliding_window=16,
    compress_ratios=[0, 0, 2, 1, 1, 1],
    kv_source_layer_ids=[2, 3],
    index_source_layer_ids=[2, 3, 5],
    candidate_source_layer_id=3,
    index_n_heads=16,  # with few heads scores of exactly 0 tie
    index_head_dim=32,
    index_topk=16,
    candidate_topk_blocks=6,
    candidate_block_size=8,
    engram_layer_ids=[1],
    engram_vocab_size=300,
)
SPEC = ModelSpec.from_config(CONFIG)


def masters(seed: int = 1) -> Parameters:
    """Initial masters, moved off their neutral values (zeros, ones) so that each one shows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: master + 0.05 * torch.randn(master.shape, generator=generator)
        for name, master in parameters.initial(SPEC, seed).items()
    }
