"""The start-up check of a tokenizer against config.json and the prompt format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CheckpointError, ModelConfigError
from headrace.model.tiny_tokenizer import IMAGE, NOISE, control_ids, tiny_tokenizer
from headrace.recipe.binding import ConfigTokenIds, bind
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.options import ModelVersion
from headrace.recipe.tokenizer import Tokenizer

CONTENT: dict[str, Any] = tiny_tokenizer()
IDS = control_ids()
TOKENIZER = Tokenizer(json.dumps(CONTENT).encode())
CONFIG = {
    "image_token_id": IDS[IMAGE],
    "text_config": {"eos_token_id": 1, "dspark_noise_token_id": IDS[NOISE]},
}


def bind_directory(directory: Path) -> SpecialTokens:
    return bind(Tokenizer.from_directory(directory), ConfigTokenIds.from_directory(directory))


def write(directory: Path, config: object = CONFIG, tokenizer: object = CONTENT) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def test_binding_takes_the_image_spelling_of_the_checkpoint(tmp_path: Path) -> None:
    special = bind_directory(write(tmp_path))
    assert special.image == IMAGE
    assert len(special.grounding) == 8


def test_binding_lists_everything_that_is_missing() -> None:
    gone = {"<｜System｜>", "<think>", "<｜User｜>", "｜DSML｜", IMAGE}
    tokens = [token for token in CONTENT["added_tokens"] if token["content"] not in gone]
    tokenizer = Tokenizer(json.dumps({**CONTENT, "added_tokens": tokens}).encode())
    with pytest.raises(CheckpointError) as caught:
        bind(tokenizer, ConfigTokenIds(eos=2, image=IDS[IMAGE], noise=100_000))
    text = str(caught.value)
    for part in (*gone - {IMAGE}, "<｜image｜>", "eos_token_id 2", "noise_token_id 100000"):
        assert part in text
    assert "<｜Assistant｜>" not in text


def without(*spellings: str) -> Tokenizer:
    tokens = [token for token in CONTENT["added_tokens"] if token["content"] not in spellings]
    return Tokenizer(json.dumps({**CONTENT, "added_tokens": tokens}).encode())


def test_v4_needs_no_system_token_and_no_image() -> None:
    tokenizer = without("<｜System｜>", IMAGE)
    ids = ConfigTokenIds(eos=1, image=None, noise=None)
    assert bind(tokenizer, ids, version=ModelVersion.V4).system == "<｜System｜>"
    with pytest.raises(CheckpointError, match=r"V4\.1 prompt format: the system token"):
        bind(tokenizer, ids)
    with pytest.raises(CheckpointError, match=r"V4 prompt format: the dsml token \"｜DSML｜\""):
        bind(without("｜DSML｜"), ids, version=ModelVersion.V4)


def test_an_empty_spelling_needs_no_token() -> None:
    ids = ConfigTokenIds(eos=1, image=None, noise=None)
    special = SpecialTokens(dsml="", image=IMAGE)
    assert bind(without("｜DSML｜"), ids, special).dsml == ""


def test_binding_compares_the_image_id() -> None:
    with pytest.raises(CheckpointError, match="image_token_id 7"):
        bind(TOKENIZER, ConfigTokenIds(eos=1, image=7, noise=None))
    with pytest.raises(CheckpointError, match="<x>"):
        bind(TOKENIZER, ConfigTokenIds(1, IDS[IMAGE], None), SpecialTokens(image="<x>"))


def test_grounding_spellings_that_are_no_tokens_stay_text() -> None:
    tokens = [t for t in CONTENT["added_tokens"] if t["content"] != "<｜box｜>"]
    tokenizer = Tokenizer(json.dumps({**CONTENT, "added_tokens": tokens}).encode())
    special = bind(tokenizer, ConfigTokenIds(1, IDS[IMAGE], None))
    assert "<｜box｜>" not in special.grounding
    assert "<｜/box｜>" in special.grounding


@pytest.mark.parametrize("nested", [True, False])
def test_ids_lie_in_the_vocabulary_of_the_model(tmp_path: Path, nested: bool) -> None:
    size = {"vocab_size": 511, "eos_token_id": 1}
    config = {"image_token_id": IDS[IMAGE], "text_config": size} if nested else size
    with pytest.raises(CheckpointError, match=r"token 511, config\.json says vocab_size 511"):
        bind_directory(write(tmp_path, config))
    size["vocab_size"] = 512
    bind_directory(write(tmp_path, config))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = write(tmp_path) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        bind_directory(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        bind_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (None, CheckpointError, "config.json"),
        ("{", ModelConfigError, "not valid JSON"),
        ([], ModelConfigError, "JSON object"),
        ({"text_config": 3}, ModelConfigError, "text_config"),
        ({}, ModelConfigError, "eos_token_id is missing"),
        ({"eos_token_id": "1"}, ModelConfigError, "eos_token_id must be an integer"),
        ({"eos_token_id": 1, "image_token_id": -1}, ModelConfigError, "image_token_id"),
    ],
)
def test_broken_configs_are_named(
    tmp_path: Path, config: object, error: type[Exception], text: str
) -> None:
    write(tmp_path)
    path = tmp_path / "config.json"
    if config is None:
        path.unlink()
    else:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(error, match=text):
        ConfigTokenIds.from_directory(tmp_path)
