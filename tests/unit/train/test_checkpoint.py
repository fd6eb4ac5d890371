"""Training checkpoints: small files, one format, never half a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.errors import CheckpointError
from tests.unit.train.small import SPEC, masters
from train import checkpoint
from train.checkpoint import load, load_latest, save
from train.parts import PART_BYTES, parts, size

LARGEST_FILE = 16 * 2**20
LIMIT = 3_000_000  # the small model then has several files
META = {"step": 12, "seconds": 3.5, "tokens": 99, "short": 10, "long": 2, "fresh_since": 4}


def state() -> dict[str, Tensor]:
    return {"momentum/embed.weight": torch.randn(8192, 64), "step/norm.weight": torch.tensor(7.0)}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_checkpoint_with_the_optimiser_comes_back_bit_by_bit(tmp_path: Path) -> None:
    whole, optimiser = masters(), state()
    save(tmp_path, whole, SPEC, META, optimiser, limit=LIMIT)
    saved = load(tmp_path, SPEC)
    assert saved is not None and saved.optimiser is not None
    assert whole.keys() == saved.masters.keys()
    assert all(torch.equal(saved.masters[name], master) for name, master in whole.items())
    assert saved.optimiser.keys() == optimiser.keys()
    assert all(torch.equal(saved.optimiser[name], value) for name, value in optimiser.items())
    assert {key: saved.meta[key] for key in META} == META


def test_one_that_travels_is_bf16_without_the_optimiser(tmp_path: Path) -> None:
    whole = masters()
    save(tmp_path / "small", whole, SPEC, META)
    save(tmp_path / "full", whole, SPEC, META, state())
    saved = load(tmp_path / "small", SPEC)
    assert saved is not None and saved.optimiser is None
    for name, master in whole.items():
        wide = "hc_" in name or name.endswith(("attn_sink", "gate.bias"))
        expected = master if wide else master.to(torch.bfloat16).float()
        assert torch.equal(saved.masters[name], expected), name
    assert {key: saved.meta[key] for key in META} == META
    bytes_ = [sum(p.stat().st_size for p in (tmp_path / d).iterdir()) for d in ("small", "full")]
    assert bytes_[0] < 0.55 * bytes_[1]


def test_files_stay_below_the_limit_and_hold_everything_once(tmp_path: Path) -> None:
    save(tmp_path, masters(), SPEC, META, state(), limit=LIMIT)
    files = json.loads((tmp_path / "meta.json").read_text("utf-8"))["files"]
    assert names(tmp_path) == {"meta.json", *files} and len(files) > 2
    assert all((tmp_path / name).stat().st_size < LIMIT + 2**16 for name in files)
    # With the usual limit there is room for the header below 16 MiB.
    assert PART_BYTES + 2**19 < LARGEST_FILE


def test_parts_keep_the_order_and_fill_up() -> None:
    tensors = [(str(n), torch.zeros(n, dtype=torch.uint8)) for n in (4, 5, 1, 9, 10, 2, 3)]
    found = list(parts(tensors, limit=10))
    assert [list(part) for part in found] == [["4", "5", "1"], ["9"], ["10"], ["2", "3"]]
    assert max(sum(map(size, part.values())) for part in found) == 10
    assert list(parts([], limit=10)) == []
    with pytest.raises(ValueError, match="big has 11 bytes"):
        list(parts([("big", torch.zeros(11, dtype=torch.uint8))], limit=10))


def test_a_folder_without_meta_is_no_checkpoint(tmp_path: Path) -> None:
    assert load(tmp_path, SPEC) is None
    assert load(tmp_path / "absent", SPEC) is None
    save(tmp_path, masters(), SPEC, META)
    (tmp_path / "meta.json").unlink()
    assert load(tmp_path, SPEC) is None
    assert load_latest([tmp_path, tmp_path / "absent"], SPEC) is None


@pytest.mark.parametrize("step", [12, 13])
def test_a_save_that_breaks_off_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    save(tmp_path, masters(1), SPEC, META, limit=LIMIT)
    written: list[Path] = []
    real = checkpoint.save_file

    def breaks_off(part: dict[str, Tensor], path: Path) -> None:
        if written:
            raise KeyboardInterrupt
        real(part, path)
        written.append(path)

    monkeypatch.setattr(checkpoint, "save_file", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, masters(2), SPEC, {**META, "step": step}, limit=LIMIT)
    monkeypatch.undo()
    saved = load(tmp_path, SPEC)
    assert saved is not None and saved.meta["step"] == 12
    assert torch.equal(saved.masters["layers.0.hc_attn_base"], masters(1)["layers.0.hc_attn_base"])
    # The next one that is completed takes the leavings away.
    save(tmp_path, masters(2), SPEC, {**META, "step": step}, limit=LIMIT)
    saved = load(tmp_path, SPEC)
    assert saved is not None and saved.meta["step"] == step
    assert torch.equal(saved.masters["layers.0.hc_attn_base"], masters(2)["layers.0.hc_attn_base"])
    assert names(tmp_path) == {"meta.json", *saved.meta["files"]}


def test_the_newest_of_several_is_taken_and_the_full_one_of_equals(tmp_path: Path) -> None:
    for name, step, full in (("a", 5, True), ("b", 9, False), ("c", 9, True), ("d", 8, True)):
        optimiser = state() if full else None
        save(tmp_path / name, masters(), SPEC, {**META, "step": step, "name": name}, optimiser)

    def taken(*folders: str) -> str:
        saved = load_latest([tmp_path / folder for folder in folders], SPEC)
        assert saved is not None
        return str(saved.meta["name"])

    assert taken("a", "b", "c", "d") == "c"
    assert taken("c", "b") == "c" and taken("b", "c") == "c"
    assert taken("a", "b", "absent") == "b"
    assert taken("a", "d") == "d"


def test_what_is_damaged_is_named_and_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, masters(), SPEC, META, limit=LIMIT)
    first = json.loads((tmp_path / "meta.json").read_text("utf-8"))["files"][0]
    data = (tmp_path / first).read_bytes()
    (tmp_path / first).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=first):
        load_latest([tmp_path], SPEC)
    (tmp_path / first).unlink()
    with pytest.raises(CheckpointError, match=first):
        load_latest([tmp_path], SPEC)
    meta = {**META, "files": []}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=r"lacks embed\.weight"):
        load(tmp_path, SPEC)
    for content in ("{", "[]", '{"step": "x"}'):
        (tmp_path / "meta.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"meta\.json"):
            load(tmp_path, SPEC)


def test_checkpoints_that_count_their_files_can_be_read(tmp_path: Path) -> None:
    save(tmp_path, masters(), SPEC, META, limit=LIMIT)
    meta = json.loads((tmp_path / "meta.json").read_text("utf-8"))
    files = meta.pop("files")
    for number, name in enumerate(files):
        (tmp_path / name).rename(tmp_path / f"part-{number}.safetensors")
    (tmp_path / "meta.json").write_text(json.dumps({**META, "parts": len(files)}))
    saved = load(tmp_path, SPEC)
    assert saved is not None and saved.optimiser is None
    save(tmp_path, saved.masters, SPEC, META)
    assert not list(tmp_path.glob("part-*"))
