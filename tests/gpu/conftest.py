"""Tests that need an NVIDIA GPU: `pytest -m gpu tests/gpu`, on a machine that has one.

`pytest -m gpu tests/gpu --rehearse` runs the same tests on the fake card (`tests/fake_card.py`):
what fails there by its code needs no GPU to be found. The arithmetic is the host's then.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.platforms import CudaPlatform, Platform
from tests.fake_card import FakePlatform, fake_card


def pytest_addoption(parser: pytest.Parser) -> None:
    """See the module."""
    parser.addoption("--rehearse", action="store_true", help="run the GPU tests on a fake card")


@pytest.fixture
def rehearsed(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rehearse"))


@pytest.fixture
def card(rehearsed: bool) -> Iterator[Platform]:
    """The first card, ready for exact arithmetic."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if rehearsed:
        with fake_card():
            yield FakePlatform()
    else:
        platform = CudaPlatform()
        probe = platform.probe()
        if not probe.available:
            pytest.skip(probe.reason)
        platform.prepare()
        yield platform
    torch.set_num_threads(before)
