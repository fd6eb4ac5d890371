"""The weight plan against the headers of the golden checkpoints and the released tensor count."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.model.spec import ModelSpec
from headrace.model.weight_plan import StoredTensor, skipped, stored_tensors, weight_plan
from tests.unit.model.released_configs import v4_flash, v41_flash


def planned(spec: ModelSpec) -> dict[str, StoredTensor]:
    stored = [s for t in weight_plan(spec) for s in stored_tensors(t, spec.quant)]
    assert len({s.name for s in stored}) == len(stored)
    return {s.name: s for s in stored}


@functools.cache
def planned_v41() -> dict[str, StoredTensor]:
    return planned(ModelSpec.from_config(v41_flash()))


@pytest.mark.parametrize("case", ["v41_a", "v41_fp8", "v41_dims", "v41_smooth", "v4_tiny"])
def test_plan_equals_golden_header(golden_model_dir: Callable[[str], Path], case: str) -> None:
    directory = golden_model_dir(case)
    data = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    found = {n: StoredTensor(n, v["dtype"], tuple(v["shape"])) for n, v in header.items()}
    assert planned(ModelSpec.from_directory(directory)) == found


def test_released_v41_has_the_published_number_of_tensors() -> None:
    stored = planned_v41()
    vision = 2 + 32 * 8 + 1 + 4 + 3
    assert len(stored) + vision == 96_085
    assert sum(name.startswith("mtp.") for name in stored) == 2401


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.7.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.20.attn.compressor.wkv.weight", "BF16", (512, 5120)),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("layers.3.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.3.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.3.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.14.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.0.hc_attn_fn", "F32", (24, 20480)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
    ],
)
def test_released_v41_shapes(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert planned_v41()[name] == StoredTensor(name, dtype, shape)


def test_tensors_that_follow_from_the_roles_of_layers() -> None:
    stored = planned_v41()
    assert "layers.20.attn.compressor.wgate.weight" not in stored  # ratio 1 has no gate
    assert "layers.24.attn.indexer.wk.weight" not in stored  # index source, no KV owner
    assert not any(name.startswith("hc_head") for name in stored)


def test_v4_tensors() -> None:
    stored = planned(ModelSpec.from_config(v4_flash()))
    assert stored["layers.0.ffn.gate.tid2eid"].shape == (129280, 6)
    assert "layers.0.ffn.gate.bias" not in stored
    assert stored["layers.2.attn.compressor.ape"].shape == (4, 1024)
    assert stored["layers.3.attn.compressor.ape"].shape == (128, 512)
    assert "layers.3.attn.indexer.wq_b.weight" not in stored
    assert stored["hc_head_scale"].shape == (1,)
    assert stored["layers.0.attn.wq_a.scale"].shape == (8, 32)


def test_fp8_experts_are_stored_like_other_weights() -> None:
    config = v41_flash()
    config["quantization_config"]["expert_dtype"] = "fp8"
    config["text_config"]["n_routed_experts"] = 8
    stored = planned(ModelSpec.from_config(config))
    assert stored["layers.3.ffn.experts.0.w1.weight"].dtype == "F8_E4M3"
    assert stored["layers.3.ffn.experts.0.w1.scale"].shape == (72, 160)


def test_known_but_unused_tensors() -> None:
    v41, v4 = ModelSpec.from_config(v41_flash()), ModelSpec.from_config(v4_flash())
    for name in ("vision.norm.weight", "aligner.w1.bias", "image_start", "mtp.1.embed.weight"):
        assert skipped(name, v41)
    assert not skipped("mtp.3.attn_norm.weight", v41)
    assert not skipped("layers.0.unknown", v41)
    assert skipped("mtp.0.e_proj.weight", v4)
