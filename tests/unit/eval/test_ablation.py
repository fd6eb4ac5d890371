from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.eval.ablation import Ablation, ablate
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics

IDS = [3 + number % 400 for number in range(600)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, preset="tiny-8", seed=3)
    return directory


def loss_of(checkpoint: Any, ablation: Ablation) -> float:
    from headrace.eval.english import tail_loss

    model = load_model(checkpoint, Numerics())
    ablate(model, ablation)
    return tail_loss(model, IDS, 50)


@pytest.mark.parametrize("ablation", [Ablation.RANDOM_TOP_K, Ablation.NO_ENGRAM])
def test_what_is_taken_out_changes_the_answer(checkpoint: Any, ablation: Ablation) -> None:
    whole = loss_of(checkpoint, Ablation.NONE)
    assert whole == loss_of(checkpoint, Ablation.NONE)
    assert whole != loss_of(checkpoint, ablation)
    assert loss_of(checkpoint, ablation) == loss_of(checkpoint, ablation)


def test_half_of_the_candidate_blocks_are_left(checkpoint: Any) -> None:
    model = load_model(checkpoint, Numerics())
    blocks = model.spec.candidate_blocks
    ablate(model, Ablation.HALF_CANDIDATES)
    assert model.spec.candidate_blocks == blocks // 2 > 0


def test_random_scores_have_the_shape_of_scores() -> None:
    from headrace.eval.ablation import _random_scores

    q, weights, keys = torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 4), torch.zeros(2, 9, 8)
    scores = _random_scores(q, weights, keys)
    assert scores.shape == (2, 5, 9)
    assert len(scores.unique()) == 90


def test_the_tail_loss_is_that_of_one_forward_over_everything(checkpoint: Any) -> None:
    import numpy as np

    from headrace.check.case import Runner
    from headrace.eval.english import tail_loss

    model = load_model(checkpoint, Numerics())
    ids = np.array(IDS, np.int64)
    logits = Runner(model, len(ids)).run(ids, [len(ids)])
    expected = torch.nn.functional.cross_entropy(
        logits[-51:-1], torch.tensor(IDS[-50:]), reduction="sum"
    )
    assert tail_loss(model, IDS, 50) == pytest.approx(float(expected), rel=1e-4)
