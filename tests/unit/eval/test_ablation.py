from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.eval.ablation import Ablation, ablate, reach
from headrace.eval.english import tail_loss
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics

IDS = [3 + number % 400 for number in range(300)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, preset="tiny-8", seed=3)
    return directory


def loss_of(checkpoint: Any, ablation: Ablation, ids: list[int] = IDS, targets: int = 20) -> float:
    model = load_model(checkpoint, Numerics())
    ablate(model, ablation)
    return tail_loss(model, ids, targets)


@pytest.mark.parametrize("ablation", [a for a in Ablation if a is not Ablation.NONE])
def test_what_is_taken_out_changes_the_answer(checkpoint: Any, ablation: Ablation) -> None:
    whole = loss_of(checkpoint, Ablation.NONE)
    assert whole == loss_of(checkpoint, Ablation.NONE)
    assert whole != loss_of(checkpoint, ablation)
    assert loss_of(checkpoint, ablation) == loss_of(checkpoint, ablation)


@pytest.mark.parametrize("ablation", [Ablation.RANDOM_TOP_K, Ablation.HALF_CANDIDATES])
def test_nothing_changes_below_the_reach_and_something_at_it(
    checkpoint: Any, ablation: Ablation
) -> None:
    needed = reach(load_model(checkpoint, Numerics()).spec, ablation)
    assert needed is not None
    # The last of `ids` is only predicted: one token fewer is computed. All but one are targets.
    for length in (needed, needed + 1):
        ids = IDS[:length]
        whole = loss_of(checkpoint, Ablation.NONE, ids, length - 2)
        changed = loss_of(checkpoint, ablation, ids, length - 2) != whole
        assert changed == (length > needed)


def test_the_reach_follows_the_sizes_and_is_none_for_what_a_model_lacks(checkpoint: Any) -> None:
    spec = load_model(checkpoint, Numerics()).spec
    # Ratio 1 after the candidate source: 2 of 4 blocks of 4 are left; top-k 8 is as much.
    assert reach(spec, Ablation.HALF_CANDIDATES) == 9
    assert reach(replace(spec, candidate_blocks=40), Ablation.HALF_CANDIDATES) == 81
    assert reach(replace(spec, index_topk=100), Ablation.RANDOM_TOP_K) == 101
    assert reach(spec, Ablation.NO_ENGRAM) == 1
    assert reach(spec, Ablation.NONE) is None
    assert reach(replace(spec, engram=None), Ablation.NO_ENGRAM) is None
    assert reach(replace(spec, candidate_source=None), Ablation.HALF_CANDIDATES) is None


def test_half_of_the_candidate_blocks_are_left(checkpoint: Any) -> None:
    model = load_model(checkpoint, Numerics())
    blocks = model.spec.candidate_blocks
    ablate(model, Ablation.HALF_CANDIDATES)
    assert model.spec.candidate_blocks == blocks // 2 > 0


def test_random_scores_have_the_shape_of_scores() -> None:
    from headrace.core.kv import RecordFormat
    from headrace.eval.ablation import _random_scores
    from headrace.ops.records import RecordView

    q, weights = torch.zeros(10, 4, 8), torch.zeros(10, 4)
    keys = RecordView(torch.zeros(3, 4, 8), RecordFormat.PLAIN, 8)
    blocks, visible = torch.zeros((2, 3), dtype=torch.int64), torch.full((10,), 9)
    scores = _random_scores(q, weights, keys, blocks, visible, 9)
    assert scores.shape == (10, 9)
    assert len(scores.unique()) == 90
    visible[0] = 4
    allowed = torch.ones((10, 9), dtype=torch.bool)
    allowed[1, 2] = False
    scores = _random_scores(q, weights, keys, blocks, visible, 9, allowed)
    hidden = torch.zeros((10, 9), dtype=torch.bool)
    hidden[0, 4:] = hidden[1, 2] = True
    assert (scores == -torch.inf).equal(hidden)
    assert _random_scores(q, weights, keys, blocks, visible).shape == (10, 12)


def test_the_tail_loss_is_that_of_one_forward_over_everything(checkpoint: Any) -> None:
    import numpy as np

    from headrace.check.case import Runner

    model = load_model(checkpoint, Numerics())
    ids = np.array(IDS, np.int64)
    logits = Runner(model, len(ids)).run(ids, [len(ids)])
    expected = torch.nn.functional.cross_entropy(
        logits[-51:-1], torch.tensor(IDS[-50:]), reduction="sum"
    )
    assert tail_loss(model, IDS, 50) == pytest.approx(float(expected), rel=1e-4)
