"""Tests that need an NVIDIA GPU: `pytest -m gpu tests/gpu`, on a machine that has one.

`pytest -m gpu tests/gpu --rehearse` runs the same tests on the fake card (`tests/fake_card.py`):
what fails there by its code needs no GPU to be found. The arithmetic is the host's then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.engine import engine
from headrace.platforms import CudaPlatform, Platform
from tests.fake_card import FakePlatform, fake_card


def pytest_addoption(parser: pytest.Parser) -> None:
    """See the module."""
    parser.addoption("--rehearse", action="store_true", help="run the GPU tests on a fake card")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that come from other suites are GPU tests here."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def rehearsed(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rehearse"))


@pytest.fixture(scope="session")
def platform(rehearsed: bool) -> Iterator[Platform]:
    """The first card, ready for exact arithmetic, for whole modules of tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if rehearsed:
        with fake_card(), pytest.MonkeyPatch.context() as patch:
            # Only the thread that made the fake card can use it.
            patch.setattr(
                engine, "ThreadPoolExecutor", lambda *_: SimpleNamespace(submit=engine.run_now)
            )
            yield FakePlatform()
    else:
        found = CudaPlatform()
        probe = found.probe()
        if not probe.available:
            pytest.skip(probe.reason)
        found.prepare()
        yield found
    torch.set_num_threads(before)


@pytest.fixture
def card(platform: Platform) -> Platform:
    """The same."""
    return platform
