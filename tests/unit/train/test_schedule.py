"""Phases, learning rates and row shapes by the share of the recipe that is done."""

from __future__ import annotations

import itertools

import pytest

from train.schedule import phase_at, stage

LATE = 10_000  # steps: long after the optimiser has warmed up


@pytest.mark.parametrize(
    ("progress", "phase"),
    [(0.0, 1), (0.5499, 1), (0.55, 2), (0.7799, 2), (0.78, 3), (1.0, 3)],
)
def test_phases_begin_at_their_borders(progress: float, phase: int) -> None:
    assert phase_at(progress) == phase
    now = stage(progress, LATE, "auto")
    assert (now.phase, now.mode.sparse, now.mode.rounded) == (phase, phase >= 2, phase == 3)
    assert now.mode.index_rows > 0


def test_a_fixed_phase_holds_whatever_the_progress() -> None:
    for progress in (0.0, 0.6, 1.0):
        assert [stage(progress, LATE, p).phase for p in ("1", "2", "3")] == [1, 2, 3]


def test_rates_rise_while_the_optimiser_warms_up_and_fall_to_a_hundredth() -> None:
    assert stage(0.0, 0, "auto").rate == pytest.approx(0.01)
    assert stage(0.0, 49, "auto").rate == pytest.approx(0.5)
    assert stage(0.3, 99, "auto").rate == stage(0.65, LATE, "auto").rate == 1.0
    rates = [stage(0.65 + 0.35 * n / 50, LATE, "auto").rate for n in range(51)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
    assert rates[25] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.01)
    # After a resume without the optimiser's state both hold.
    assert stage(0.825, 9, "auto").rate == pytest.approx(0.1 * 0.5)


def test_long_rows_come_in_after_the_start_and_more_often_once_sparse() -> None:
    every = [stage(p, LATE, "auto").long_every for p in (0.0, 0.0799, 0.08, 0.5, 0.55, 0.9)]
    assert every == [0, 0, 6, 6, 3, 3]


def test_cuts_are_more_frequent_once_sparse() -> None:
    dense, sparse = (stage(p, LATE, "auto").cuts for p in (0.1, 0.6))
    assert dense is not None and sparse is not None
    assert all(0 < a < b < 1 for a, b in zip(dense, sparse, strict=True))
