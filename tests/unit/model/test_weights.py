"""Loading official checkpoints: right numbers, and every kind of damage reported."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.spec import ModelSpec
from headrace.model.stored_formats import E2M1
from headrace.model.tiny import random_tensor, write_tiny
from headrace.model.weight_plan import TensorSpec, weight_plan
from headrace.model.weights import Checkpoint

WEIGHT = "layers.2.attn.wq_a.weight"
SCALE = "layers.2.attn.wq_a.scale"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantised")
    write_tiny(directory)
    return directory


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    write_tiny(directory, shards=3)
    return directory


@pytest.fixture
def copied(quantised: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantised, tmp_path / "copy"))


@pytest.fixture
def copied_shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def opened(directory: Path) -> Checkpoint:
    return Checkpoint.open(directory, ModelSpec.from_directory(directory))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(directory)
    assert caught.value.exit_code == 3
    return str(caught.value)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


# --- numbers -----------------------------------------------------------------------------------


def slow_dequantise(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Independent, element-wise meaning of a stored tensor."""
    stored = tensors[name]
    scale = tensors.get(name.removesuffix(".weight") + ".scale")
    if scale is None:
        return stored.double()
    powers = torch.exp2(scale.view(torch.uint8).double() - 127)
    if stored.dtype == torch.int8:
        codes = stored.view(torch.uint8).long()
        pairs = torch.stack((codes % 16, codes // 16), dim=-1).flatten(1)
        numbers = torch.tensor(E2M1, dtype=torch.float64)[pairs % 8]
        numbers = torch.where(pairs >= 8, -numbers, numbers)
    else:
        numbers = stored.double()
    rows = torch.arange(numbers.shape[0]) * scale.shape[0] // numbers.shape[0]
    columns = torch.arange(numbers.shape[1]) * scale.shape[1] // numbers.shape[1]
    return numbers * powers[rows][:, columns]


@pytest.mark.parametrize("case", ["v41_fp8", "v41_dims", "v41_a", "v4_tiny"])
def test_every_golden_tensor_dequantises_exactly(
    golden_model_dir: Callable[[str], Path], case: str
) -> None:
    directory = golden_model_dir(case)
    checkpoint = opened(directory)
    tensors = load_file(directory / "model.safetensors")
    for plan in weight_plan(checkpoint.spec):
        numbers = checkpoint.dequantised(plan.name, torch.float64)
        assert numbers.shape == plan.shape == checkpoint.shape(plan.name)
        assert torch.equal(numbers.double(), slow_dequantise(tensors, plan.name)), plan.name
    for layer in checkpoint.spec.engram.layers if checkpoint.spec.engram is not None else ():
        checkpoint.engram_rows(layer)
    assert checkpoint.loaded_bytes == checkpoint.total_bytes


def test_tiles_of_a_tensor_larger_than_a_tile(tmp_path: Path) -> None:
    write_tiny(tmp_path, preset="v4-tiny")
    checkpoint = opened(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("layers.0.hc_attn_fn", "layers.1.attn.wq_b.weight", "embed.weight"):
        numbers = checkpoint.dequantised(name, torch.float64)
        assert torch.equal(numbers, slow_dequantise(tensors, name))


def test_many_tiles(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = opened(quantised)
    names = [WEIGHT, "layers.2.ffn.experts.1.w2.weight", "layers.1.engram.embed.weight"]
    whole = [checkpoint.dequantised(name, torch.float32) for name in names]
    monkeypatch.setattr("headrace.model.weights.TILE_NUMBERS", 1000)
    for name, expected in zip(names, whole, strict=True):
        assert torch.equal(checkpoint.dequantised(name, torch.float32), expected)


def test_bf16_result_is_exact(quantised: Path) -> None:
    checkpoint = opened(quantised)
    single = checkpoint.dequantised(WEIGHT, torch.float32)
    assert torch.equal(checkpoint.dequantised(WEIGHT, torch.bfloat16).float(), single)


def test_result_goes_into_a_given_tensor(quantised: Path) -> None:
    checkpoint = opened(quantised)
    out = torch.empty(3, *checkpoint.shape(WEIGHT))
    assert checkpoint.dequantised(WEIGHT, torch.float32, out[1]).data_ptr() == out[1].data_ptr()
    assert torch.equal(out[1], checkpoint.dequantised(WEIGHT, torch.float32))


def test_stored_weights_stay_close_to_the_numbers_they_came_from(quantised: Path) -> None:
    checkpoint = opened(quantised)
    plan = TensorSpec(WEIGHT, checkpoint.shape(WEIGHT), "linear")
    numbers = random_tensor(checkpoint.spec, plan, seed=1)
    error = (checkpoint.dequantised(WEIGHT, torch.float32) - numbers).std() / numbers.std()
    assert 0.01 < float(error) < 0.04


def test_engram_rows_equal_the_whole_table(quantised: Path) -> None:
    checkpoint = opened(quantised)
    table = checkpoint.engram_rows(1)
    whole = checkpoint.dequantised("layers.1.engram.embed.weight", torch.float32)
    rows = torch.tensor([[[5, 2055, 0], [7, 7, 1000]]])
    assert table.rows == 2056
    assert torch.equal(table.gather(rows), whole[rows])
    assert torch.equal(table.gather(rows, torch.bfloat16), whole[rows].bfloat16())
    assert table.gather(rows, torch.float64).dtype == torch.float64
    assert table.gather(rows[:, :0]).shape == (1, 0, 3, 32)


def test_shards_hold_the_same_numbers_as_one_file(quantised: Path, sharded: Path) -> None:
    one, many = opened(quantised), opened(sharded)
    assert one.total_bytes == many.total_bytes
    for plan in weight_plan(one.spec):
        a = one.dequantised(plan.name, torch.float32)
        assert torch.equal(a, many.dequantised(plan.name, torch.float32))


def test_stored_tensors_are_mapped(quantised: Path) -> None:
    checkpoint = opened(quantised)
    assert checkpoint.tensor(SCALE).dtype == torch.float8_e8m0fnu
    assert checkpoint.tensor(WEIGHT).data_ptr() == checkpoint.tensor(WEIGHT).data_ptr()
    assert checkpoint.has(WEIGHT)
    assert not checkpoint.has("layers.2.attn.nothing")


def test_progress_counts_every_tensor_once(quantised: Path) -> None:
    seen: list[tuple[int, int]] = []
    spec = ModelSpec.from_directory(quantised)
    checkpoint = Checkpoint.open(
        quantised, spec, progress=lambda done, total: seen.append((done, total))
    )
    for plan in weight_plan(spec):
        if plan.kind != "engram":
            checkpoint.dequantised(plan.name, torch.bfloat16)
            checkpoint.tensor(plan.name)
    checkpoint.engram_rows(1)
    checkpoint.engram_rows(1)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)


def test_model_prefix_and_unused_tensors_are_accepted(copied: Path) -> None:
    expected = opened(copied).dequantised("embed.weight", torch.float32)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)
        tensors["vision.norm.weight"] = torch.ones(4)
        tensors["image_start"] = torch.ones(4)
        tensors["mtp.0.embed.weight"] = torch.ones(4)

    rewrite(copied, change)
    assert torch.equal(opened(copied).dequantised("embed.weight", torch.float32), expected)


# --- damage ------------------------------------------------------------------------------------


def test_all_differences_are_listed_together(copied: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["norm.weight"], tensors[SCALE]
        tensors["layers.9.attn_norm.weight"] = torch.ones(256)
        tensors["head.weight"] = torch.ones(511, 256, dtype=torch.bfloat16)
        tensors["layers.0.attn.attn_sink"] = torch.ones(8, dtype=torch.bfloat16)

    rewrite(copied, change)
    text = refusal(copied)
    assert f"missing (2): {SCALE}, norm.weight" in text
    assert "unexpected (1): layers.9.attn_norm.weight" in text
    assert "wrong shape (1): head.weight [511, 256], expected [512, 256]" in text
    assert "wrong dtype (1): layers.0.attn.attn_sink BF16, expected F32" in text


def test_long_lists_are_cut_but_counted(copied: Path) -> None:
    rewrite(copied, lambda tensors: tensors.clear() or tensors.update(x=torch.ones(1)))
    text = refusal(copied)
    assert "missing (" in text
    assert "more" in text
    assert len(text) < 2000


def test_quantised_config_with_plain_weights(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    del config["quantization_config"]
    (copied / "config.json").write_text(json.dumps(config))
    text = refusal(copied)
    assert "unexpected" in text
    assert "F8_E4M3, expected BF16" in text


def test_no_weights_at_all(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(copied)


def test_missing_shard(copied_shards: Path) -> None:
    (copied_shards / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(copied_shards)


@pytest.mark.parametrize("size", [0, 5, 8, 200, -1, -100_000])
def test_truncated_shard(copied_shards: Path, size: int) -> None:
    path = copied_shards / "model-00003-of-00003.safetensors"
    with path.open("r+b") as file:
        file.truncate(size if size >= 0 else path.stat().st_size + size)
    assert "model-00003-of-00003.safetensors is truncated" in refusal(copied_shards)


def test_damage_in_two_shards_is_reported_at_once(copied_shards: Path) -> None:
    for number in (1, 2):
        (copied_shards / f"model-0000{number}-of-00003.safetensors").write_bytes(b"")
    text = refusal(copied_shards)
    assert "model-00001-of-00003" in text
    assert "model-00002-of-00003" in text


def framed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype: object, shape: object, offsets: object) -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (struct.pack("<Q", 2**60) + b"{}", "header length"),
        (framed(b"{nonsense"), "not JSON"),
        (framed(b"\xff\xfe"), "not JSON"),
        (framed(b"[" * 100_000), "not JSON"),
        (framed(b"[]"), "not a JSON object"),
        (framed(b'{"a": 3}'), "malformed"),
        (framed(b'{"a": {"dtype": "F32"}}'), "malformed"),
        (framed(entry("F32", [1], [0, 3]), b"123"), "malformed"),
        (framed(entry("F32", [-1], [0, 4]), b"1234"), "malformed"),
        (framed(entry("F32", [True], [0, 4]), b"1234"), "malformed"),
        (framed(entry("F32", [1], [0, 4, 8]), b"1234"), "malformed"),
        (framed(entry("F32", [1], [4, 8]), b"12345678"), "starts at byte"),
        (framed(entry("F32", [1], [0, 4]), b"12345"), "bytes follow the last"),
        (framed(entry("Q7", [1], [4, 0]), b""), "starts at byte"),
    ],
)
def test_corrupt_header(copied: Path, content: bytes, problem: str) -> None:
    (copied / "model.safetensors").write_bytes(content)
    text = refusal(copied)
    assert "model.safetensors is damaged" in text
    assert problem in text


def test_weights_that_cannot_be_opened(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    (copied / "model.safetensors").mkdir()
    assert "model.safetensors cannot be read" in refusal(copied)


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_index_that_disagrees_with_the_shards(copied_shards: Path) -> None:
    def change(weight_map: dict[str, str]) -> None:
        weight_map["embed.weight"] = "model-00003-of-00003.safetensors"
        del weight_map["norm.weight"]

    edit_index(copied_shards, change)
    text = refusal(copied_shards)
    assert "in another file than model.safetensors.index.json says (1): embed.weight" in text
    assert "not listed in model.safetensors.index.json (1): norm.weight" in text


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_index_must_not_leave_its_folder(copied_shards: Path, name: str) -> None:
    edit_index(copied_shards, lambda weight_map: weight_map.update({"embed.weight": name}))
    assert "outside its folder" in refusal(copied_shards)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}', b"\xff"]
)
def test_malformed_index(copied_shards: Path, data: bytes) -> None:
    (copied_shards / "model.safetensors.index.json").write_bytes(data)
    assert "model.safetensors.index.json" in refusal(copied_shards)


def test_tensor_stored_twice(copied_shards: Path) -> None:
    path = copied_shards / "model-00003-of-00003.safetensors"
    tensors = load_file(path)
    tensors["model.embed.weight"] = torch.ones(512, 256, dtype=torch.bfloat16)
    save_file(tensors, path)
    assert "stored twice (1): embed.weight" in refusal(copied_shards)


def with_byte(tensor: Tensor, byte: int) -> Tensor:
    """`tensor` with its last byte replaced."""
    data = tensor.view(torch.uint8).clone()
    data.view(-1)[-1] = byte
    return data.view(tensor.dtype)


@pytest.mark.parametrize("name", [SCALE, "layers.2.ffn.experts.3.w2.scale"])
def test_nan_scale_names_the_tensor(copied: Path, name: str) -> None:
    rewrite(copied, lambda tensors: tensors.update({name: with_byte(tensors[name], 255)}))
    checkpoint = opened(copied)
    with pytest.raises(CheckpointError, match=name):
        checkpoint.dequantised(name.replace(".scale", ".weight"), torch.float32)


def test_nan_weights_name_the_tensor(copied: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[WEIGHT] = with_byte(tensors[WEIGHT], 0x7F)
        tensors["norm.weight"][3] = float("nan")

    rewrite(copied, change)
    checkpoint = opened(copied)
    for name in (WEIGHT, "norm.weight"):
        with pytest.raises(CheckpointError, match=name):
            checkpoint.dequantised(name, torch.float32)


def test_nan_engram_scale_names_the_tensor(copied: Path) -> None:
    name = "layers.1.engram.embed.scale"
    rewrite(copied, lambda tensors: tensors.update({name: with_byte(tensors[name], 255)}))
    with pytest.raises(CheckpointError, match=name):
        opened(copied).engram_rows(1)
