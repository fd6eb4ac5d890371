"""Files of a checkpoint: regular ones only, never more than a bound, and a folder that has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.core.files import read_regular, require_checkpoint
from headrace.errors import CheckpointError


def refusal(path: Path, max_bytes: int = 100) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_regular(path, max_bytes)
    assert caught.value.exit_code == 3
    return caught.value.message


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("file")
    assert (
        read_regular(tmp_path / "file", 100) == read_regular(tmp_path / "link", 100) == b"x" * 100
    )


def test_everything_else_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "pipe cannot be read (not a regular file)" in refusal(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert "endless cannot be read (not a regular file)" in refusal(tmp_path / "endless")
    assert "Is a directory" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "nothing")
    assert "cannot be read" in refusal(tmp_path / ("x" * 5000))
    assert "cannot be read" in refusal(tmp_path / "a\0b")


def test_more_than_the_bound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 101)
    assert "larger than 100 bytes" in refusal(tmp_path / "file")


def test_a_folder_that_is_no_checkpoint_is_named_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        require_checkpoint(Path())
    text = caught.value.message
    assert f"{tmp_path.resolve()} is no checkpoint: it lacks config.json, tokenizer.json, " in text
    assert "model.safetensors or model.safetensors.index.json." in text
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"it lacks model\.safetensors or"):
        require_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").touch()
    require_checkpoint(tmp_path)
    for path in (tmp_path / "config.json", tmp_path / ("x" * 5000)):
        with pytest.raises(CheckpointError, match="is no directory"):
            require_checkpoint(path)
