"""Draws of logits that lie on a card: the tokens are those of the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.core.rng import KEY_INCREMENT
from headrace.engine import gumbel, weights
from headrace.engine.sampler import SampledTokens, sample
from headrace.engine.uniforms import words
from headrace.ops import noisy_best
from headrace.platforms import Platform
from tests.unit.engine.sampling_rows import state_of
from tests.unit.engine.test_device_sampling import COUNT, KINDS, masks_of, rows_of
from tests.unit.engine.test_gumbel import (
    EXTREMES,
    check_search,
    exact_totals,
    levelled,
    streams_of,
    unmixed,
)

pytestmark = pytest.mark.gpu
ROWS, VOCAB = 200, 129_280
SEARCHES = ["chosen", "plain"]
Search = Callable[..., noisy_best.NoisyBest]


def search_of(name: str) -> Search:
    return noisy_best.noisy_best if name == "chosen" else noisy_best.plain


def random_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Peaked, flat, banned and levelled rows, on the host."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits *= torch.linspace(0, 12, rows)[:, None]
    logits[1::7, 3:] = -torch.inf
    logits[2::7] = 0.0
    logits[3::7, 1::2] = -torch.inf
    return logits


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(ROWS, VOCAB), (1, VOCAB), (33, 1003), (5, 1)])
def test_a_card_draws_what_the_host_draws(
    card: Platform,
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    search: str,
    rehearsed: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    rows = min(rows, 12) if rehearsed else rows
    monkeypatch.setattr(gumbel, "noisy_best", search_of(search))
    temperatures = np.resize([0.3, 1.0, 2.0, 1e-5, 1e3], rows)
    seeds, positions = streams_of(rows, vocab)
    logits = random_logits(rows, vocab, dtype)
    hard = slice(4, None, 50)
    streams = words(seeds, positions)
    logits[hard] = levelled(temperatures[hard], streams[hard], vocab).to(dtype)
    found = gumbel.draw(logits.to(card.device), temperatures, seeds, positions)
    assert found.tolist() == gumbel.draw(logits, temperatures, seeds, positions).tolist()


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_keeps_its_bounds(card: Platform, search: str):
    rows = 6
    temperatures = np.resize([0.3, 1.0, 2.0, 1e-5], rows)
    streams = words(*streams_of(rows))
    logits = random_logits(rows, VOCAB, torch.float32)
    there = logits.to(card.device)
    numbers = [torch.from_numpy(x).to(card.device) for x in (temperatures, streams.view(np.int64))]
    found = search_of(search)(there, there.amax(dim=1), *numbers)
    host = noisy_best.NoisyBest(*(part.cpu() for part in found))
    check_search(host, exact_totals(logits, temperatures, streams))


@pytest.mark.parametrize("search", SEARCHES)
def test_noise_is_within_its_bound_wherever_v_lies(card: Platform, search: str):
    """A card has logarithms of its own."""
    words_ = [(unmixed(bits) - KEY_INCREMENT) % 2**64 for bits in EXTREMES]
    streams = np.array(words_, dtype=np.uint64)
    exact = gumbel.noise(streams, np.zeros(len(streams), dtype=np.int64))
    zeros = torch.zeros(len(streams), 1, device=card.device)
    found = search_of(search)(
        zeros,
        zeros[:, 0],
        torch.ones(len(streams), dtype=torch.float64, device=card.device),
        torch.from_numpy(streams.view(np.int64)).to(card.device),
    )
    assert np.abs(found.totals[:, 0].cpu().double().numpy() - exact).max() < 2e-5


def test_rows_do_not_see_each_other(card: Platform):
    rows = 8
    logits = random_logits(rows, 9001, torch.float32).to(card.device)
    streams = torch.from_numpy(words(*streams_of(rows)).view(np.int64)).to(card.device)
    temperatures = torch.full((rows,), 0.7, dtype=torch.float64, device=card.device)
    arguments = (logits, logits.amax(dim=1), temperatures, streams)
    whole = noisy_best.noisy_best(*arguments)
    for row in range(rows):
        alone = noisy_best.noisy_best(*(argument[row : row + 1] for argument in arguments))
        assert alone.totals.cpu().equal(whole.totals[row : row + 1].cpu())
        assert alone.ids.cpu().equal(whole.ids[row : row + 1].cpu())


@pytest.mark.parametrize("n", [1, 128, 257, 1003, VOCAB])
def test_running_sums_do_not_depend_on_the_number_of_rows(card: Platform, n: int, rehearsed: bool):
    """torch's own do, and those of one row are added up as its parts come."""
    rows = 40
    numbers = torch.rand(rows, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    there = numbers.to(card.device)
    summed = weights._two_level_sums if rehearsed else weights.running_sums
    found = summed(there)
    assert found.cpu().equal(weights._two_level_sums(numbers))
    for count in (1, 2, 7):
        for _ in range(3):
            assert summed(there[:count]).cpu().equal(found[:count].cpu())


@pytest.mark.parametrize("vocab", [1003, VOCAB])
def test_every_kind_of_row_draws_as_on_the_host_and_as_alone(card: Platform, vocab: int):
    """The order of sums and `exp` are the card's, so log probabilities are only close."""
    logits = torch.randn(COUNT, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[7] = logits[7].round()
    state, table, positions = state_of(rows_of(KINDS), vocab), np.arange(1, COUNT + 1), 6
    masks = masks_of(vocab)

    def drawn(there: torch.Tensor, rows: slice, masked: bool) -> SampledTokens:
        chosen = table[rows]
        known = masks if masked else None
        return sample(there[rows], state, chosen, np.full(len(chosen), positions), masks=known)

    there, everyone = logits.to(card.device), slice(0, COUNT)
    for masked in (False, True):
        expected, found = (drawn(x, everyone, masked) for x in (logits, there))
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.logprobs is not None and expected.logprobs is not None
        for place in range(len(expected.logprobs)):
            one, other = (x.record(place) for x in (found.logprobs, expected.logprobs))
            assert one.top_ids == other.top_ids
            assert np.allclose(one.top_logprobs, other.top_logprobs, rtol=1e-11, atol=1e-11)
            assert np.isclose(one.logprob, other.logprob, rtol=1e-11, atol=1e-11)
    found = drawn(there, everyone, False)
    assert found.logprobs is not None
    places = {int(index): place for place, index in enumerate(found.logprobs.index)}
    for row in range(COUNT):
        alone = drawn(there, slice(row, row + 1), False)
        assert alone.tokens[0] == found.tokens[row]
        if alone.logprobs is not None:
            assert alone.logprobs.record(0) == found.logprobs.record(places[row])
