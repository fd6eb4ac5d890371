"""The training loop on a CPU: some steps of random data, with and without a resume in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import CheckpointError
from tests.unit.train.small import CONFIG, SPEC, masters
from train.checkpoint import Saved, load, save
from train.parameters import trainable
from train.run import Trainer, arguments

LARGEST_FILE = 16 * 2**20


def trained(folder: Path, steps: int, *resume: Path, **options: Any) -> Saved:
    """Train up to `steps` in all; both checkpoints end up in `folder`; the full one."""
    words = ["--seconds", "600", "--total", "1e9", "--steps", str(steps), "--data", "random"]
    words += ["--tokens", "128", "--length", "64", "--long-length", "128", "--phase", "3"]
    words += ["--out", str(folder), "--local", str(folder / "local")]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--resume", *map(str, resume)] if resume else []
    folder.mkdir(parents=True, exist_ok=True)
    Trainer(arguments(words), CONFIG).run([])
    saved = load(folder / "local", SPEC)
    assert saved is not None
    return saved


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, trained(folder, 6)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    trained(folder, 3)
    return folder


def same(a: Saved, b: Saved) -> list[str]:
    """Names of the masters that differ."""
    return [name for name in a.masters if not torch.equal(a.masters[name], b.masters[name])]


def test_a_resume_with_the_optimiser_equals_one_run(
    whole: tuple[Path, Saved], half: Path, tmp_path: Path
) -> None:
    # Of equally old checkpoints the one with the optimiser's state is taken.
    resumed = trained(tmp_path, 6, half / "checkpoint", half / "local")
    assert same(resumed, whole[1]) == []
    assert resumed.optimiser is not None and whole[1].optimiser is not None
    for name, value in whole[1].optimiser.items():
        assert torch.equal(resumed.optimiser[name], value), name
    for key in ("step", "tokens", "short", "long", "fresh_since"):
        assert resumed.meta[key] == whole[1].meta[key], key
    assert resumed.meta["seconds"] > 0


def test_a_resume_from_what_travels_warms_up_again(
    whole: tuple[Path, Saved], half: Path, tmp_path: Path
) -> None:
    resumed = trained(tmp_path, 6, half / "checkpoint")
    assert (resumed.meta["step"], resumed.meta["fresh_since"]) == (6, 3)
    assert resumed.meta["tokens"] == whole[1].meta["tokens"] == 6 * 128
    assert set(same(resumed, whole[1])) >= {"embed.weight", "head.weight"}
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["rate"] for line in log] == [0.01, 0.02, 0.03]


def test_both_checkpoints_hold_the_same_masters_in_small_files(whole: tuple[Path, Saved]) -> None:
    folder, full = whole
    small = load(folder / "checkpoint", SPEC)
    assert small is not None and small.optimiser is None
    for name, master in full.masters.items():
        assert torch.allclose(small.masters[name], master, rtol=2**-8), name
    sizes = [path.stat().st_size for path in folder.rglob("*.safetensors")]
    assert max(sizes) <= LARGEST_FILE
    assert {key: small.meta[key] for key in ("step", "tokens", "fresh_since")} == {
        key: full.meta[key] for key in ("step", "tokens", "fresh_since")
    }


def test_the_log_has_losses_and_every_master_was_moved(whole: tuple[Path, Saved]) -> None:
    folder, full = whole
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["phase"] == 3 and line["loss"] > 0 for line in lines)
    assert set(lines[0]["index"]) == {"2", "3", "5"} and len(lines[0]["load"]) == 6
    fresh = Trainer(arguments(["--seconds", "1", "--out", str(folder)]), CONFIG)
    fresh.log.close()
    start = {name: master.detach().cpu() for name, master in fresh.masters.items()}
    unmoved = [name for name, master in full.masters.items() if torch.equal(master, start[name])]
    assert [name for name in unmoved if trainable(name)] == []


def test_seconds_are_a_limit_too_and_a_stop_ends_the_step(tmp_path: Path) -> None:
    assert trained(tmp_path / "none", 6, seconds=0.0).meta["step"] == 0
    words = ["--seconds", "600", "--out", str(tmp_path), "--data", "random", "--tokens", "128"]
    trainer = Trainer(arguments([*words, "--length", "64", "--phase", "1"]), CONFIG)
    stop: list[bool] = []
    step = trainer.step

    def once(now: Any) -> None:
        step(now)
        stop.append(True)  # as SIGTERM does

    trainer.step = once  # type: ignore[method-assign]
    trainer.run(stop)
    saved = load(tmp_path / "checkpoint", SPEC)
    assert saved is not None and saved.meta["step"] == 1


def test_a_damaged_checkpoint_stops_a_resume(tmp_path: Path) -> None:
    save(tmp_path / "broken", masters(), SPEC, {"step": 3})
    next((tmp_path / "broken").glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        trained(tmp_path, 6, tmp_path / "broken")
