"""Draft training end to end on the embedded model: learns, resumes, is exported and answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.assets import embedded_model
from headrace.model.loader import load_model
from headrace.model.spec import ModelSpec
from headrace.model.weight_plan import stored_tensors
from headrace.ops.numerics import Numerics
from train import draft_eval
from train.anchors import BlockMaker
from train.checkpoint import load
from train.config import make_config, with_draft, without_draft
from train.draft import DraftTrainer, arguments, rate_at, total_loss
from train.draft_forward import Judged
from train.export import add_draft, read_stored
from train.parameters import plan
from train.rounds import Player

EMBEDDED = embedded_model()
LIMIT_BYTES = 28 * 10**6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A folder with a draft of some steps, the second half resumed, and its log."""
    out = tmp_path_factory.mktemp("draft")
    words = f"--seconds 600 --out {out} --cache {out / 'cache.pt'} --cache-batches 1 --workers 0"
    words += " --tokens 512 --length 256 --anchors 24 --groups 1 --dtype float32"
    words += f" --local {out / 'local'}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert DraftTrainer(arguments([*words.split(), "--steps", "5"])).run([])
        folders = [str(out / "draft"), str(out / "local")]
        resumed = [*words.split(), "--steps", "10", "--resume", *folders]
        assert DraftTrainer(arguments(resumed)).run([])
    finally:
        torch.set_num_threads(threads)
    lines = (out / "log.jsonl").read_text("utf-8").splitlines()
    return out, [json.loads(line) for line in lines]


def test_the_loss_falls_and_a_resumed_run_goes_on(
    trained: tuple[Path, list[dict[str, float]]],
) -> None:
    _, log = trained
    steps = [line["step"] for line in log]
    assert steps == [1, 5, 6, 10]
    assert log[1]["loss"] < log[0]["loss"]
    assert log[3]["loss"] < log[2]["loss"] < log[0]["loss"]


def test_the_local_checkpoint_has_the_optimiser_and_the_other_travels(
    trained: tuple[Path, list[dict[str, float]]],
) -> None:
    spec = ModelSpec.from_config(make_config(EMBEDDED / "tokenizer.json", draft=True))
    local, small = (load(trained[0] / name, spec, draft=True) for name in ("local", "draft"))
    assert local is not None and local.optimiser is not None
    assert small is not None and small.optimiser is None
    # Resumed with the optimiser's state: it was never fresh again.
    assert local.meta["fresh_since"] == 0 and small.meta["step"] == 10
    assert local.masters.keys() == small.masters.keys()
    assert all(name.startswith("mtp.") for name in small.masters)


def test_the_exported_draft_is_loaded_and_drafts(
    trained: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    files = add_draft(EMBEDDED, trained[0] / "draft", tmp_path)
    assert sum(file.stat().st_size for file in files) <= LIMIT_BYTES
    assert max(file.stat().st_size for file in files) <= 16 * 2**20
    given, made = (
        {name: x for f in path.glob("*.safetensors") for name, x in load_file(f).items()}
        for path in (EMBEDDED, tmp_path)
    )
    for name, tensor in given.items():
        if not name.startswith("mtp."):
            assert torch.equal(made[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert read_stored(tmp_path).keys() == {x for x in given if not x.startswith("mtp.")}
    model = load_model(tmp_path, Numerics(), with_draft=True)
    asked = draft_eval.chats(tmp_path / "tokenizer.json", 10**9, 1)[-2:]
    asked = [replace(chat, limit=6) for chat in asked]
    rounds = list(Player(model, 0.0, "gumbel", 2).play(asked))
    found = draft_eval.summary(rounds, [1.0] * 5)
    assert 1.0 <= found["length"] <= 6.0 and math.isfinite(found["calibration_error"])


def test_exported_bytes_of_the_config() -> None:
    spec = ModelSpec.from_config(make_config(EMBEDDED / "tokenizer.json", draft=True))
    size = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
    total = sum(
        math.prod(part.shape) * size[part.dtype]
        for tensor in plan(spec, draft=True)
        for part in stored_tensors(tensor, spec.quant)
    )
    assert total == 2_517_248


def test_draft_fields_come_and_go() -> None:
    config = make_config(EMBEDDED / "tokenizer.json")
    both = with_draft(config, EMBEDDED / "tokenizer.json", num_nextn_predict_layers=3)
    spec = ModelSpec.from_config(both)
    assert spec.draft is not None and spec.draft.stages == 3
    again = with_draft(both, EMBEDDED / "tokenizer.json")
    assert len(again["text_config"]["compress_ratios"]) == 9 + 2
    both["text_config"]["dspark_confidence_temperatures"] = [1.0] * 5
    assert without_draft(both) == config


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    counts = torch.tensor([[True, True], [True, False]])
    parts = [torch.tensor([1.0, 2.0, 3.0, 99.0]) * scale for scale in (1.0, 0.1)]
    agreement, confidence = torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.zeros(4)
    judged = Judged(parts[0], parts[1], agreement, confidence, torch.ones(4))
    w = math.exp(-0.25)
    mean = (1.0 + 3.0 + 2.0 * w) / (2 + w)
    expected = 0.1 * mean + 0.9 * 0.1 * mean + math.log(2)
    assert float(total_loss(judged, counts)) == pytest.approx(expected, rel=1e-6)


def test_the_rate_warms_up_by_steps_and_falls_by_progress() -> None:
    assert rate_at(0.0, 0) == pytest.approx(0.01)
    assert rate_at(0.0, 99) == pytest.approx(1.0)
    assert rate_at(0.5, 1000) == pytest.approx(0.5)
    assert rate_at(1.0, 1000) == pytest.approx(0.01)


def test_no_block_counts_in_a_batch_without_answers() -> None:
    spec = ModelSpec.from_config(make_config(EMBEDDED / "tokenizer.json", draft=True))
    ids = torch.zeros((1, 32), dtype=torch.int64)
    positions = torch.arange(32).unsqueeze(0)
    maker = BlockMaker(spec, torch.device("cpu"), torch.float32)
    made = maker.make(torch.arange(4), ids, positions, torch.zeros((1, 32)))
    judged = Judged(*(torch.ones(20) for _ in range(5)))
    assert float(total_loss(judged, made.counts)) == 0.0
