"""Draws with Gumbel noise: the noise itself, and that no id is overlooked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import rng
from headrace.engine import gumbel
from headrace.engine.uniforms import draft_seeds, words
from headrace.ops import noisy_best
from tests.fake_card import CARD, fake_card


def streams_of(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Seeds and positions of `count` rows."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 2**64, count, dtype=np.uint64), generator.integers(0, 2**40, count)


def plain(logits: torch.Tensor, temperatures: np.ndarray, streams: np.ndarray) -> list[int]:
    """The definition, over every id, in fp64."""
    scaled = logits.double().numpy() / temperatures[:, None]
    rows, vocab = scaled.shape
    ids = np.tile(np.arange(vocab), rows)
    noise = gumbel.noise(np.repeat(streams, vocab), ids).reshape(rows, vocab)
    return ((scaled - scaled.max(axis=1, keepdims=True)) + noise).argmax(axis=1).tolist()


def test_noise_is_that_of_core() -> None:
    seeds, positions = streams_of(400)
    ids = np.random.default_rng(1).integers(0, 2**18, 400)
    expected = [
        rng.gumbel(int(seed), int(position), int(token))
        for seed, position, token in zip(seeds, positions, ids, strict=True)
    ]
    assert np.allclose(gumbel.noise(words(seeds, positions), ids), expected, rtol=1e-14, atol=1e-15)
    anchors = [rng.draft_seed(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert draft_seeds(seeds, positions).tolist() == anchors


def test_pinned_numbers() -> None:
    """A stream must never change: users keep seeds."""
    assert rng.gumbel(0, 0, 0) == pytest.approx(-1.4262072008610982, abs=1e-14)
    assert rng.gumbel(1234, 17, 129279) == pytest.approx(0.8584497180372626, abs=1e-14)
    assert rng.draft_seed(1234, 17) == 17141574186296108698


def test_noise_has_the_gumbel_distribution() -> None:
    seeds, positions = streams_of(1)
    noise = np.sort(gumbel.noise(np.repeat(words(seeds, positions), 50_000), np.arange(50_000)))
    distribution = np.exp(-np.exp(-noise))
    distance = np.abs(distribution - (np.arange(50_000) + 0.5) / 50_000).max()
    assert distance < 2.2 / math.sqrt(50_000)  # Kolmogorov-Smirnov, p = 1e-4


def test_noise_is_the_same_bits_at_any_place() -> None:
    seeds, positions = streams_of(67)
    streams, ids = words(seeds, positions), np.arange(67) * 31
    whole = gumbel.noise(streams, ids)
    for start in range(67):
        for end in (start + 1, start + 7, 67):
            assert np.array_equal(
                gumbel.noise(streams[start:end], ids[start:end]), whole[start:end]
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 3, 64, 1003, 40_000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_draw_equals_the_definition(vocab: int, spread: float, dtype: torch.dtype) -> None:
    rows = 300 if vocab < 1000 else 12
    seeds, positions = streams_of(rows, vocab)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits = logits * spread
    if vocab > 2:
        logits[:, 2] = -torch.inf
    temperatures = np.resize([1e-5, 0.3, 1.0, 2.0], rows)
    streams = words(seeds, positions)
    expected = plain(logits, temperatures, streams)
    assert gumbel.draw(logits, temperatures, seeds, positions).tolist() == expected
    kept = np.flatnonzero(np.isfinite(logits.numpy()))
    owners, ids = np.divmod(kept, vocab)
    among = gumbel.draw_among(logits, temperatures, seeds, positions, owners, ids)
    assert among.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_others(data: st.DataObject) -> None:
    seeds, positions = streams_of(9, 5)
    logits = torch.randn(9, 33, generator=torch.Generator().manual_seed(5)) * 2
    temperatures = np.linspace(0.2, 2.0, 9)
    whole = gumbel.draw(logits, temperatures, seeds, positions)
    order = np.array(data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=12)))
    part = gumbel.draw(logits[order], temperatures[order], seeds[order], positions[order])
    assert part.tolist() == whole[order].tolist()


def test_ties_take_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "noise", lambda streams, ids: np.zeros(len(ids)))
    monkeypatch.setattr(gumbel._Search, "_loss", lambda self, streams, n: np.zeros((1, n)))
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    seeds, positions = streams_of(1)
    assert gumbel.draw(logits, np.ones(1), seeds, positions).tolist() == [1]


@pytest.mark.parametrize("bits", [0, 1, 2, 2**11, 2**12, 2**13, 2**20, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("rival", [0.0, 30.0, 36.0, 36.5, 37.0, 40.0])
def test_extreme_noise_is_not_overlooked(
    bits: int, rival: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One id with the smallest and largest numbers, against another that is `rival` better."""
    word = unmixed(bits) - 6 * rng.KEY_INCREMENT
    stream = np.array([word % 2**64], dtype=np.uint64)
    assert gumbel.mixed(stream + np.uint64(6 * rng.KEY_INCREMENT % 2**64)) == bits
    monkeypatch.setattr(gumbel, "words", lambda seeds, positions: stream)
    logits = torch.full((1, 40), -50.0)
    logits[0, [5, 9]] = torch.tensor([0.0, rival])
    noise = gumbel.noise(np.repeat(stream, 40), np.arange(40))
    assert np.isfinite(noise).all() and noise.min() > -3.7 and noise.max() < 36.8
    seeds, positions = streams_of(1)
    expected = plain(logits, np.ones(1), stream)
    assert gumbel.draw(logits, np.ones(1), seeds, positions).tolist() == expected
    assert gumbel._drawn_on_device(logits, np.ones(1), stream).tolist() == expected


def unmixed(value: int) -> int:
    """Inverse of `rng.mix64`."""
    mask = 2**64 - 1

    def undo(z: int, shift: int) -> int:
        found = z
        for _ in range(64 // shift + 1):
            found = z ^ (found >> shift)
        return found

    z = undo(value, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
    z = undo(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return undo(z, 30)


def test_rough_noise_is_within_its_bounds() -> None:
    """As `_Search` relies on: at most 0.3 too low and 0.9 too high below the highest numbers."""
    vocab = 200_000
    streams = words(*streams_of(3, 9))
    rough = -gumbel._Search(3, vocab)._loss(streams, vocab)
    exact = gumbel.noise(np.repeat(streams, vocab), np.tile(np.arange(vocab), 3)).reshape(3, vocab)
    assert (rough - exact).min() > -0.3 and (rough - exact).max() < 0.9


# --- logits of a device -----------------------------------------------------------------------

# What `rng.mix64` gives where v is near 0, near 1 and on both sides of the middle.
EXTREMES = [
    *(bits for power in range(65) for bits in (2**power - 1, 2**power) if bits < 2**64),
    *(2**64 - 1 - bits for power in range(63) for bits in (2**power - 1, 2**power)),
    *(2**63 + bits for bits in (-(2**13), -(2**12), -1, 1, 2**12, 2**13)),
]
FOUR = [1e-5, 0.3, 1.0, 2.0]


def levelled(temperatures: np.ndarray, streams: np.ndarray, vocab: int) -> torch.Tensor:
    """Logits fp64 whose noise cancels them: all totals of a row are equal but for rounding."""
    rows = len(streams)
    noise = gumbel.noise(np.repeat(streams, vocab), np.tile(np.arange(vocab), rows))
    return torch.from_numpy(-noise.reshape(rows, vocab) * temperatures[:, None])


def exact_totals(logits: torch.Tensor, temperatures: np.ndarray, streams: np.ndarray) -> np.ndarray:
    rows, vocab = logits.shape
    scaled = logits.double().numpy() / temperatures[:, None]
    noise = gumbel.noise(np.repeat(streams, vocab), np.tile(np.arange(vocab), rows))
    return scaled - scaled.max(axis=1, keepdims=True) + noise.reshape(rows, vocab)


def check_search(search: noisy_best.NoisyBest, totals: np.ndarray) -> None:
    """What a search lists is within ERROR of the exact totals, and `rest` bounds the others."""
    listed, ids, rest = search.totals.cpu().numpy(), search.ids.cpu().numpy(), search.rest
    assert ids.min() >= 0 and ids.max() < totals.shape[1]
    exact = np.take_along_axis(totals, ids, axis=1)
    there = np.isfinite(listed)
    matter = there & (exact > totals.max(axis=1, keepdims=True) - 45)
    assert np.abs(listed[matter] - exact[matter]).max() < noisy_best.ERROR
    for row, known in enumerate(ids):
        others = np.delete(totals[row], known[there[row]])
        bound = max(float(rest[row]), totals[row].max() - 45)
        assert not len(others) or others.max() <= bound + noisy_best.ERROR
        assert len(set(known[there[row]].tolist())) == there[row].sum()


def test_the_noise_of_a_search_is_within_its_bound_wherever_v_lies() -> None:
    words_ = np.array([unmixed(bits) for bits in EXTREMES], dtype=np.uint64)
    bits = gumbel.mixed(words_)
    assert bits.tolist() == EXTREMES
    v = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    exact = -np.log(-np.log1p(-v))
    assert exact.min() < -3.5 and exact.max() > 36.7
    found = -noisy_best._loss(torch.from_numpy(words_.view(np.int64))).double().numpy()
    assert np.abs(found - exact).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 3, 8, 9, 1003, 129_280])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e30])
def test_a_search_keeps_its_bounds(vocab: int, spread: float, dtype: torch.dtype) -> None:
    rows = 40 if vocab < 1000 else 4
    temperatures = np.resize([*FOUR[1:], 1e3, 1e-5], rows)
    streams = words(*streams_of(rows, vocab))
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits *= spread
    if vocab > 2:
        logits[:, 2] = -torch.inf
    arguments = torch.from_numpy(temperatures), torch.from_numpy(streams.view(np.int64))
    found = noisy_best.plain(logits, logits.amax(dim=1), *arguments)
    check_search(found, exact_totals(logits, temperatures, streams))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 3, 8, 9, 64, 1003, 129_280])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_a_device_draws_what_the_host_draws(vocab: int, spread: float, dtype: torch.dtype) -> None:
    rows = 300 if vocab < 1000 else 8
    seeds, positions = streams_of(rows, vocab)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits = logits * spread
    if vocab > 2:
        logits[:, 2] = -torch.inf
        logits[: rows // 2, vocab // 2 :] = -torch.inf  # most are banned
    temperatures = np.resize([*FOUR, 1e6, 1e-20], rows)
    expected = gumbel.draw(logits, temperatures, seeds, positions).tolist()
    with fake_card():
        found = gumbel.draw(logits.to(CARD), temperatures, seeds, positions)
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 9, 1003, 20_000])
def test_a_row_that_candidates_do_not_decide_is_searched_on_the_host(
    vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Totals that differ in their last bits only, beside rows with one candidate and with two."""
    temperatures = np.resize(FOUR[1:], 6)
    streams = words(*streams_of(6, vocab))
    logits = levelled(temperatures, streams, vocab).to(dtype)
    logits[4] = torch.linspace(0, 9, vocab)
    logits[5, 2:] = -torch.inf
    whole: list[int] = []
    on_host = gumbel._drawn_on_host

    def counted(values: np.ndarray, *others: np.ndarray) -> np.ndarray:
        whole.append(len(values))
        return on_host(values, *others)

    monkeypatch.setattr(gumbel, "_drawn_on_host", counted)
    found = gumbel._drawn_on_device(logits, temperatures, streams)
    assert found.tolist() == plain(logits, temperatures, streams)
    assert whole == ([4] if vocab > 8 else [])


def test_an_id_that_a_search_does_not_list_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that lists too little and says so."""

    def lists_the_last(logits: torch.Tensor, *_: torch.Tensor) -> noisy_best.NoisyBest:
        ids = torch.full((len(logits), 1), logits.shape[1] - 1)
        return noisy_best.NoisyBest(torch.zeros(ids.shape), ids, torch.zeros(len(logits)))

    monkeypatch.setattr(gumbel, "noisy_best", lists_the_last)
    streams = words(*streams_of(5))
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    found = gumbel._drawn_on_device(logits, np.ones(5), streams)
    assert found.tolist() == plain(logits, np.ones(5), streams)


def test_ties_on_a_device_take_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "noise", lambda streams, ids: np.zeros(len(ids)))
    monkeypatch.setattr(noisy_best, "_loss", lambda words: torch.zeros(words.shape))
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [5.0, 3.0, 5.0, 5.0]])
    found = gumbel._drawn_on_device(logits, np.ones(2), words(*streams_of(2)))
    assert found.tolist() == [1, 0]


def test_a_draw_on_a_device_waits_once_and_copies_a_few_numbers() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(2))
    seeds, positions = streams_of(6)
    with fake_card() as card:
        there = logits.to(CARD)
        card.reads.clear()
        card.sizes.clear()
        gumbel.draw(there, np.ones(6), seeds, positions)
        assert card.reads == ["aten::_to_copy"]
        assert card.sizes[0] < 6 * 30
