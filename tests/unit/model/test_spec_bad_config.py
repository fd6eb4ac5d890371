"""Bad configs: the error names the field; nothing else is ever raised."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CheckpointError, ModelConfigError
from headrace.model.spec import ModelSpec
from tests.unit.model.released_configs import v4_flash, v41_flash


class _Missing:
    """Takes a field away; its repr is stable, because it becomes part of test names."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """`config` with the field at the dotted path replaced (or removed: MISSING)."""
    *parents, last = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    if value is MISSING:
        del section[last]
    else:
        section[last] = value
    return config


T = "text_config."
BAD_V41: list[tuple[str, object]] = [
    ("model_type", "llama"),
    ("model_type", MISSING),
    ("model_type", 41),
    ("architectures", ["LlamaForCausalLM"]),
    ("architectures", "DeepseekV41ForCausalLM"),
    ("dtype", "float16"),
    ("text_config", MISSING),
    ("text_config", []),
    ("eos_token_id", 129280),
    ("eos_token_id", [1]),
    ("image_token_id", -1),
    ("image_token_id", MISSING),
    ("vision_config.num_hidden_layers", "32"),
    ("quantization_config.quant_method", "awq"),
    ("quantization_config.quant_method", MISSING),
    ("quantization_config.scale_fmt", "float"),
    ("quantization_config.activation_scheme", "static"),
    ("quantization_config.weight_block_size", [64, 64]),
    ("quantization_config.weight_block_size", [32]),
    ("quantization_config.expert_dtype", "int4"),
    ("quantization_config.expert_dtype", MISSING),
    (T + "model_type", "deepseek_v3"),
    (T + "vocab_size", 0),
    (T + "vocab_size", 2**70),
    (T + "hidden_size", MISSING),
    (T + "hidden_size", 5120.0),
    (T + "hidden_size", True),
    (T + "hidden_size", 5121),
    (T + "hidden_size", -5120),
    (T + "num_hidden_layers", 2**30),
    (T + "num_key_value_heads", 2),
    (T + "hidden_act", "gelu"),
    (T + "scoring_func", "sigmoid"),
    (T + "topk_method", "greedy"),
    (T + "tie_word_embeddings", True),
    (T + "attention_bias", True),
    (T + "n_shared_experts", 2),
    (T + "n_group", 8),
    (T + "norm_topk_prob", 1),
    (T + "rms_norm_eps", math.nan),
    (T + "rms_norm_eps", 0.0),
    (T + "rope_theta", math.inf),
    (T + "rope_theta", 10**400),
    (T + "swiglu_limit", -1.0),
    (T + "swiglu_limit", "10"),
    (T + "routed_scaling_factor", MISSING),
    (T + "rope_scaling.rope_type", "linear"),
    (T + "rope_scaling.factor", 0.5),
    (T + "rope_scaling.beta_fast", 0.5),
    (T + "rope_scaling.original_max_position_embeddings", MISSING),
    (T + "qk_rope_head_dim", 63),
    (T + "qk_rope_head_dim", 512),
    (T + "qk_rope_head_dim", 256),
    (T + "o_groups", 7),
    (T + "num_experts_per_tok", 385),
    (T + "sliding_window", 0),
    (T + "num_hash_layers", 3),
    (T + "compress_ratios", [0, 0] + [2] * 18 + [1] * 20),
    (T + "compress_ratios", [0, 0] + [4] * 18 + [1] * 20 + [0] * 3),
    (T + "compress_ratios", [0, 0] + [2] * 18 + [1] * 20 + [1, 0, 0]),
    (T + "compress_ratios", "0,0,2"),
    (T + "kv_source_layer_ids", [2, 8, 14]),
    (T + "kv_source_layer_ids", [8, 14, 20]),
    (T + "kv_source_layer_ids", [1, 2, 8, 14, 20]),
    (T + "kv_source_layer_ids", [8, 2, 14, 20]),
    (T + "kv_source_layer_ids", [2, 8, 14, 20, 40]),
    (T + "index_source_layer_ids", [2, 14, 20]),
    (T + "index_k_source_layer_ids", [2, 8, 14, 20, 24]),
    (T + "index_k_source_layer_ids", [2, 8, 14]),
    (T + "candidate_source_layer_id", 21),
    (T + "candidate_source_layer_id", 14),
    (T + "candidate_source_layer_id", 400),
    (T + "candidate_topk_blocks", 0),
    (T + "hc_mult", 1000),
    (T + "hc_shifted", "yes"),
    (T + "engram_layer_ids", [1, 20]),
    (T + "engram_layer_ids", [14, 1]),
    (T + "engram_num_embeddings", [384006168]),
    (T + "engram_max_ngram_size", 1),
    (T + "engram_head_dim", 250),
    (T + "engram_pad_token_id", 200000),
    (T + "engram_compressed_vocab_size", 129281),
    (T + "dspark_noise_token_id", 129280),
    (T + "dspark_target_layer_ids", [19, 38, 39]),
    (T + "dspark_target_layer_ids", [38, 37]),
    (T + "dspark_target_layer_ids", []),
    (T + "dspark_target_layer_ids", [38, 40]),
    (T + "dspark_num_experts_per_tok", 129),
    (T + "dspark_markov_rank", MISSING),
    (T + "dspark_confidence_temperatures", 1.0),
    (T + "dspark_confidence_temperatures", [1.0] * 4),
    (T + "dspark_confidence_temperatures", [1.0, 1.0, 0.0, 1.0, 1.0]),
    (T + "dspark_confidence_temperatures", [1.0, 1.0, "1", 1.0, 1.0]),
]


@pytest.mark.parametrize(("path", "value"), BAD_V41, ids=lambda x: str(x)[:40])
def test_bad_field_is_named(path: str, value: object) -> None:
    with pytest.raises(ModelConfigError) as caught:
        ModelSpec.from_config(changed(v41_flash(), path, value))
    assert caught.value.param == path
    assert path in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("compress_ratios", [0, 0] + [2, 128] * 20 + [4, 0]),
        ("compress_ratios", [0, 0] + [4, 128] * 20),
        ("index_head_dim", 96),
        ("num_hash_layers", 44),
        ("expert_dtype", "fp5"),
        ("q_lora_rank", 1024 + 32),
        ("torch_dtype", "float32"),
    ],
)
def test_bad_v4_field_is_named(path: str, value: object) -> None:
    with pytest.raises(ModelConfigError) as caught:
        ModelSpec.from_config(changed(v4_flash(), path, value))
    assert caught.value.param == path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (T + "use_fp4_sparse_kv", False),
        (T + "hc_shifted", False),
        (T + "index_k_source_layer_ids", [2, 8, 14, 20]),
        (T + "dspark_target_attn_input", False),
        (T + "candidate_source_layer_id", -1),
        (T + "candidate_source_layer_id", None),
        (T + "rope_scaling", None),
        (T + "some_future_key", {"a": 1}),
        ("quantization_config.fmt", "e4m3"),
        ("architectures", ["DeepseekV41ForConditionalGeneration"]),
        (T + "engram_num_embeddings", [384006200, 384016700]),
    ],
)
def test_optional_and_unknown_keys_are_accepted(path: str, value: object) -> None:
    ModelSpec.from_config(changed(v41_flash(), path, value))


def test_optional_keys_have_effect() -> None:
    def spec(path: str, value: object) -> ModelSpec:
        return ModelSpec.from_config(changed(v41_flash(), path, value))

    assert not spec(T + "use_fp4_sparse_kv", False).kv_fp4
    assert not spec(T + "hc_shifted", False).hc_shifted
    assert spec(T + "candidate_source_layer_id", -1).candidate_source is None
    assert spec(T + "rope_scaling", None).yarn is None
    assert spec(T + "dspark_block_size", 0).draft is None
    draft = spec(T + "dspark_target_attn_input", False).draft
    assert draft is not None
    assert not draft.targets_attn_input
    assert draft.confidence_temperatures == (1.0,) * 5
    fitted = spec(T + "dspark_confidence_temperatures", [0.5, 1, 2.0, 1.5, 3.0]).draft
    assert fitted is not None
    assert fitted.confidence_temperatures == (0.5, 1.0, 2.0, 1.5, 3.0)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe{}", b"null", b"[" * 100_000])
def test_config_file_that_is_no_json_object(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        ModelSpec.from_directory(tmp_path)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        ModelSpec.from_directory(tmp_path)


def test_config_file_of_absurd_size(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(CheckpointError, match="larger"):
        ModelSpec.from_directory(tmp_path)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 200)
    | st.floats()
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def _paths(config: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in config.items():
        found.append(prefix + name)
        if isinstance(value, dict):
            found += _paths(value, f"{prefix}{name}.")
    return found


def _mutate(config: dict[str, Any], changes: list[tuple[str, object, bool]]) -> dict[str, Any]:
    for path, value, remove in changes:
        try:
            changed(config, path, MISSING if remove else copy.deepcopy(value))
        except (KeyError, TypeError, IndexError):
            continue  # an earlier change removed or replaced the section
    return config


def _accepts_or_names(config: dict[str, Any]) -> None:
    try:
        spec = ModelSpec.from_config(config)
    except ModelConfigError as error:
        assert error.param
        return
    assert len(spec.layers) == spec.num_layers
    assert spec.kv_groups(kv_quant=True)


PATHS_V41 = _paths(v41_flash())
PATHS_V4 = _paths(v4_flash())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS_V41), VALUES, st.booleans()), max_size=3))
def test_mutated_v41_config_never_raises_anything_else(
    changes: list[tuple[str, object, bool]],
) -> None:
    _accepts_or_names(_mutate(v41_flash(), changes))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS_V4), VALUES, st.booleans()), max_size=3))
def test_mutated_v4_config_never_raises_anything_else(
    changes: list[tuple[str, object, bool]],
) -> None:
    _accepts_or_names(_mutate(v4_flash(), changes))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(PATHS_V41) | st.text(max_size=8), VALUES, max_size=6))
def test_arbitrary_object_never_raises_anything_else(config: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError):
        ModelSpec.from_config(json.loads(json.dumps(config)))
