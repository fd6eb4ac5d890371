"""The draft module's training forward against the product's: same weights, several documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.check.case import Runner, Trace
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics
from train import parameters
from train.anchors import BlockMaker, sample_anchors
from train.draft_forward import DraftForward, draft_spec, judge

# Two rows of packed documents; the longer ones reach beyond the window of 16.
LENGTHS = ((40, 24), (64,))
LENGTH = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    write_tiny(path, quantised=False, seed=3)
    return path


def packed() -> tuple[Tensor, Tensor]:
    """ids and positions [2, 64]."""
    ids = torch.randint(5, 500, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return ids, positions


def product(
    model: Model, ids: Tensor, positions: Tensor
) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor, Tensor]]]:
    """Features [T, F] of all rows, and (base logits, logits, confidence) drafted at every anchor,
    with the text itself as what is picked."""
    features, drafts = [], {}
    flat = ids.flatten()
    n = draft_spec(model.spec).block_size
    for start in (positions.flatten() == 0).nonzero().flatten().tolist():
        ends = (positions.flatten()[start + 1 :] == 0).nonzero().flatten().tolist()
        end = start + 1 + ends[0] if ends else len(flat)
        document = flat[start:end].numpy()
        trace = Trace()
        runner = Runner(model, end - start + n, trace)
        for place in range(end - start):
            if place:
                runner.run(document[:place], [1])
            if place + n < end - start:
                following = flat[start + place + 1 :]
                found = model.draft(
                    flat[start + place].view(1),
                    torch.tensor([place]),
                    torch.tensor([1]),
                    runner.cache,
                    pick=lambda k, logits, following=following: following[k].view(1),
                )
                drafts[start + place] = (found.base_logits, found.logits, found.confidence)
        runner.run(document, [1])
        features.append(torch.cat(trace.parts["draft_features", 0]))
    return torch.cat(features), drafts


@pytest.mark.parametrize(("dtype", "rounded"), [("float64", False), ("float32", True)])
def test_drafts_equal_the_products(directory: Path, dtype: str, rounded: bool) -> None:
    model = load_model(directory, Numerics(dtype, kv_quant=rounded), with_draft=True)
    spec, draft = model.spec, draft_spec(model.spec)
    ids, positions = packed()
    features, expected = product(model, ids, positions)
    number = getattr(torch, dtype)
    tensors = {k: v.to(number) for k, v in load_file(directory / "model.safetensors").items()}
    masters = {
        name: tensor.to(number)
        for name, tensor in parameters.from_official(tensors, spec, draft=True).items()
    }
    p = parameters.working(masters, parameters.kinds(spec, draft=True), number, quantised=False)
    maker = BlockMaker(spec, torch.device("cpu"), number)
    anchors = torch.tensor(sorted(expected))
    blocks = maker.make(anchors, ids, positions, torch.ones(ids.shape))
    assert bool(blocks.counts.all())
    turn = maker.turns(positions.flatten())
    drafted = DraftForward(spec)(p, tensors["embed.weight"], features, turn, blocks, rounded)
    stage = f"mtp.{draft.stages - 1}."
    wanted = [torch.cat([expected[a][part] for a in sorted(expected)]) for part in range(3)]
    log_p = torch.log_softmax(wanted[1], -1).flatten(0, 1)
    judged = judge(
        p,
        stage,
        tensors["head.weight"],
        spec.rms_eps,
        drafted.hidden,
        torch.zeros_like(drafted.hidden),
        blocks.previous.flatten(),
        blocks.labels.flatten(),
    )
    cross = -log_p.gather(-1, blocks.labels.view(-1, 1)).squeeze(-1)
    # Against a target that says nothing: every token is as likely.
    distance = (log_p.exp() - 1.0 / spec.vocab_size).abs().sum(-1)
    errors = [
        (judged.cross - cross).abs(),
        (judged.distance - distance).abs(),
        (judged.confidence - wanted[2].flatten()).abs(),
    ]
    for error in errors:
        # A last bit on a rounding border moves a whole step of the stored format.
        assert float(error.median() if rounded else error.max()) < (1e-4 if rounded else 1e-10)
    assert float(wanted[2].std()) > 1e-2  # the confidence says something at all
