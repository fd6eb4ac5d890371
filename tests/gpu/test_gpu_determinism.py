"""Deterministic mode on a card: alone and in mixed batches, with drafts, hits and preemptions.

The suite of the CPU with fewer runs: a step of so small a model costs what its launches cost.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.model.deepseek.model import Model
from headrace.platforms import Platform
from tests.equivalence import test_determinism as suite
from tests.equivalence.test_determinism import Alone, alone, model

__all__ = ["alone", "model"]

RUNS = 4  # of each setting


@pytest.fixture(autouse=True, scope="module")
def engines_on_the_card(platform: Platform) -> Iterator[None]:
    """`platform_for` knows real cards only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "platform_of", lambda _: platform)
        yield


@pytest.mark.parametrize(("policy", "kind"), suite.SETTINGS)
def test_alone_and_in_mixed_batches(
    model: Model,
    alone: list[Alone],
    policy: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    platform,
):
    monkeypatch.setattr(suite, "platform_of", lambda _: platform)
    suite.check(model, alone, policy, kind, RUNS)
