"""Log probabilities: raw and processed, of drawn and of prompt tokens, and their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.output import TokenLogprobs
from headrace.core.sampling import LogprobsMode, SamplingParams
from headrace.engine.logprob_rows import PromptLogprobs
from headrace.engine.logprobs import prompt_logprobs
from headrace.errors import InvalidRequest
from tests.unit.engine import sampling_reference as reference
from tests.unit.engine.sampling_rows import EOS, Row, sample_rows, state_of

VOCAB = 30
PROCESSED = {"logprobs_mode": LogprobsMode.PROCESSED}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def check(record: TokenLogprobs, token: int, expected: np.ndarray, count: int) -> None:
    order = sorted(range(len(expected)), key=lambda i: (-expected[i], i))[:count]
    assert np.isclose(record.logprob, expected[token], rtol=1e-12, atol=1e-12)
    assert len(record.top_ids) == len(record.top_logprobs) == count
    # Log probabilities of equal logits are equal, so the order is that of the ids.
    assert list(record.top_ids) == order
    assert np.allclose(record.top_logprobs, expected[order], rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=VOCAB, max_size=VOCAB),
    st.sampled_from([{}, {"temperature": 0.0}, {"top_k": 3}, {"presence_penalty": 2.0}]),
    st.integers(0, VOCAB),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_raw_is_the_log_softmax_of_the_unmodified_logits(
    values: list[int], fields: dict[str, Any], count: int, dtype: torch.dtype
) -> None:
    logits = torch.tensor([values], dtype=dtype) / 4
    row = Row(SamplingParams(logprobs=count, **fields), output=(5, 6))
    result = sample_rows(logits, [row])
    assert result.logprobs is not None
    check(result.logprobs.record(0), int(result.tokens[0]), log_softmax(logits[0].numpy()), count)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2, "logit_bias": {4: 2.0}},
        {"temperature": 0.0, "banned_token_ids": (3, 4)},
        {"repetition_penalty": 1.4, "allowed_token_ids": (1, 2, 3, 4, 5, 20)},
    ],
)
def test_processed_is_the_distribution_that_is_drawn_from(fields: dict[str, Any]) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    row = Row(SamplingParams(logprobs=7, **PROCESSED, **fields), output=(5, 6))
    result = sample_rows(logits, [row])
    line = reference.edited(logits[0].numpy(), row.params, row.prompt, row.output, EOS)
    temperature = row.params.temperature or 1.0  # greedy: of the edited logits as they are
    flat = SamplingParams(**{**fields, "temperature": temperature})
    with np.errstate(divide="ignore"):
        weights = reference.weights(line, flat)
        expected = np.log(weights) - np.log(weights.sum())
    assert result.logprobs is not None
    record, token = result.logprobs.record(0), int(result.tokens[0])
    assert np.isclose(record.logprob, expected[token], rtol=1e-12)
    alive = [i for i in record.top_ids if expected[i] > -np.inf]
    assert alive == sorted(alive, key=lambda i: (-expected[i], i))
    assert np.allclose(record.top_logprobs, expected[list(record.top_ids)], rtol=1e-12)


def test_rows_of_different_wishes_in_one_batch() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    wishes: list[dict[str, Any]] = [{"logprobs": 2}, {}, {"logprobs": 0}, {"logprobs": 9}, {}]
    rows = [Row(SamplingParams(temperature=0.0, **wish)) for wish in wishes]
    rows[3] = Row(SamplingParams(temperature=0.0, logprobs=9, **PROCESSED))
    result = sample_rows(logits, rows)
    assert result.logprobs is not None
    assert result.logprobs.index.tolist() == [0, 2, 3]
    for place, (index, count) in enumerate([(0, 2), (2, 0), (3, 9)]):
        check(
            result.logprobs.record(place),
            int(result.tokens[index]),
            log_softmax(logits[index].numpy()),
            count,
        )
    assert sample_rows(logits[[1, 4]], [rows[1], rows[4]]).logprobs is None


def test_logprobs_change_no_token() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(2))
    plain = [Row(SamplingParams(top_p=0.9), seed) for seed in range(40)]
    modes: list[dict[str, Any]] = [{}, PROCESSED]
    for fields in modes:
        asked = [Row(SamplingParams(top_p=0.9, logprobs=3, **fields), seed) for seed in range(40)]
        expected = sample_rows(logits, plain).tokens.tolist()
        assert sample_rows(logits, asked).tokens.tolist() == expected


def test_prompt_logprobs_over_chunks_and_again() -> None:
    prompt = [4, 9, 2, 2, 17]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4))
    collector = PromptLogprobs(len(prompt), 3)
    # The first chunk runs twice, as after a preemption; the last row is about the first output.
    for start, end in ((0, 2), (0, 2), (2, 5)):
        following = np.array([*prompt, 0][start + 1 : end + 1])
        collector.put(start, prompt_logprobs(logits[start:end], following, 3))
    first, *others = collector.records()
    assert first is None
    assert len(others) == 4
    for place, record in enumerate(others):
        assert record is not None
        check(record, prompt[place + 1], log_softmax(logits[place].numpy()), 3)


def test_a_broken_prompt_row_is_nan_alone() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    rows = prompt_logprobs(logits, np.array([0, 1, 2]), 2)
    assert np.isnan(rows.logprobs).tolist() == [False, True, False]
    assert np.allclose(rows.logprobs[[0, 2]], -np.log(4))


def test_more_than_the_vocabulary_is_refused() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        state_of([Row(SamplingParams(**{name: VOCAB}))], VOCAB)
        with pytest.raises(InvalidRequest, match="at most 30") as caught:
            state_of([Row(SamplingParams(**{name: VOCAB + 1}))], VOCAB)
        assert caught.value.param == name


def test_only_the_first_admission_asks_for_the_prompt() -> None:
    params = SamplingParams(prompt_logprobs=2)
    state = state_of([Row(params), Row(params, output=(4,)), Row()], VOCAB)
    assert state.all_rows.tolist() == [False, True, False, False]
    assert list(state.prompt_logprobs) == [1]
    state.release(1)
    assert not state.all_rows.any() and not state.prompt_logprobs
