"""Checkpoints made to do harm: refused at load by name, in bounded time and memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.config import EngineConfig
from headrace.core.output import FinishReason
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.load import load_engine
from headrace.errors import CheckpointError, ModelConfigError
from headrace.model.engram_tables import engram_tables
from headrace.model.loader import load_model
from headrace.model.spec import ModelSpec
from headrace.model.tiny import write_tiny
from headrace.model.weight_checks import check_mapped_finite, check_scales
from headrace.model.weights import Checkpoint
from headrace.ops.numerics import Numerics
from tests.unit.model.released_configs import v4_flash, v41_flash

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for preset in ("tiny-8", "v4-tiny"):
        made[preset] = tmp_path_factory.mktemp(preset)
        write_tiny(made[preset], preset=preset)
    return made


@pytest.fixture
def copied(tiny: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny["tiny-8"], tmp_path / "copy"))


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def refusal(directory: Path, *, with_draft: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, Numerics(dtype="float32"), with_draft=with_draft)
    assert caught.value.exit_code == 3
    return caught.value.message


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("embed.weight", NAN),
        ("embed.weight", -INF),
        ("head.weight", INF),
        ("norm.weight", INF),
        ("layers.3.attn_norm.weight", NAN),
        ("layers.3.attn.attn_sink", INF),
        ("layers.3.ffn.gate.bias", -INF),
        ("layers.1.engram.q_weight", INF),
        ("mtp.0.markov_head.embed.weight", NAN),
        ("mtp.0.norm.weight", INF),
    ],
)
def test_numbers_that_are_not_finite_name_the_tensor(copied: Path, name: str, value: float) -> None:
    rewrite(copied, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    kind = "NaN" if value != value else "infinite numbers"
    assert f"{name} holds {kind}" in refusal(copied, with_draft=True)


def test_scales_whose_products_overflow_name_the_tensor(copied: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["layers.2.attn.wq_a.scale"].view(torch.uint8).fill_(254)

    rewrite(copied, change)
    assert "layers.2.attn.wq_a.weight holds infinite numbers" in refusal(copied)


def test_every_tile_of_a_mapped_tensor_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.model.weight_checks.TILE_BYTES", 64)
    for place in (0, 31, 32, 99):
        numbers = torch.ones(10, 10, dtype=torch.bfloat16)
        check_mapped_finite("x", numbers)
        numbers.view(-1)[place] = NAN
        with pytest.raises(CheckpointError, match="x holds NaN"):
            check_mapped_finite("x", numbers)
        scales = torch.full((10, 10), 254, dtype=torch.uint8)
        heard: list[int] = []
        check_scales("x", scales.view(torch.float8_e8m0fnu), heard.append)
        assert heard == [64, 36]
        scales.view(-1)[place] = 255
        with pytest.raises(CheckpointError, match="x holds NaN"):
            check_scales("x", scales)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([-1, 0], "names expert -1, allowed are 0 to 7"),
        ([0, 8], "names expert 8, allowed are 0 to 7"),
        ([2**62, 0], f"names expert {2**62}"),
        ([5, 5], "names an expert twice for token 77"),
    ],
)
def test_expert_table_with_impossible_rows(
    tiny: dict[str, Path], tmp_path: Path, row: list[int], text: str
) -> None:
    directory = Path(shutil.copytree(tiny["v4-tiny"], tmp_path / "copy"))
    name = "layers.0.ffn.gate.tid2eid"
    rewrite(directory, lambda tensors: tensors[name][77].copy_(torch.tensor(row)))
    assert f"{name} {text}" in refusal(directory)


# --- Engram: scales are looked at, codes only when they are read ---------------------------------


def test_nan_engram_scale_is_refused_at_load(copied: Path) -> None:
    name = "layers.1.engram.embed.scale"
    rewrite(copied, lambda tensors: tensors[name].view(torch.uint8)[1234].fill_(255))
    assert f"{name} holds NaN" in refusal(copied)


def answers(directory: Path, *prompts: tuple[int, ...]) -> list[tuple[tuple[int, ...], Any]]:
    """(token ids, how it ended) of prompts that run together."""
    engine = load_engine(directory, EngineConfig(max_num_seqs=4, num_blocks=8, threads=1))
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, greedy))
    ids: dict[str, list[int]] = {}
    ends: dict[str, Any] = {}
    while engine.has_work():
        for chunk in engine.step():
            ids.setdefault(chunk.request_id, []).extend(chunk.tokens)
            ends[chunk.request_id] = chunk.finish
    return [(tuple(ids[str(n)]), ends[str(n)]) for n in range(len(prompts))]


def test_nan_engram_row_ends_only_the_request_that_reads_it(copied: Path) -> None:
    bad, good = tuple(range(100, 140)), tuple(range(40, 80))
    expected = answers(copied, good)
    spec = ModelSpec.from_directory(copied)
    tables = engram_tables(spec, copied / "tokenizer.json")
    assert tables is not None
    # The row of the last trigram of `bad`: its look-up comes first, in the prefill.
    newest_first = tables.token_map[list(bad[-1:-4:-1])].astype("int64")
    row = int(tables.hash_rows(0, newest_first)[-1])

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.engram.embed.weight"].view(torch.uint8)[row].fill_(0x7F)

    rewrite(copied, change)
    # The last request takes over blocks and slots of the one that failed.
    alone, *together = answers(copied, bad)[0], *answers(copied, bad, good, good)
    assert alone == together[0] == ((), FinishReason.ERROR)
    assert together[1:] == expected * 2
    assert expected[0][1] is FinishReason.LENGTH


# --- config: nothing is expanded before it is checked --------------------------------------------

T = "text_config."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_routed_experts", 2**31),
        ("n_routed_experts", 2**16 + 1),
        ("dspark_n_routed_experts", 2**31),
        ("num_experts_per_tok", 2**31),
        ("num_hidden_layers", 1025),
        ("num_attention_heads", 2**31),
        ("index_n_heads", 2**31),
        ("index_topk", 2**31),
        ("hidden_size", 2**31),
        ("sliding_window", 2**31),
        ("vocab_size", 2**31),
        ("max_position_embeddings", 2**40),
        ("engram_n_heads", 65),
        ("engram_max_ngram_size", 9),
        ("engram_layer_ids", list(range(17))),
    ],
)
def test_absurd_sizes_name_the_field(name: str, value: object) -> None:
    config = v41_flash()
    config["text_config"][name] = value
    if name == "engram_layer_ids":
        config["text_config"]["engram_num_embeddings"] = [1] * 17
    with pytest.raises(ModelConfigError) as caught:
        ModelSpec.from_config(config)
    assert caught.value.param == T + name


def test_v4_is_bounded_too() -> None:
    with pytest.raises(ModelConfigError) as caught:
        ModelSpec.from_config(v4_flash() | {"n_routed_experts": 2**31})
    assert caught.value.param == "n_routed_experts"


def test_config_that_asks_for_millions_of_tensors_is_refused_soon(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    text = config["text_config"]
    text["n_routed_experts"] = text["dspark_n_routed_experts"] = 2**16
    spec = ModelSpec.from_config(config)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match="missing \\(more than"):
        Checkpoint.open(copied, spec)
    # The whole plan has 7 million tensors.
    assert time.monotonic() - begin < 5.0


def test_vocabulary_is_compared_before_it_is_decoded(copied: Path) -> None:
    spec = ModelSpec.from_directory(copied)
    assert spec.engram is not None
    with pytest.raises(CheckpointError, match="no token 512"):
        engram_tables(_with_vocab(copied, 2**22), copied / "tokenizer.json")


def _with_vocab(directory: Path, vocab_size: int) -> ModelSpec:
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["vocab_size"] = vocab_size
    return ModelSpec.from_config(config)


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("pipe", [True, False])
def test_pipes_and_devices_are_refused_at_once(copied: Path, name: str, pipe: bool) -> None:
    path = copied / name
    path.unlink(missing_ok=True)
    if pipe:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert f"{name} cannot be read (not a regular file)" in refusal(copied)


@pytest.mark.parametrize("shape", [[2**60] * 200_000, [1] * 9])
def test_header_with_absurd_shape(copied: Path, shape: list[int]) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
    header = json.dumps({"a": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + b"1234"
    (copied / "model.safetensors").write_bytes(data)
    begin = time.monotonic()
    assert "header entry 'a' is malformed" in refusal(copied)
    assert time.monotonic() - begin < 5.0


def write_index(directory: Path, **entries: str) -> None:
    names = load_file(directory / "model.safetensors")
    weight_map = dict.fromkeys(names, "model.safetensors") | entries
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["x" * 300, "x" * 100_000, "\ud800", "new\nline\x1b[31m"])
def test_index_with_impossible_file_names(copied: Path, name: str) -> None:
    write_index(copied, **{"embed.weight": name})
    text = refusal(copied)
    assert "names files that do not exist" in text
    assert len(text) < 1000
    assert text.isprintable()


def test_index_entry_that_no_shard_holds(copied: Path) -> None:
    write_index(copied, **{"layers.0.phantom": "model.safetensors"})
    text = "listed in model.safetensors.index.json, but in no file (1): layers.0.phantom"
    assert text in refusal(copied)
