"""Whole-number flags of every command refuse fractions, and say so before torch is imported."""

from __future__ import annotations

import importlib
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from headrace.cli.integer import Integer
from headrace.cli.main import _COMMANDS, main

ALLOWED = (Integer, Integer | None)


def commands() -> list[tuple[str, typing.Any]]:
    found = []
    for entry in _COMMANDS:
        module, _, name = entry.target.partition(":")
        found.append((" ".join(entry.path), getattr(importlib.import_module(module), name)))
    return found


@pytest.mark.parametrize(("name", "command"), commands())
def test_no_flag_is_a_bare_int(name: str, command: typing.Any) -> None:
    bare = [
        flag
        for flag, hint in typing.get_type_hints(command, include_extras=True).items()
        if flag != "return" and int in (hint, *typing.get_args(hint)) and hint not in ALLOWED
    ]
    assert bare == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["tiny", "--out", "OUT", "--seed", "1.5"],
        ["tiny", "--out", "OUT", "--shards", "1.5"],
        ["generate", "OUT", "x", "--max-tokens", "1.5"],
        ["generate", "OUT", "x", "--top-k", "1e3"],
        ["serve", "OUT", "--port", "8000.7"],
        ["serve", "OUT", "--threads", "two"],
    ],
)
def test_fractions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as caught:
        main([str(out) if argument == "OUT" else argument for argument in arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"must be a whole number, got '{arguments[-1]}'" in error
    assert not out.exists()


def test_whole_numbers_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tiny", "--out", str(tmp_path / "out"), "--seed", "7", "--shards", "2"])
    assert caught.value.code == 0
    assert "seed 7" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [["--preset", "huge"], ["--seed", "-1"], ["--shards", "65"], []])
def test_tiny_refuses_without_importing_torch(tmp_path: Path, extra: list[str]) -> None:
    (tmp_path / "file").touch()  # what the empty `extra` is refused for
    program = (
        "import sys\nfrom headrace.cli.main import run\nfrom headrace.errors import ConfigError\n"
        "try:\n    run(sys.argv[1:])\nexcept ConfigError as error:\n"
        "    print(error.param, 'torch' in sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program, "tiny", "--out", str(tmp_path), *extra],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    param = extra[0].removeprefix("--") if extra else "out"
    assert completed.stdout.split() == [param, "False"]
