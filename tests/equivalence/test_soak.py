"""A short soak by steps: the same functions as the ten minutes of `bench/soak.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.load import numerics_of
from headrace.model.loader import load_model
from headrace.recipe.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import soak
from soak_load import Amount
from soak_answers import Answer, Ledger, difference, repeated_share

STEPS = 110
CHECKED = 10
SEED = 1
FEW = Amount(in_flight=10, burst=30, long_output=60)


@pytest.mark.slow
def test_a_random_load_loses_nothing_and_changes_no_answer(tiny_dir: Path) -> None:
    model = load_model(tiny_dir, numerics_of(soak.EXACT))
    tokenizer = Tokenizer.from_directory(tiny_dir)
    run = soak.Soak(model, tokenizer, soak.EXACT, SEED, FEW)
    run.run(lambda steps: steps >= STEPS)
    alone = soak.Alone(model, tokenizer, soak.EXACT)
    comparison = soak.compare(run, alone, SEED, lambda checked: checked >= CHECKED)
    assert soak.violations(run, comparison, equal=True) == []
    numbers = soak.summary(run, comparison)
    # The load was one: a run in which nothing happens shows nothing.
    for name in ("aborted", "preemptions", "prefix_hit_tokens", "forks", "checked_preempted"):
        assert numbers[name] > 0, name
    assert numbers["checked_alone"] == CHECKED
