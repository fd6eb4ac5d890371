"""Fixtures that every part of the suite may use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pack_golden
import pytest


@pytest.fixture(scope="session")
def golden_model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Unpack a golden case on first use: `golden_model_dir("v41_a")` is its verified folder.

    All workers of one run share the folders; treat them as read-only.
    """
    base = tmp_path_factory.getbasetemp()
    # With xdist the base of a worker is a sub-folder of the run's own base.
    run = base.parent if hasattr(request.config, "workerinput") else base
    return lambda case: pack_golden.unpack(case, run / "golden")
