"""Masters -> files -> the product: the same numbers as the training forward computes with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import record_tiny
import torch

from headrace.assets import embedded_model
from headrace.check.case import Runner
from headrace.cli.main import run
from headrace.model.engram_tables import engram_tables
from headrace.model.loader import load_model
from headrace.model.spec import ModelSpec
from headrace.model.weights import Checkpoint
from headrace.ops.numerics import Numerics
from tests.unit.train.small import CONFIG, SPEC, TOKENIZER, masters
from train import checkpoint, export, parameters
from train.forward import Forward, Mode
from train.geometry import GeometryMaker

LENGTH = 128
# Both sides are fp32 on the same rounded numbers: last bits of sums differ.
TOLERANCE = 1e-5
LARGEST_FILE = 16 * 2**20


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same masters as "fp8" and as "bf16"."""
    folders = {}
    for name, config in (("fp8", CONFIG), ("bf16", export.unquantised(CONFIG))):
        folders[name] = tmp_path_factory.mktemp(name)
        export.export(masters(), config, TOKENIZER, folders[name])
    return folders


@pytest.mark.parametrize("stored", ["fp8", "bf16"])
def test_the_product_reads_what_training_rounded_to(exported: dict[str, Path], stored: str) -> None:
    spec = ModelSpec.from_directory(exported[stored])
    read = Checkpoint.open(exported[stored], spec)
    kinds = parameters.kinds(SPEC)
    seen = set()
    for name, master in masters().items():
        kind = kinds[name]
        if stored == "bf16":
            kind = "f32" if kind == "f32" else "bf16"
        # Rounded as a step of phase 3 rounds it.
        each = master if "experts" in name and master.ndim == 3 else master.unsqueeze(0)
        for number, part in enumerate(each):
            expected = parameters._rounded(part, kind)
            official = name
            if "ffn.experts" in name:
                prefix, _, matrix = name.rpartition(".")
                official = f"{prefix}.{number}.{matrix}.weight"
            assert torch.equal(read.dequantised(official, torch.float32), expected), official
            seen.add(official)
    assert seen == {tensor.name for tensor in parameters.plan(SPEC)}


@pytest.mark.parametrize(("stored", "rounded"), [("fp8", False), ("fp8", True), ("bf16", False)])
def test_logits_are_those_of_the_training_forward(
    exported: dict[str, Path], stored: str, rounded: bool
) -> None:
    model = load_model(exported[stored], Numerics("float32", kv_quant=rounded))
    ids = torch.randint(3, 8000, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    tables = engram_tables(SPEC, TOKENIZER)
    geometry = GeometryMaker(SPEC, tables, torch.device("cpu"), torch.float32).make(
        ids, torch.arange(LENGTH).unsqueeze(0)
    )
    kinds = parameters.kinds(SPEC)
    if stored == "bf16":
        kinds = {name: "f32" if kind == "f32" else "bf16" for name, kind in kinds.items()}
    p = parameters.working(masters(), kinds, torch.float32, quantised=True)
    with torch.no_grad():
        ours = Forward(SPEC)(
            p, geometry, Mode(sparse=True, rounded=rounded), with_logits=True
        ).logits
    assert ours is not None
    expected = Runner(model, LENGTH).run(ids[0].numpy().astype(np.int64), [LENGTH])
    error = ((ours[0] - expected).abs() / expected.abs().max()).amax(-1)
    # A last bit that falls on a rounding border moves a whole step of FP4: few rows, but far.
    assert float(error.quantile(0.75 if rounded else 1.0)) < TOLERANCE


def test_files_are_small_and_those_of_an_earlier_export_go(tmp_path: Path) -> None:
    (tmp_path / "model-00007-of-00009.safetensors").write_bytes(b"old")
    (tmp_path / "other.txt").write_text("kept")
    files = export.export(masters(), CONFIG, TOKENIZER, tmp_path)
    assert {path.name for path in files} == {
        "model.safetensors",
        "tokenizer.json",
        "config.json",
    }
    assert {path.name for path in tmp_path.iterdir()} == {*(f.name for f in files), "other.txt"}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training checkpoint with the numbers of the shipped weights; all are exact in bf16."""
    directory = tmp_path_factory.mktemp("shipped")
    spec = ModelSpec.from_directory(embedded_model())
    read = Checkpoint.open(embedded_model(), spec)
    numbers = {
        tensor.name: read.dequantised(tensor.name, torch.float32)
        for tensor in parameters.plan(spec)
    }
    checkpoint.save(directory, parameters.from_official(numbers, spec), spec, {"step": 1})
    return directory


def test_the_command_writes_a_quantised_and_a_bf16_checkpoint_that_answer_alike(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options in (("fp8", []), ("bf16", ["--bf16"])):
        export.main([str(shipped), str(tmp_path / name), *options])
        printed = capsys.readouterr().out.splitlines()
        files = list((tmp_path / name).iterdir())
        assert len(printed) == len(files) + 1
        assert max(path.stat().st_size for path in files) <= LARGEST_FILE
        assert int(printed[-1].split()[0]) == sum(path.stat().st_size for path in files)
    config = json.loads((tmp_path / "bf16" / "config.json").read_text("utf-8"))
    assert "quantization_config" not in config
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 2
    prompt = [0, *range(400, 500)]
    numerics = Numerics("float32")
    shown = [record_tiny.last_logits(tmp_path / name, prompt, numerics) for name in ("fp8", "bf16")]
    # Rounding numbers that were rounded before changes nothing, in either format.
    assert np.array_equal(shown[0], record_tiny.last_logits(embedded_model(), prompt, numerics))
    assert np.array_equal(shown[1], shown[0])
    words = ["eval", "tiny", "--model", str(tmp_path / "bf16"), "--family", "arithmetic"]
    assert run([*words, "--n", "2", "--jobs", "1", "--json"]) == 0
    answered = json.loads(capsys.readouterr().out)
    assert answered["numerics"]["weights"] == "bf16" and answered["numerics"]["kv_quant"]
    assert answered["scores"][0]["share"] == 1.0


def test_the_command_refuses_what_it_cannot_export(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="holds no checkpoint"):
        export.main([str(tmp_path), str(tmp_path / "out")])
    broken = tmp_path / "broken"
    shutil.copytree(shipped, broken)
    next(broken.glob("*.safetensors")).unlink()
    with pytest.raises(SystemExit, match="cannot be read"):
        export.main([str(broken), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="holds no checkpoint"):
        export.main([str(embedded_model()), str(tmp_path), str(tmp_path / "out")])
    # The main model's masters are no draft module.
    with pytest.raises(SystemExit, match=r"lacks mtp\."):
        export.main([str(embedded_model()), str(shipped), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        export.main([str(embedded_model()), str(shipped), str(tmp_path / "out"), "--bf16"])
    assert "--bf16" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
