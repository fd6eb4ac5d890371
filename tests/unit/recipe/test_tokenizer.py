"""Tokenizer, incremental detokenizer and the start-up check, on the tiny byte-level tokenizer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CheckpointError, InvalidRequest, ModelConfigError
from headrace.model.tiny_tokenizer import IMAGE, NOISE, control_ids, tiny_tokenizer
from headrace.recipe import (
    ChatCodec,
    ConfigTokenIds,
    RenderedPrompt,
    Segment,
    SpecialTokens,
    Tokenizer,
    bind,
)

CONTENT = tiny_tokenizer()
IDS = control_ids()
TOKENIZER = Tokenizer(json.dumps(CONTENT).encode())
CONFIG = {
    "image_token_id": IDS[IMAGE],
    "text_config": {"eos_token_id": 1, "dspark_noise_token_id": IDS[NOISE]},
}


@given(st.text())
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 5)), st.data())
def test_grouping_does_not_matter(ids: list[int], data: st.DataObject) -> None:
    whole = TOKENIZER.decode(ids)
    detokenizer = TOKENIZER.detokenizer()
    parts, rest = [], ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    assert "".join(parts) + detokenizer.flush() == whole


def test_a_character_is_never_split() -> None:
    ids = TOKENIZER.encode("né👍🏽北")
    detokenizer = TOKENIZER.detokenizer()
    pieces = [detokenizer.push([token]) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == "né👍🏽北"
    assert detokenizer.flush() == ""


def test_an_incomplete_character_shows_at_the_end_or_before_a_control_token() -> None:
    first_byte = TOKENIZER.encode("北")[:1]
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.push(first_byte) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert (
        TOKENIZER.decode([*first_byte, IDS["<｜end▁of▁sentence｜>"], *first_byte]) == "\ufffd" * 2
    )


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = [0, *TOKENIZER.encode("hi"), 1]
    assert TOKENIZER.decode(ids) == "hi"
    assert TOKENIZER.decode(ids, skip_special=False) == (
        "<｜begin▁of▁sentence｜>hi<｜end▁of▁sentence｜>"
    )


def test_plain_text_has_no_control_ids() -> None:
    for spelling in IDS:
        assert not any(TOKENIZER.is_added(token) for token in TOKENIZER.encode(spelling))


def test_a_special_segment_outside_the_added_vocabulary_is_refused() -> None:
    # "the" is a token, but not an added one.
    with pytest.raises(InvalidRequest, match=r'"the".*added vocabulary'):
        TOKENIZER.encode_prompt(RenderedPrompt((Segment("the", special=True),)))


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        TOKENIZER.encode("\ud800")
    with pytest.raises(InvalidRequest, match="surrogate"):
        TOKENIZER.encode_prompt(RenderedPrompt((Segment("\ud800"),)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (b"{", "not valid JSON"),
        (b"[]", '"model"'),
        ({"decoder": None}, "byte-level"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "model.vocab"),
        ({"model": {"type": "Nonsense"}}, "cannot be loaded"),
        ({"added_tokens": [{"id": "x"}]}, "added_tokens"),
    ],
)
def test_broken_files_are_named(change: bytes | dict[str, Any], text: str) -> None:
    data = change if isinstance(change, bytes) else json.dumps({**CONTENT, **change}).encode()
    with pytest.raises(CheckpointError, match="t.json.*" + text):
        Tokenizer(data, source="t.json")


def write(directory: Path, config: object = CONFIG, tokenizer: object = CONTENT) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def test_binding_takes_the_image_spelling_of_the_checkpoint(tmp_path: Path) -> None:
    codec = ChatCodec.from_directory(write(tmp_path))
    assert codec.special.image == IMAGE
    assert len(codec.special.grounding) == 8


def test_binding_lists_everything_that_is_missing() -> None:
    gone = {"<｜System｜>", "<think>", "<｜User｜>", IMAGE}
    tokens = [token for token in CONTENT["added_tokens"] if token["content"] not in gone]  # type: ignore[attr-defined]
    tokenizer = Tokenizer(json.dumps({**CONTENT, "added_tokens": tokens}).encode())
    with pytest.raises(CheckpointError) as caught:
        bind(tokenizer, ConfigTokenIds(eos=2, image=IDS[IMAGE], noise=100_000))
    text = str(caught.value)
    for part in (*gone - {IMAGE}, "<｜image｜>", "eos_token_id 2", "noise_token_id 100000"):
        assert part in text
    assert "<｜Assistant｜>" not in text


def test_binding_compares_the_image_id() -> None:
    with pytest.raises(CheckpointError, match="image_token_id 7"):
        bind(TOKENIZER, ConfigTokenIds(eos=1, image=7, noise=None))
    with pytest.raises(CheckpointError, match="<x>"):
        bind(TOKENIZER, ConfigTokenIds(1, IDS[IMAGE], None), SpecialTokens(image="<x>"))


def test_grounding_spellings_that_are_no_tokens_stay_text() -> None:
    tokens = [t for t in CONTENT["added_tokens"] if t["content"] != "<｜box｜>"]  # type: ignore[attr-defined]
    tokenizer = Tokenizer(json.dumps({**CONTENT, "added_tokens": tokens}).encode())
    special = bind(tokenizer, ConfigTokenIds(1, IDS[IMAGE], None))
    assert "<｜box｜>" not in special.grounding
    assert "<｜/box｜>" in special.grounding


ADDED: list[dict[str, Any]] = CONTENT["added_tokens"]  # type: ignore[assignment]
VOCAB: dict[str, int] = CONTENT["model"]["vocab"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {**CONTENT["model"], "vocab": {**VOCAB, "zq": 300}}}, "model.vocab.* id 300"),  # type: ignore[dict-item]
        ({"added_tokens": [*ADDED, {**ADDED[-1], "content": "zq"}]}, "same id"),
        ({"added_tokens": [*ADDED, {**ADDED[-1], "id": 600}]}, "same content"),
        ({"added_tokens": [*ADDED, {**ADDED[-1], "content": "zq", "id": 300}]}, "another token"),
        ({"added_tokens": [*ADDED, {**ADDED[-1], "content": "a", "id": 600}]}, "another id"),
        ({"added_tokens": [{**ADDED[-1], "id": 600.5}]}, "malformed"),
        ({"added_tokens": [{**ADDED[-1], "id": -1}]}, "malformed"),
        ({"added_tokens": [{**ADDED[-1], "id": True}]}, "malformed"),
    ],
)
def test_one_token_has_one_id(change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match="t.json.*" + text):
        Tokenizer(json.dumps({**CONTENT, **change}).encode(), source="t.json")


@pytest.mark.parametrize("nested", [True, False])
def test_ids_lie_in_the_vocabulary_of_the_model(tmp_path: Path, nested: bool) -> None:
    size = {"vocab_size": 511, "eos_token_id": 1}
    config = {"image_token_id": IDS[IMAGE], "text_config": size} if nested else size
    with pytest.raises(CheckpointError, match=r"token 511, config\.json says vocab_size 511"):
        ChatCodec.from_directory(write(tmp_path, config))
    size["vocab_size"] = 512
    assert ChatCodec.from_directory(write(tmp_path, config)).tokenizer.vocab_size == 512


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = write(tmp_path) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        ChatCodec.from_directory(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        ChatCodec.from_directory(tmp_path)


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


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)
