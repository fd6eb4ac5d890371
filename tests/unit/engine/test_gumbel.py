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
