"""The draft module's training forward against the product's: same weights, several documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.assets import embedded_model
from headrace.check.case import Runner, Trace
from headrace.errors import ModelConfigError
from headrace.model.deepseek.dspark import Drafts
from headrace.model.deepseek.model import Model
from headrace.model.engram_tables import engram_tables
from headrace.model.loader import load_model
from headrace.model.spec import ModelSpec
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics
from train import parameters
from train.anchors import BlockMaker
from train.config import make_config
from train.draft_forward import DraftForward, draft_spec, judge
from train.forward import Forward, Mode
from train.geometry import GeometryMaker

# Documents by row; the longer ones reach beyond the window of 8.
LENGTHS = ((24, 8), (32,))
LENGTH = 32
# Places at which blocks of 3 are drafted: at a document's start, within the window, beyond it.
ANCHORS = (0, 1, 6, 19, 24, 27, 32, 40, 41, 58)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    write_tiny(path, quantised=False, seed=3)
    return path


def packed() -> tuple[Tensor, Tensor]:
    """ids and positions [2, 32]."""
    ids = torch.randint(5, 500, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return ids, positions


def product(model: Model, ids: Tensor, positions: Tensor) -> tuple[Tensor, dict[int, Drafts]]:
    """Features [T, F] of all rows, and what is drafted at every anchor, with the text itself as
    what is picked."""
    features, drafts = [], {}
    flat, ordinal = ids.flatten(), positions.flatten()
    starts = (ordinal == 0).nonzero().flatten().tolist()
    for start, end in zip(starts, [*starts[1:], len(flat)], strict=True):
        document, trace = flat[start:end].numpy(), Trace()
        runner = Runner(model, end - start + 3, trace)
        for anchor in [a for a in ANCHORS if start <= a < end]:
            if anchor - start > runner.position:
                runner.run(document, [anchor - start - runner.position])
            following = flat[anchor + 1 :]
            drafts[anchor] = model.draft(
                flat[anchor].view(1),
                torch.tensor([anchor - start]),
                torch.tensor([1]),
                runner.cache,
                pick=lambda k, logits, following=following: following[k].view(1),
            )
        runner.run(document, [end - start - runner.position])
        features.append(torch.cat(trace.parts["draft_features", 0]))
    return torch.cat(features), drafts


@pytest.mark.parametrize(("dtype", "rounded"), [("float64", False), ("float32", True)])
def test_drafts_equal_the_products(directory: Path, dtype: str, rounded: bool) -> None:
    model = load_model(directory, Numerics(dtype, kv_quant=rounded), with_draft=True)
    spec, number = model.spec, getattr(torch, dtype)
    ids, positions = packed()
    features, found = product(model, ids, positions)
    tensors = {k: v.to(number) for k, v in load_file(directory / "model.safetensors").items()}
    masters = parameters.from_official(tensors, spec, draft=True)
    p = parameters.working(
        {name: master.to(number) for name, master in masters.items()},
        parameters.kinds(spec, draft=True),
        number,
        quantised=False,
    )
    maker = BlockMaker(spec, torch.device("cpu"), number)
    blocks = maker.make(torch.tensor(ANCHORS), ids, positions, torch.ones(ids.shape))
    assert blocks.counts.all()
    turn = maker.turns(positions.flatten())
    drafted = DraftForward(spec)(p, tensors["embed.weight"], features, turn, blocks, rounded)
    judged = judge(
        p,
        f"mtp.{draft_spec(spec).stages - 1}.",
        tensors["head.weight"],
        spec.rms_eps,
        drafted.hidden,
        torch.zeros_like(drafted.hidden),
        blocks.previous.flatten(),
        blocks.labels.flatten(),
    )
    log_p = torch.log_softmax(torch.cat([found[a].logits for a in ANCHORS]), -1).flatten(0, 1)
    confidence = torch.cat([found[a].confidence for a in ANCHORS]).flatten()
    # The target above says nothing: to it every token is as likely.
    distance = (log_p.exp() - 1.0 / spec.vocab_size).abs().sum(-1)
    errors = [
        (judged.cross + log_p.gather(-1, blocks.labels.view(-1, 1)).squeeze(-1)).abs(),
        (judged.distance - distance).abs(),
        (judged.agreement - (1 - distance / 2)).abs(),
        (judged.confidence - confidence).abs(),
    ]
    for error in errors:
        # A last bit on a rounding border moves a whole step of the stored format.
        assert float(error.median() if rounded else error.max()) < (1e-4 if rounded else 1e-10)
    assert float(confidence.std()) > 1e-2  # it says something at all


def test_features_equal_the_products(directory: Path) -> None:
    model = load_model(directory, Numerics("float32", kv_quant=False), with_draft=True)
    spec = model.spec
    ids, positions = packed()
    expected, _ = product(model, ids, positions)
    tensors = load_file(directory / "model.safetensors")
    p = parameters.working(
        parameters.from_official(tensors, spec),
        parameters.kinds(spec),
        torch.float32,
        quantised=False,
    )
    tables = engram_tables(spec, directory / "tokenizer.json")
    geometry = GeometryMaker(spec, tables, torch.device("cpu"), torch.float32).make(ids, positions)
    with torch.no_grad():
        outcome = Forward(spec)(
            p, geometry, Mode(sparse=True), targets=draft_spec(spec).targets, with_logits=True
        )
    assert outcome.features is not None
    assert outcome.hidden is not None
    assert outcome.logits is not None
    assert float((outcome.features - expected).abs().max()) < 1e-4
    logits = outcome.hidden @ p["head.weight"].T
    assert torch.equal(logits.view(outcome.logits.shape), outcome.logits)


def test_a_model_without_draft_module_is_refused() -> None:
    alone = ModelSpec.from_config(make_config(embedded_model() / "tokenizer.json"))
    with pytest.raises(ModelConfigError, match="no draft module"):
        DraftForward(alone)
