"""The sampler against a plain NumPy reference, order, ties, independence of rows, broken rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.rng import Purpose, choice_seed, uniform
from headrace.core.sampling import LogprobsMode, SamplingParams
from headrace.engine.edits import edited
from headrace.engine.plan import NO_TOKEN_DRAWN
from headrace.engine.sampler import sample
from headrace.engine.uniforms import uniforms
from headrace.engine.weights import drop_unlikely, exp_weights, top_ids
from tests.unit.engine import sampling_reference as reference
from tests.unit.engine.sampling_rows import EOS, Row, admit, sample_rows, state_of, tokens_of

VOCAB = 24
TEMPERATURES = st.sampled_from([0.3, 0.7, 1.0, 1.9])
ids = st.integers(0, VOCAB - 1)
# Multiples of 1/4 make ties common; with binary fractions as masses sums are exact.
quarters = st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB)
shaping = st.fixed_dictionaries(
    {
        "temperature": TEMPERATURES,
        "top_k": st.just(-1) | st.integers(2, 30),
        "top_p": st.sampled_from([0.05, 0.31, 0.57, 0.83, 0.97, 1.0]),
        "min_p": st.sampled_from([0.0, 0.013, 0.11, 0.6, 1.0]),
    }
)
edits = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.4, 2.0]),
        "frequency_penalty": st.sampled_from([-0.3, 0.7, 2.0]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 0.3, 100.0])),
        "banned_token_ids": st.lists(ids, max_size=5).map(tuple),
        "allowed_token_ids": st.sets(ids, min_size=12).map(tuple),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(ids, max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
    },
)
known = st.tuples(st.lists(ids, min_size=1, max_size=9), st.lists(ids, max_size=9))
dtypes = st.sampled_from([torch.float32, torch.float64])


def weights_of(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    weights = exp_weights(logits[None], np.array([params.temperature]))
    shape = (np.array([params.top_k]), np.array([params.top_p]), np.array([params.min_p]))
    drop_unlikely(logits[None], weights, *shape)
    return weights[0].numpy()


@settings(max_examples=200, deadline=None)
@given(quarters, shaping)
def test_shaping_equals_the_reference(values: list[int], fields: dict[str, Any]) -> None:
    logits = torch.tensor(values).float() / 4
    params = SamplingParams(**fields)
    expected = reference.weights(logits.numpy(), params)
    actual = weights_of(logits, params)
    # A mass within rounding of top_p may fall on either side of the reference's sum.
    full = np.sort(reference.weights(logits.numpy(), SamplingParams(**{**fields, "top_p": 1.0})))
    masses = np.cumsum(full[::-1]) / full.sum()
    if not np.isclose(masses, params.top_p, atol=1e-12).any() or params.top_p == 1.0:
        assert np.array_equal(actual > 0, expected > 0)
        assert np.allclose(actual, expected, rtol=1e-14, atol=0)


@settings(max_examples=120, deadline=None)
@given(quarters, edits, known, dtypes)
def test_edits_equal_the_reference(
    values: list[int], fields: dict[str, Any], tokens: tuple[list[int], list[int]], dtype: Any
) -> None:
    logits = torch.tensor(values, dtype=dtype) / 4
    row = Row(SamplingParams(**fields), prompt=tokens[0], output=tokens[1])
    state = state_of([Row(), row, Row()], VOCAB)
    stacked = torch.stack((logits, logits, logits))
    positions = np.full(3, row.position)
    changed = edited(stacked, state, np.array([1, 2, 3]), positions)
    expected = reference.edited(logits.numpy(), row.params, row.prompt, row.output, EOS)
    assert changed.dtype == dtype
    assert np.array_equal(changed[1].numpy(), expected)
    assert torch.equal(changed[0], logits) and torch.equal(changed[2], logits)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(quarters, shaping, edits, known), min_size=1, max_size=5), dtypes)
def test_mixed_batches_equal_the_reference(batch: list[Any], dtype: torch.dtype) -> None:
    rows, logits = [], []
    for number, (values, shape, edit, (prompt, output)) in enumerate(batch):
        # Irrational steps between logits keep masses away from rounding at the borders.
        logits.append(torch.tensor(values, dtype=dtype) * 0.2718281828 + torch.arange(VOCAB) / 997)
        rows.append(Row(SamplingParams(**{**shape, **edit}), 7 * number, prompt, output))
    stacked = torch.stack(logits)
    expected = []
    for row, line in zip(rows, stacked, strict=True):
        changed = reference.edited(line.numpy(), row.params, row.prompt, row.output, EOS)
        kept = reference.weights(changed, row.params)
        expected.append(reference.drawn(kept, row.seed, row.position))
    assert tokens_of(stacked, rows) == expected
    assert tokens_of(stacked.flip(0), rows[::-1]) == expected[::-1]


def test_penalties_come_before_bias_and_bias_before_masks() -> None:
    logits = torch.tensor([[4.0, -4.0, 1.0, 0.0]])
    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={0: 10.0, 1: 10.0, 3: 100.0},
        banned_token_ids=(3,),
    )
    state = state_of([Row(params, prompt=(0,), output=(1, 1))], 4)
    changed = edited(logits, state, np.array([1]), np.array([3]))
    # (4 / 2) + 10; (-4 * 2) - 2 * 0.5 - 1 + 10; untouched; banned in spite of its bias.
    assert changed.tolist() == [[12.0, 0.0, 1.0, -torch.inf]]


def test_temperature_comes_after_penalties_and_top_k_before_top_p_before_min_p() -> None:
    logits = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1]).log()
    # Without top_k the best two hold 0.6 of the mass; after top_k = 3 they hold 0.75.
    assert (weights_of(logits, SamplingParams(top_k=3, top_p=0.7)) > 0).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert (weights_of(logits, SamplingParams(top_p=0.7)) > 0).sum() == 3
    # min_p is relative to the highest: 0.1 / 0.3 is below 0.5, 0.2 / 0.3 is not.
    assert (weights_of(logits, SamplingParams(min_p=0.5)) > 0).sum() == 3
    # At temperature 2 the ratio 1/3 becomes its root, 0.58.
    assert (weights_of(logits, SamplingParams(min_p=0.5, temperature=2.0)) > 0).sum() == 5
    one = Row(SamplingParams(temperature=0.5, presence_penalty=1.0), 3, (0,), (4,))
    line = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    draws = [tokens_of(line[None], [Row(one.params, seed, (0,), (4,))])[0] for seed in range(400)]
    # The penalty makes all five logits equal, whatever the temperature.
    assert (np.abs(np.bincount(draws, minlength=5) - 80) < 40).all()


def test_top_p_keeps_at_least_the_best_token() -> None:
    logits = torch.tensor([0.0, 5.0, 5.0])
    assert (weights_of(logits, SamplingParams(top_p=1e-9)) > 0).tolist() == [False, True, False]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_best_ids_by_value_then_id(count: int) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    assert top_ids(logits, count)[0].tolist() == [1, 3, 2, 4, 5, 0][:count]


@pytest.mark.parametrize("vocab", [150, 9000])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 127},
        {"top_k": 128},
        {"top_k": 149},
        {"top_k": 4096},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.001},
        {"top_k": 140, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_wide_vocabularies_equal_the_reference(
    vocab: int, fields: dict[str, Any], ties: bool
) -> None:
    """Candidates are looked at in widths of 128, 4096, all: every border is crossed."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    if ties:
        logits = (logits * 3).round() / 3
    params = SamplingParams(**fields)
    expected = reference.weights(logits.numpy(), params)
    assert np.array_equal(weights_of(logits, params) > 0, expected > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=1)]
)
def test_greedy_ties_take_the_lowest_id(dtype: torch.dtype, params: SamplingParams) -> None:
    logits = torch.full((3, 70_000), -1.0, dtype=dtype)
    logits[0, [69_999, 40_000, 123]] = 2.0
    logits[1, [69_999, 0]] = 2.0
    logits[2] = 0.0
    assert tokens_of(logits, [Row(params)] * 3) == [123, 0, 0]
    biased = Row(SamplingParams(temperature=0.0, logit_bias={5: 3.0, 9: 3.0}))
    assert tokens_of(logits, [Row(params), biased, Row(params)]) == [123, 0, 0]
    assert tokens_of(logits[2:], [biased]) == [5]


def test_chi_square_of_every_row_in_a_mixed_batch() -> None:
    """Each row of a batch of different requests has its own distribution (DT-10).

    6,000 draws a row with fixed seeds; the bounds are the 0.9999 quantiles of chi-square.
    """
    vocab, draws = 10, 6_000
    base = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, -0.5, -1.0, 0.2, 0.9, 1.1])
    several = [
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(top_k=4),
        SamplingParams(top_k=6, top_p=0.9, temperature=1.7),
        SamplingParams(min_p=0.2),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(logit_bias={6: 3.0}, banned_token_ids=(4,)),
        SamplingParams(allowed_token_ids=(0, 3, 5, 6)),
    ]
    rows = [
        Row(params, seed=17 * n + 5, prompt=[2] * (n + 1), output=[4, 4, 7])
        for n, params in enumerate(several)
    ]
    state = state_of(rows, vocab)
    logits = torch.stack([base.roll(n) for n in range(len(rows))])
    table = np.arange(1, len(rows) + 1)
    repeat = 1_000
    counts = np.zeros((len(rows), vocab))
    for start in range(0, draws, repeat):
        # Many positions of the same requests in one call, as verification of drafts does.
        positions = np.repeat(np.arange(start, start + repeat) + 1000, len(rows))
        tokens = sample(logits.repeat(repeat, 1), state, np.tile(table, repeat), positions).tokens
        for n in range(len(rows)):
            counts[n] += np.bincount(tokens[n :: len(rows)], minlength=vocab)
    quantile = {1: 15.2, 2: 18.5, 3: 21.2, 4: 23.6, 5: 25.8, 6: 27.9, 7: 29.9, 8: 31.9, 9: 33.8}
    for n, row in enumerate(rows):
        line = reference.edited(logits[n].numpy(), row.params, row.prompt, row.output, EOS)
        if row.params.greedy:
            assert counts[n, int(line.argmax())] == draws
            continue
        expected = reference.weights(line, row.params)
        expected *= draws / expected.sum()
        assert (counts[n][expected == 0] == 0).all()
        alive = expected > 0
        chi2 = ((counts[n] - expected)[alive] ** 2 / expected[alive]).sum()
        assert chi2 < quantile[int(alive.sum()) - 1], (n, chi2)


def test_draw_is_the_first_id_above_the_number() -> None:
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log()
    for position in range(1, 50):
        number = uniform(9, position)
        expected = 0 if number < 0.25 else 1 if number < 0.5 else 2
        assert tokens_of(logits, [Row(seed=9, prompt=[0] * position)]) == [expected]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1),
    st.sampled_from(list(Purpose)),
)
def test_many_numbers_at_once_are_the_same_numbers(
    pairs: list[tuple[int, int]], purpose: Purpose
) -> None:
    seeds = np.array([seed for seed, _ in pairs], dtype=np.uint64)
    positions = np.array([position for _, position in pairs], dtype=np.int64)
    expected = [uniform(seed, position, purpose) for seed, position in pairs]
    assert uniforms(seeds, positions, purpose).tolist() == expected


def random_rows(count: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 40, "temperature": 0.7},
        {"top_p": 0.9},
        {"top_p": 0.95, "top_k": 300, "min_p": 0.01, "temperature": 1.4},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {3: 4.0}},
        {"allowed_token_ids": tuple(range(2, 400, 7)), "min_tokens": 3},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    ]
    logprobs: list[dict[str, Any]] = [
        {},
        {"logprobs": 0},
        {"logprobs": 5},
        {"logprobs": 3, "logprobs_mode": LogprobsMode.PROCESSED},
    ]
    return [
        Row(
            SamplingParams(**kinds[number % len(kinds)], **logprobs[number // 3 % len(logprobs)]),
            int(rng.integers(2**63)),
            rng.integers(0, 1000, rng.integers(1, 30)).tolist(),
            rng.integers(0, 1000, rng.integers(0, 30)).tolist(),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("vocab", [1000, 1003])
def test_other_rows_change_no_bit(vocab: int) -> None:
    """Alone, in any order, among others: tokens and log probabilities are the same bits."""
    rows = random_rows(75, 3)
    logits = torch.randn(75, vocab, generator=torch.Generator().manual_seed(3)) * 3

    def outcome(order: list[int]) -> dict[int, Any]:
        result = sample_rows(logits[order], [rows[index] for index in order])
        records: dict[int, Any] = {}
        if result.logprobs is not None:
            places = enumerate(result.logprobs.index.tolist())
            records = {order[index]: result.logprobs.record(place) for place, index in places}
        tokens = result.tokens.tolist()
        return {index: (tokens[n], records.get(index)) for n, index in enumerate(order)}

    together = outcome(list(range(75)))
    assert len({token for token, _ in together.values()}) > 30
    for index in range(75):
        assert outcome([index])[index] == together[index]
    rng = np.random.default_rng(1)
    for size in (2, 7, 33, 64):
        order = rng.permutation(75)[:size].tolist()
        assert outcome(order) == {index: together[index] for index in order}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(top_p=0.9),
        SamplingParams(logprobs=2),
        SamplingParams(logprobs=2, logprobs_mode=LogprobsMode.PROCESSED),
        SamplingParams(temperature=0.0, banned_token_ids=(3,)),
    ],
)
def test_a_broken_row_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 7] = 50.0
    logits[1, 3] = bad
    assert tokens_of(logits, [Row(params)] * 3) == [7, NO_TOKEN_DRAWN, 7]


def test_a_row_without_candidates_draws_nothing() -> None:
    logits = torch.full((2, 4), float("-inf"))
    logits[1, 2] = 0.0
    assert tokens_of(logits, [Row(), Row()]) == [NO_TOKEN_DRAWN, 2]
    only_3 = Row(SamplingParams(allowed_token_ids=(3,)))
    assert tokens_of(logits, [only_3, only_3]) == [NO_TOKEN_DRAWN, NO_TOKEN_DRAWN]


def test_no_rows() -> None:
    assert tokens_of(torch.zeros(0, 4), []) == []


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.2}]
)
def test_state_after_preemption_is_that_of_the_known_tokens(fields: dict[str, float]) -> None:
    """Counts kept step by step = counts rebuilt from the tokens; a fork has counts of its own."""
    params = SamplingParams(temperature=0.9, **fields)
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(5))
    row = Row(params, 11, prompt=[3, 4, 3])
    state = state_of([row, Row(), Row(), Row()], 50)
    output: list[int] = []
    for step in range(40):
        position = np.array([3 + step])
        (token,) = sample(logits[step : step + 1], state, np.array([1]), position).tokens
        assert state.commit(np.array([1]), np.array([token])) == {}
        again = Row(params, 11, row.prompt, tuple(output))
        state.release(2)
        admit(state, 2, again)
        assert sample(logits[step : step + 1], state, np.array([2]), position).tokens == [token]
        output.append(int(token))
        if step == 20:
            state.release(3)
            state.copy(1, 3, seed=choice_seed(11, 1))
            fork_output = list(output)
    one, two = state.edits[1].counts, state.edits[3].counts
    assert one is not None and two is not None
    assert one.counts.sum() == 40 and two.counts.sum() == len(fork_output)
    rebuilt = Row(params, choice_seed(11, 1), row.prompt, tuple(fork_output))
    state.release(4)
    admit(state, 4, rebuilt)
    positions = np.full(2, rebuilt.position)
    fork = sample(logits[:1].repeat(2, 1), state, np.array([3, 4]), positions).tokens
    assert fork[0] == fork[1]
