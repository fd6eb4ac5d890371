"""What the released configs mean: roles of layers, cache groups, replay formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core.kv import GroupKind, RecordFormat
from headrace.model.spec import ModelSpec
from tests.unit.model.released_configs import v4_flash, v41_flash

V41 = ModelSpec.from_config(v41_flash())
V4 = ModelSpec.from_config(v4_flash())


def test_v41_layer_roles_are_those_of_the_published_table() -> None:
    sources = {0: (None, None), 2: (2, 2), 7: (2, 2), 8: (8, 8), 13: (8, 8), 19: (14, 14)}
    sources |= {20: (20, 20), 23: (20, 20), 24: (20, 24), 27: (20, 24), 28: (20, 28)}
    sources |= {35: (20, 32), 39: (20, 36)}
    for layer, (kv, index) in sources.items():
        assert (V41.layers[layer].kv_source, V41.layers[layer].index_source) == (kv, index)
    assert [x.index for x in V41.layers if x.compresses] == [2, 8, 14, 20]
    assert [x.index for x in V41.layers if x.owns_index_key] == [2, 8, 14, 20]
    assert [x.index for x in V41.layers if x.indexes] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [x.index for x in V41.layers if x.engram] == [1, 14]
    assert V41.layers[36].index_key_source == 20
    assert V41.n_prefill_layer == 20
    assert not any(x.hash_routing for x in V41.layers)


def test_v41_fields() -> None:
    assert V41.architecture == "deepseek_v41"
    assert (V41.hidden, V41.q_lora_rank, V41.moe_inter) == (5120, 1280, 2304)
    assert V41.rms_eps == 1e-20
    assert V41.yarn is not None
    assert V41.yarn.original_max_position == 65536
    assert V41.quant is not None
    assert (V41.quant.weight_block, V41.quant.act_group) == ((32, 32), 32)
    assert V41.engram is not None
    assert V41.engram.columns == 24
    assert V41.draft is not None
    assert (V41.draft.stages, V41.draft.targets) == (3, (37, 38, 39))
    assert V41.draft.targets_attn_input
    assert V41.hc_shifted
    assert not V41.q_head_norm
    assert V41.kv_fp4
    assert V41.image_id == 129264
    assert (V41.vision_layers, V41.has_vision_bias) == (32, True)
    assert (V41.candidate_source, V41.candidate_blocks, V41.candidate_block_size) == (20, 2048, 8)


def test_v41_global_kv_is_890_bytes_per_token() -> None:
    assert V41.global_kv_bytes_per_token() == 890
    fp8 = v41_flash()
    fp8["text_config"]["use_fp4_sparse_kv"] = False
    assert ModelSpec.from_config(fp8).global_kv_bytes_per_token() == 1490


def test_v41_cache_groups() -> None:
    groups = {g.name: g for g in V41.kv_groups(kv_quant=True)}
    assert list(groups) == [
        "main_c1",
        "main_c2",
        "index_c1",
        "index_c2",
        "window_producer",
        "window_consumer",
        "window_draft",
        "compressor_c2",
    ]
    assert groups["main_c2"].layers == (2, 8, 14)
    assert groups["main_c1"].layers == (20,)
    assert groups["window_producer"].layers == tuple(range(20))
    assert groups["window_consumer"].layers == tuple(range(20, 40))
    assert groups["window_draft"].layers == (0, 1, 2)
    assert {g.rows for g in groups.values() if g.kind is GroupKind.RING} == {134}
    assert groups["compressor_c2"].rows == 7
    assert groups["main_c1"].bytes_per_row == 288
    assert groups["index_c2"].bytes_per_row == 68
    rings = [g for g in groups.values() if g.kind is GroupKind.RING]
    assert sum(len(g.layers) * g.rows * g.bytes_per_row for g in rings) == 3_042_336
    state = groups["compressor_c2"]
    assert len(state.layers) * state.rows * state.bytes_per_row == 86_016


def test_plain_groups_keep_names_and_shapes() -> None:
    plain, quantised = V41.kv_groups(kv_quant=False), V41.kv_groups(kv_quant=True)
    assert {g.format for g in plain} == {RecordFormat.PLAIN}
    assert [(g.name, g.layers, g.rows) for g in plain] == [
        (g.name, g.layers, g.rows) for g in quantised
    ]
    assert V41.kv_groups(kv_quant=True, backtrack=9)[4].rows == 137


def test_replay_and_keep_formulas() -> None:
    assert (V41.keep(True), V41.keep(False)) == (140, 1)
    assert (V41.replay_layers(True), V41.replay_layers(False)) == (20, 40)
    assert V41.replay_rows("bounded", True) == 128
    assert V41.replay_rows("exact", True) == 2560
    assert V41.replay_rows("exact", False) == 5120
    with pytest.raises(ValueError, match="other"):
        V41.replay_rows("other", True)


def test_v4_roles_and_groups() -> None:
    assert V4.num_layers == 43
    assert [x.index for x in V4.layers if x.hash_routing] == [0, 1, 2]
    assert all(x.kv_source == x.index for x in V4.layers if x.ratio)
    assert sum(x.indexes for x in V4.layers) == 21
    assert V4.q_head_norm
    assert V4.use_ape
    assert V4.index_hadamard
    assert not V4.hc_shifted
    assert V4.draft is None
    assert V4.n_prefill_layer == 43
    assert V4.global_kv_bytes_per_token() == 3514.25
    groups = {g.name: g for g in V4.kv_groups(kv_quant=True)}
    assert set(groups) == {
        "main_c4",
        "main_c128",
        "index_c4",
        "window",
        "compressor_c4",
        "compressor_c128",
        "index_compressor_c4",
    }
    assert groups["main_c4"].bytes_per_row == groups["window"].bytes_per_row == 584
    assert (groups["compressor_c4"].rows, groups["compressor_c4"].width) == (8, 2048)
    assert (groups["compressor_c128"].rows, groups["compressor_c128"].width) == (128, 1024)
    assert (groups["index_compressor_c4"].rows, groups["index_compressor_c4"].width) == (8, 512)


def test_v4_with_three_surplus_ratios_of_draft_layers() -> None:
    config = v4_flash()
    config["compress_ratios"] += [0, 0]
    assert ModelSpec.from_config(config).layers == V4.layers


@pytest.mark.parametrize("case", ["v41_a", "v41_fp8", "v41_dims", "v41_smooth", "v4_tiny"])
def test_golden_configs_parse(golden_model_dir: Callable[[str], Path], case: str) -> None:
    spec = ModelSpec.from_directory(golden_model_dir(case))
    assert spec.vocab_size == 512
    assert (spec.quant is not None) == (case in ("v41_fp8", "v41_dims"))
    assert (spec.draft is not None) == (case in ("v41_a", "v41_fp8", "v41_dims"))
    assert spec.vision_layers == 0
    assert not spec.has_vision_bias
