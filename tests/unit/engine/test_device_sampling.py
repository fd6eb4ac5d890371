"""Sampling, drafts and verification of logits on a device: the host's tokens, few waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.sampling import Coupling, LogprobsMode, SamplingParams
from headrace.engine import edits, weights
from headrace.engine.edits import edited
from headrace.engine.grammar.rows import Masks
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.sampler import sample
from headrace.engine.speculation.verify import VerifyRows, draft_picker, verify
from tests.fake_card import CARD, FakeCard, fake_card
from tests.unit.engine.sampling_rows import Row, state_of

PROCESSED = LogprobsMode.PROCESSED


def drawn(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, **fields})


KINDS = [
    drawn(),
    drawn(seed=1),
    drawn(top_k=5),
    drawn(top_p=0.9, seed=2),
    drawn(top_p=0.7, min_p=0.02, coupling=Coupling.MAXIMAL),
    drawn(top_k=200, top_p=0.99, logprobs=3),
    drawn(logprobs=5, logprobs_mode=PROCESSED, seed=4),
    drawn(temperature=0.0, logprobs=2),
    drawn(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, seed=5),
    drawn(logit_bias={3: 3.0, 5: -100.0}, banned_token_ids=(6, 7), min_tokens=9, seed=6),
    drawn(allowed_token_ids=(8, 9, 10, 11), seed=8, top_p=0.5),
    drawn(min_p=0.5, seed=9),
    drawn(temperature=2.0, top_k=3, logprobs=4, logprobs_mode=PROCESSED),
    drawn(min_tokens=9, stop_token_ids=(8, 9)),
    drawn(temperature=1.7, top_p=0.999),
]
COUNT = len(KINDS)
TABLE = np.arange(1, COUNT + 1)


def rows_of(kinds: list[SamplingParams]) -> list[Row]:
    return [Row(kind, 100 + i, (0, 3, 4), (5, 6, 6)) for i, kind in enumerate(kinds)]


def random_logits(
    rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return logits * torch.linspace(0, 9, rows)[:, None].roll(seed, 0).to(dtype)


def masks_of(vocab: int) -> Masks:
    """Of four rows: random, all, the stop ids of row 13 (and no other id), none."""
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (4, (vocab + 31) // 32))
    words[1], words[2], words[3] = -1, 0, 0
    words[2, 0] = 0x300
    kept = words.astype(np.int32)
    kept.flags.writeable = False  # as masks of states that are known
    return Masks(np.array([1, 4, 13, 14]), kept)


def same(found: LogprobRows | None, expected: LogprobRows | None) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.index.tolist() == expected.index.tolist()
    for place in range(len(expected)):
        assert found.record(place) == expected.record(place)


@pytest.mark.parametrize("at_once", [1, 4, 100])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [33, 1003, 5000])
def test_every_kind_of_row_draws_what_the_host_draws(
    vocab: int, dtype: torch.dtype, masked: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weights, "_NUMBERS_AT_ONCE_ON_DEVICE", at_once * vocab)
    logits = random_logits(COUNT, vocab, 1, dtype)
    logits[0, 5], logits[2] = torch.inf, torch.nan
    logits[7] = logits[7].round()  # ties
    masks = masks_of(vocab) if masked else None
    state = state_of(rows_of(KINDS), vocab)
    positions = np.full(COUNT, 6)
    expected = sample(logits, state, TABLE, positions, masks=masks)
    with fake_card():
        found = sample(logits.to(CARD), state, TABLE, positions, masks=masks)
    assert found.tokens.tolist() == expected.tokens.tolist()
    same(found.logprobs, expected.logprobs)


@pytest.mark.parametrize("vocab", [33, 1003])
def test_drafts_and_verification_are_those_of_the_host(vocab: int):
    state = state_of(rows_of(KINDS), vocab)
    positions, counts = np.full(COUNT, 6), np.full(COUNT, 3)

    def run(device: str) -> tuple[Any, ...]:
        picker = draft_picker(state, TABLE, positions)
        places = []
        for place in range(2):
            logits = random_logits(COUNT, vocab, place)
            logits[6] = torch.nan
            places.append(picker(place, logits.to(device)).cpu().numpy())
        ids = np.stack([*places, np.full(COUNT, -1)], axis=1)
        q = picker.weights
        assert q is not None
        q = torch.cat((q, torch.zeros_like(q[:, :1])), dim=1).flatten(0, 1)
        rows = VerifyRows(TABLE, positions, counts, ids.ravel(), q)
        return ids, verify(random_logits(3 * COUNT, vocab, 5).to(device), state, rows)

    expected_ids, expected = run("cpu")
    with fake_card():
        ids, found = run(CARD)
    assert np.array_equal(ids, expected_ids)
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.accepted, expected.accepted)
    assert np.array_equal(found.agreement, expected.agreement, equal_nan=True)
    same(found.logprobs, expected.logprobs)


def waits(card: FakeCard, logits: torch.Tensor, kinds: list[SamplingParams]) -> list[str]:
    state = state_of(rows_of(kinds), logits.shape[1])
    there = logits.to(CARD)
    card.reads.clear()
    card.sizes.clear()
    sample(there, state, np.arange(1, len(kinds) + 1), np.full(len(kinds), 6))
    return card.reads


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (drawn(temperature=0.0), 1),
        (drawn(temperature=0.0, repetition_penalty=1.2, min_tokens=9), 1),
        (drawn(seed=1), 2),
        (drawn(), 2),
        (drawn(seed=1, top_p=0.9), 3),  # whether the 128 best were enough
        (drawn(top_p=0.9), 3),
        (drawn(logprobs=0), 3),
    ],
)
def test_waits_do_not_grow_with_the_rows_and_little_is_copied(kind: SamplingParams, expected: int):
    logits = torch.randn(24, 5000, generator=torch.Generator().manual_seed(4)) * 6
    with fake_card() as card:
        for count in (1, 24):
            found = waits(card, logits[:count], [kind] * count)
            assert found == ["aten::_to_copy"] * expected
            assert max(card.sizes) < 30 * count  # nothing as wide as the vocabulary


def test_masks_of_a_step_leave_in_one_piece():
    """A device expands the bits itself, and nobody asks it whether something is left."""
    vocab = 70
    state = state_of(rows_of(KINDS), vocab)
    logits = random_logits(COUNT, vocab, 3)
    arguments = (state, TABLE, np.full(COUNT, 6))
    expected = edited(logits, *arguments, masks=masks_of(vocab))
    assert torch.isfinite(expected[13]).sum() == 2  # min_tokens yields
    with fake_card() as card:
        there = logits.to(CARD)
        card.reads.clear()
        found = edited(there, *arguments, masks=masks_of(vocab))
        assert not card.reads
        assert found.cpu().equal(expected)
    assert edits.rows_at_once(logits) > COUNT


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 1000, 129_280])
def test_two_level_sums(n: int):
    """In the order that is promised: never falling, and flat where nothing is added."""
    numbers = torch.rand(5, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    numbers[1] = 0.0
    numbers[2, n // 3 : 2 * n // 3 + 1] = 0.0
    numbers[3] *= 2.0 ** torch.arange(n).remainder(60).double()
    found = weights._two_level_sums(numbers)
    assert found.is_contiguous() and found.shape == numbers.shape
    tile = weights._TILE
    for row, sums in zip(numbers.numpy(), found.numpy(), strict=True):
        before, expected = 0.0, []
        for start in range(0, n, tile):
            inside = np.add.accumulate(row[start : start + tile])
            expected.append(inside + before if start else inside)
            before += inside[-1]
        assert np.array_equal(sums, np.concatenate(expected))
        assert (np.diff(sums) >= 0).all() and (np.diff(sums)[row[1:] == 0] == 0).all()
    for row in range(5):
        assert weights._two_level_sums(numbers[row : row + 1]).equal(found[row : row + 1])


def test_no_rows_of_a_device():
    with fake_card():
        none = torch.zeros(0, 9, device=CARD)
        state = state_of(rows_of(KINDS), 40)
        index = np.zeros(0, dtype=np.int64)
        assert not len(sample(none, state, index, index).tokens)
