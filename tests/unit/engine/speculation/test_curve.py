"""Curves of seconds by size: interpolation, steps, measuring, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.speculation.curve import Curve, default_sizes, measure
from headrace.errors import ConfigError


def test_linear_between_and_beyond():
    curve = Curve((6, 48, 192), (12.4, 17.4, 23.7))
    sizes = np.array([0, 1, 6, 27, 48, 120, 192, 336])
    expected = [12.4, 12.4, 12.4, 14.9, 17.4, 20.55, 23.7, 30.0]
    assert curve.at(sizes) == pytest.approx(expected)
    assert curve.rounded(sizes).tolist() == sizes.tolist()
    assert curve.of(27) == pytest.approx(14.9)


def test_steps_at_graph_sizes():
    curve = Curve((1, 2, 4, 8), (1.0, 1.5, 3.0, 4.0), stepped=True)
    sizes = np.array([0, 1, 2, 3, 4, 5, 8, 9, 12])
    assert curve.at(sizes).tolist() == [1.0, 1.0, 1.5, 3.0, 3.0, 4.0, 4.0, 4.25, 5.0]
    assert curve.rounded(sizes).tolist() == [1, 1, 2, 4, 4, 8, 8, 9, 12]


def test_larger_is_never_faster():
    curve = Curve((1, 2, 4, 8), (2.0, 1.0, 3.0, 2.5))
    assert curve.seconds.tolist() == [2.0, 2.0, 3.0, 3.0]
    assert curve.of(100) == 3.0  # the last slope is that of the monotone curve


def test_one_size_is_constant_and_linear_is_linear():
    assert Curve((5,), (0.25,)).at(np.array([1, 5, 500])).tolist() == [0.25] * 3
    line = Curve.linear(1.0, 0.5)
    assert line.at(np.array([0, 1, 7, 1000])).tolist() == [1.0, 1.5, 4.5, 501.0]


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((), (), r"1 \.\. 4096"),
        ((1, 2), (1.0,), "one length"),
        (((1, 2),), ((1.0, 2.0),), "one length"),
        ((2, 2), (1.0, 1.0), "increase"),
        ((3, 2), (1.0, 1.0), "increase"),
        ((-1, 2), (1.0, 1.0), "increase"),
        ((1, 2**31), (1.0, 1.0), "increase"),
        ((1.5, 2.0), (1.0, 1.0), "integers"),
        ((1, 2), (1.0, float("nan")), "finite"),
        ((1, 2), (1.0, float("inf")), "finite"),
        ((1, 2), (-1.0, 1.0), ">= 0"),
        (tuple(range(5000)), (1.0,) * 5000, "4096"),
    ],
)
def test_what_is_no_curve_is_refused(sizes, seconds, message):
    with pytest.raises(ConfigError, match=message) as raised:
        Curve(sizes, seconds)
    assert len(raised.value.message) < 300


def test_measure_drops_extremes_and_warms_up():
    taken: dict[int, list[float]] = {
        4: [9.0, 2.0, 1.0, 2.2, 2.1, 50.0],
        16: [90.0, 3.0, 3.0, 3.3, 0.1, 70.0],
    }
    order = []

    def run_step(size: int) -> float:
        order.append(size)
        return taken[size].pop(0)

    curve = measure(run_step, [16, 4, 4], stepped=True)
    assert order == [4] * 6 + [16] * 6
    assert curve.sizes.tolist() == [4, 16]
    assert curve.seconds == pytest.approx([2.1, 3.1])
    assert curve.stepped


def test_measure_with_few_repeats():
    times = iter([5.0, 1.0, 3.0])
    assert measure(lambda _: next(times), [1], repeats=2).of(1) == 2.0
    assert measure(lambda _: 1.0, [1], warmup=0, repeats=1).of(1) == 1.0
    with pytest.raises(ConfigError, match="repeats"):
        measure(lambda _: 1.0, [1], repeats=0)
    with pytest.raises(ConfigError, match=r"1 \.\. 4096"):
        measure(lambda _: 1.0, [])
    with pytest.raises(ConfigError, match="finite"):
        measure(lambda _: float("nan"), [1])


def test_measure_stops_when_its_budget_is_used_up():
    def sizes(asked: list[int], budget_s: float) -> list[int]:
        curve = measure(float, asked, warmup=0, repeats=3, budget_s=budget_s)
        return [int(size) for size in curve.sizes]

    assert sizes([1, 2, 3, 4], 9.0) == [1, 2]
    assert sizes([1, 2, 3, 4], 10.0) == [1, 2, 3]
    assert sizes([5, 6, 7], 0.0) == [5, 6]


def test_default_sizes():
    assert default_sizes(1) == [1]
    assert default_sizes(9) == [1, 2, 3, 4, 6, 8, 9]
    assert default_sizes(64) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    with pytest.raises(ConfigError, match=">= 1"):
        default_sizes(0)
