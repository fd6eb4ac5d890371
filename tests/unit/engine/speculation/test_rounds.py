"""What is known of which round, in blocking and in overlapped order."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.speculation.rounds import KEPT_ROUNDS, Rounds
from headrace.errors import InternalError

ROWS = np.array([3, 1])


def constant(*values):
    """Confidences of two drafts: the second as sure as the first."""
    return np.array([[value, value] for value in values])


def previous(rounds, rows=ROWS):
    survival, known = rounds.previous(rows)
    return survival[0, :, 0].tolist(), known.tolist()


def test_blocking_order():
    rounds = Rounds(5, 2)
    assert rounds.newest(ROWS).tolist() == [[1.0, 1.0]] * 2
    assert previous(rounds)[1] == [False, False]
    rounds.launch(ROWS)
    assert rounds.newest(ROWS).tolist() == [[1.0, 1.0]] * 2  # under way
    rounds.arrive(ROWS, constant(0.5, 0.25))
    assert rounds.newest(ROWS).tolist() == [[0.5, 0.25], [0.25, 0.0625]]
    assert previous(rounds)[1] == [False, False]  # there is no round before it
    rounds.launch(ROWS)
    assert previous(rounds) == ([0.5, 0.25], [True, True])
    rounds.arrive(ROWS, constant(0.125, 0.75))
    assert previous(rounds) == ([0.5, 0.25], [True, True])
    assert rounds.newest(ROWS)[:, 0].tolist() == [0.125, 0.75]


def test_overlapped_order_sees_the_same():
    rounds = Rounds(5, 2)
    for number in range(1, 40):
        rounds.launch(ROWS)
        expected = ([(number - 1) / 64] * 2, [True] * 2) if number > 1 else ([1.0] * 2, [False] * 2)
        assert previous(rounds) == expected
        rounds.arrive(ROWS, constant(number / 64, number / 64))
        assert previous(rounds) == expected


def test_late_confidences_are_unknown():
    rounds = Rounds(5, 2)
    rounds.launch(ROWS)
    rounds.launch(ROWS)
    assert previous(rounds)[1] == [False, False]
    rounds.arrive(ROWS[:1], constant(0.5))
    assert previous(rounds)[1] == [True, False]


def test_few_requests_look_at_more_rounds():
    rounds = Rounds(100, 2)
    rows = np.arange(1, 3)
    for number in range(1, 40):
        rounds.launch(rows)
        rounds.arrive(rows, constant(number / 64, number / 128))
    survival, _ = rounds.previous(rows)
    assert survival.shape == (KEPT_ROUNDS, 2, 2)
    assert (survival[:, 0, 0] * 64).tolist() == list(range(38, 38 - KEPT_ROUNDS, -1))
    assert (survival[:, 1, 0] * 128).tolist() == list(range(38, 38 - KEPT_ROUNDS, -1))
    for requests, depth in ((0, 8), (1, 8), (8, 8), (9, 7), (32, 2), (33, 1), (90, 1)):
        assert len(rounds.previous(np.arange(requests))[0]) == depth


def test_a_row_that_knows_few_rounds_repeats_them():
    rounds = Rounds(5, 2)
    for number in range(1, 5):
        rounds.launch(ROWS[:1])
        rounds.arrive(ROWS[:1], constant(number / 8))
    rounds.launch(ROWS)
    survival, known = rounds.previous(ROWS)
    assert known.tolist() == [True, False]
    assert (survival[:, 0, 0] * 8).tolist() == [4, 3, 2, 1, 4, 3, 2, 1]


def test_the_profile_knows_planned_rounds_only():
    blocking, overlapped = Rounds(5, 2), Rounds(5, 2)
    blocking.launch(ROWS)
    overlapped.launch(ROWS)
    blocking.arrive(ROWS, constant(0.0, 0.5))
    assert blocking.profile.tolist() == [1.0, 1.0]  # its drafts may not be decided by it
    blocking.plan(ROWS)
    overlapped.plan(ROWS)
    assert overlapped.profile.tolist() == [1.0, 1.0]
    overlapped.arrive(ROWS, constant(0.0, 0.5))
    assert blocking.profile.tolist() == overlapped.profile.tolist()
    weight = 2 / 34
    assert blocking.profile == pytest.approx([1 - weight * 0.75, 1 - weight * 0.875])
    before = blocking.profile
    blocking.plan(ROWS)  # without a new draft pass there is nothing to learn
    blocking.launch(ROWS)
    blocking.plan(ROWS)
    assert blocking.profile.tolist() == before.tolist()


def test_the_profile_follows():
    rounds = Rounds(300, 2)
    rows = np.arange(300)
    for _ in range(20):
        rounds.launch(rows)
        rounds.plan(rows)
        rounds.arrive(rows, np.full((300, 2), 0.5))
    assert rounds.profile == pytest.approx([0.5, 0.25], abs=1e-4)


def test_cleared_rows_know_nothing():
    rounds = Rounds(5, 2)
    for _ in range(3):
        rounds.launch(ROWS)
        rounds.arrive(ROWS, constant(0.5, 0.25))
    rounds.launch(ROWS)
    rounds.clear(ROWS[:1])
    assert previous(rounds)[1] == [False, True]
    assert rounds.newest(ROWS).tolist() == [[1.0, 1.0]] * 2
    with pytest.raises(InternalError, match="not launched"):
        rounds.arrive(ROWS, constant(0.5, 0.25))
    rounds.launch(ROWS[:1])
    rounds.arrive(ROWS[:1], constant(0.125))
    assert rounds.newest(ROWS)[:, 0].tolist() == [0.125, 1.0]
