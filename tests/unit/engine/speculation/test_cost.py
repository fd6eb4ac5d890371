"""Cost of a step: curves, and what is learned from the steps of the day."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.speculation.cost import REFRESH_STEPS, WINDOW_STEPS, StepCost
from headrace.engine.speculation.curve import Curve
from headrace.errors import ConfigError


def linear(**rest) -> StepCost:
    return StepCost(Curve((0, 100), (1.0, 2.0)), **rest)


def test_terms():
    cost = linear(draft=Curve.linear(0.5, 0.25), sampler=Curve.linear(0.1, 0.01))
    assert cost.verify_s(10, 3) == pytest.approx([1.10, 1.11, 1.12])
    assert cost.verify_s(190, 1) == pytest.approx([2.9])  # beyond the curve, and a larger table
    assert cost.verify_s(0, 1) == pytest.approx([1.0])
    assert [cost.draft_s(n) for n in (0, 1, 2)] == [0.0, 0.75, 1.0]
    assert cost.sampler_s(10) == pytest.approx(0.2)
    assert linear().draft_s(3) == 0.0
    with pytest.raises(ValueError, match="read-only"):
        cost.verify_s(0, 2)[0] = 7.0


def test_slow_steps_raise_the_slope():
    """Median over sizes of their median residual per row: outliers and rare sizes do not count."""
    cost = StepCost(Curve((10, 20, 40), (1.0, 2.0, 4.0)))
    assert cost.verify_s(20, 1) == pytest.approx([2.0])
    for i in range(30):
        cost.observe(10, 1.0 + 10 * 0.01)
        cost.observe(20, 2.0 + 20 * 0.03)
        cost.observe(40, 1000.0 if i % 3 == 0 else 4.0 + 40 * 0.05)
    for _ in range(REFRESH_STEPS):
        cost.observe(20, 2.0 + 20 * 0.03)
    assert cost.slope_s_per_row == pytest.approx(0.03)
    assert cost.verify_s(20, 1) == pytest.approx([2.6])
    assert cost.verify_s(10, 1) == pytest.approx([1.3])


def test_ten_steps_of_a_size_are_needed():
    cost = linear()
    for rows in range(1, 2 * REFRESH_STEPS + 1):
        cost.observe(rows if rows % 8 else 200, 9.0)  # all but one lie between the two sizes
    assert cost.slope_s_per_row > 0
    rare = StepCost(Curve(np.arange(1, 65), np.full(64, 1.0)))
    for i in range(2 * REFRESH_STEPS):
        rare.observe(i + 1, 9.0)
    assert rare.slope_s_per_row == 0.0


def test_graph_steps_are_corrected_by_the_captured_size():
    cost = StepCost(Curve((8, 16), (1.0, 2.0), stepped=True))
    for _ in range(REFRESH_STEPS):
        cost.observe(9, 2.0 + 16 * 0.1)
    assert cost.slope_s_per_row == pytest.approx(0.1)
    assert cost.verify_s(8, 2) == pytest.approx([1.8, 3.6])


def test_fast_steps_do_not_make_rows_cheap():
    cost = linear()
    for _ in range(REFRESH_STEPS):
        cost.observe(50, 0.1)
    assert cost.slope_s_per_row == 0.0
    assert cost.verify_s(50, 1) == pytest.approx([1.5])


def test_what_is_old_is_forgotten():
    cost = linear()
    for _ in range(WINDOW_STEPS):
        cost.observe(50, 2.0)
    assert cost.slope_s_per_row == pytest.approx(0.01)
    for _ in range(WINDOW_STEPS):
        cost.observe(50, 1.5)
    assert cost.slope_s_per_row == pytest.approx(0.0)


def test_sampler_time_of_this_size_then_of_all_then_the_curve():
    cost = linear(sampler=Curve.linear(0.1, 0.01))
    for i in range(4):
        cost.observe(0, 0.0, requests=100, sampler_s=5.0)
        assert cost.sampler_s(100) == pytest.approx(1.1), i
    cost.observe(0, 0.0, requests=1, sampler_s=2.0)
    assert cost.sampler_s(100) == 5.0  # five samples in all
    assert cost.sampler_s(1) == 5.0
    for seconds in (7.0, 7.5, 300.0, 7.0, 7.0):
        cost.observe(0, 0.0, requests=100, sampler_s=seconds)
    assert cost.sampler_s(100) == 7.0  # the latest nine, median
    assert cost.slope_s_per_row == 0.0  # a step without rows says nothing of rows
    for _ in range(9):
        cost.observe(0, 0.0, requests=2**30, sampler_s=1.0)
    assert cost.sampler_s(2**30) == 1.0
    assert cost.sampler_s(100) == 7.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_refused(seconds):
    with pytest.raises(ConfigError, match="cannot take"):
        linear().observe(1, seconds)
    with pytest.raises(ConfigError, match="cannot take"):
        linear().observe(1, 1.0, requests=1, sampler_s=seconds)
