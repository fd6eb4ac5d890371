"""Threads of the operators: what the config says, else one for small models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.platforms import CpuPlatform
from tests.unit.engine.fakes import FakeModel


class FiveCores(CpuPlatform):
    """A machine with five cores."""

    def physical_cores(self) -> int:
        return 5


class Watching(FakeModel):
    """Notes the number of threads that each step runs with."""

    def __init__(self, hidden: int, **settings: bool) -> None:
        super().__init__(**settings)
        self.spec = replace(self.spec, hidden=hidden)
        self.threads: set[int] = set()

    def forward(self, batch, cache):
        self.threads.add(torch.get_num_threads())
        return super().forward(batch, cache)


def threads_used(model: Watching, threads: int | None) -> set[int]:
    config = EngineConfig(threads=threads, max_num_seqs=2, num_blocks=4)
    engine = Engine(config, model, platform=FiveCores())
    engine.add(Request("a", (2, 3), SamplingParams(max_tokens=2, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    return model.threads


@pytest.mark.parametrize(
    ("hidden", "threads", "used"),
    [(256, None, 1), (1023, None, 1), (1024, None, 5), (256, 3, 3), (5120, 1, 1)],
)
def test_threads(hidden: int, threads: int | None, used: int) -> None:
    before = torch.get_num_threads()
    assert threads_used(Watching(hidden), threads) == {used}
    assert torch.get_num_threads() == before


def test_batch_invariance_needs_one_thread() -> None:
    assert threads_used(Watching(5120, batch_invariant=True), None) == {1}
