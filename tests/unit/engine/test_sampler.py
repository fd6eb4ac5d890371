"""The sampler against a plain NumPy reference, the exact distribution, ties and broken rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.rng import uniform
from headrace.core.sampling import SamplingParams
from headrace.engine.outputs import NO_TOKEN_DRAWN
from headrace.engine.sampler import SamplingRow, sample, surviving_weights, top_k_ids


def reference_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities [vocab] after temperature, top_k, top_p; loops instead of tensor tricks."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k != -1:
        order = order[: params.top_k]
    scaled = np.array([logits[i] for i in order], dtype=np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    kept, mass = [], 0.0
    for rank, weight in enumerate(weights):
        if rank and params.top_p < 1.0 and mass > params.top_p:
            break
        kept.append(rank)
        mass += weight
    probabilities = np.zeros(len(logits))
    for rank in kept:
        probabilities[order[rank]] = weights[rank]
    return probabilities / probabilities.sum()


def row(params: SamplingParams, seed: int = 0, position: int = 1) -> SamplingRow:
    return SamplingRow(params, seed, position)


@settings(max_examples=150, deadline=None)
@given(
    # Multiples of 1/4 make ties common and keep masses away from rounding at the top_p border.
    quarters=st.lists(st.integers(-12, 12), min_size=1, max_size=24),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.one_of(st.just(-1), st.integers(2, 30)),
    top_p=st.sampled_from([0.05, 0.31, 0.57, 0.83, 0.97, 1.0]),
)
def test_survivors_equal_reference(
    quarters: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.array(quarters, dtype=np.float64) / 4
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    ids, weights = surviving_weights(torch.from_numpy(logits).float(), params)
    expected = reference_probabilities(logits, params)
    # A tie with the border within rounding may fall on either side of the reference's sum.
    border = np.isclose(np.cumsum(-np.sort(-expected)), top_p, atol=1e-12).any()
    if not border:
        assert ids.tolist() == np.flatnonzero(expected).tolist()
        assert np.allclose((weights / weights.sum()).numpy(), expected[ids.numpy()], atol=1e-12)


def test_top_k_ties_take_the_lowest_ids() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0])
    assert top_k_ids(logits, 3).tolist() == [1, 2, 3]
    assert top_k_ids(logits, 4).tolist() == [1, 2, 3, 4]
    assert top_k_ids(logits, 99).tolist() == [0, 1, 2, 3, 4, 5]


def test_top_p_is_taken_after_top_k() -> None:
    # Without top_k the best two hold 0.6 of the mass; after top_k = 3 they hold 0.75.
    logits = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1]).log()
    params = SamplingParams(top_k=3, top_p=0.7)
    assert surviving_weights(logits, params)[0].tolist() == [0, 1]
    assert surviving_weights(logits, SamplingParams(top_p=0.7))[0].tolist() == [0, 1, 2]


def test_top_p_keeps_at_least_the_best_token() -> None:
    logits = torch.tensor([0.0, 5.0, 5.0])
    assert surviving_weights(logits, SamplingParams(top_p=1e-9))[0].tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=1)]
)
def test_greedy_ties_take_the_lowest_id(dtype: torch.dtype, params: SamplingParams) -> None:
    logits = torch.full((3, 70_000), -1.0, dtype=dtype)
    logits[0, [69_999, 40_000, 123]] = 2.0
    logits[1, [69_999, 0]] = 2.0
    logits[2] = 0.0
    assert sample(logits, [row(params)] * 3) == [123, 0, 0]


def test_distribution_matches_softmax() -> None:
    """Chi-square of 20,000 draws with fixed seeds; 27.9 is the 0.999 quantile of 9 degrees."""
    logits = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, -0.5, -1.0, 0.2, 0.9, 1.1])
    params = SamplingParams(temperature=1.3)
    draws = 20_000
    expected = reference_probabilities(logits.double().numpy(), params) * draws
    rows = [row(params, seed=index % 7, position=index) for index in range(draws)]
    counts = np.bincount(sample(logits.expand(draws, -1), rows), minlength=10)
    assert ((counts - expected) ** 2 / expected).sum() < 27.9


def test_draw_is_the_first_id_above_the_number() -> None:
    logits = torch.tensor([0.25, 0.25, 0.5]).log()
    for position in range(50):
        number = uniform(9, position)
        expected = 0 if number < 0.25 else 1 if number < 0.5 else 2
        assert sample(logits[None], [row(SamplingParams(), 9, position)]) == [expected]


def test_banned_ids_are_never_drawn() -> None:
    logits = torch.full((200, 6), float("-inf"))
    logits[:, 2], logits[:, 4] = 0.0, -3.0
    rows = [row(SamplingParams(top_k=5), 1, position) for position in range(200)]
    assert set(sample(logits, rows)) == {2, 4}


def test_other_rows_change_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 5000, generator=generator)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=400)
    rows = [row(params, seed=index, position=11 * index) for index in range(8)]
    together = sample(logits, rows)
    assert len(set(together)) > 1
    assert [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(8)] == together
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 7] = 50.0
    logits[1, 3] = bad
    params = SamplingParams(temperature=temperature)
    assert sample(logits, [row(params)] * 3) == [7, NO_TOKEN_DRAWN, 7]


def test_a_row_without_candidates_draws_nothing() -> None:
    logits = torch.full((1, 4), float("-inf"))
    assert sample(logits, [row(SamplingParams())]) == [NO_TOKEN_DRAWN]


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 4), []) == []
