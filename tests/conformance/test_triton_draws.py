"""The Triton search of draws in Triton's interpreter: run it with TRITON_INTERPRET=1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.rng import KEY_INCREMENT
from headrace.engine import gumbel
from headrace.engine.uniforms import words
from tests.unit.engine.test_gumbel import (
    EXTREMES,
    FOUR,
    check_search,
    exact_totals,
    levelled,
    plain,
    streams_of,
    unmixed,
)

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from headrace.ops.triton.noisy_best import noisy_best  # noqa: E402

# The interpreter's own, with NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
VOCABS = [1, 2, 9, 1003, 4096, 4097, 129_280]


def as_words(streams: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(streams.view(np.int64))


def test_noise_is_within_its_bound_wherever_v_lies():
    words_ = [unmixed(bits) - KEY_INCREMENT for bits in EXTREMES]  # id 0 adds the increment
    streams = np.array([word % 2**64 for word in words_], dtype=np.uint64)
    exact = gumbel.noise(streams, np.zeros(len(streams), dtype=np.int64))
    assert exact.min() < -3.5 and exact.max() > 36.7
    rows = len(streams)
    ones = torch.ones(rows, dtype=torch.float64)
    found = noisy_best(torch.zeros(rows, 1), torch.zeros(rows), ones, as_words(streams))
    assert np.abs(found.totals[:, 0].double().numpy() - exact).max() < 1e-5
    assert found.rest.eq(-torch.inf).all() and not found.ids.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spread", [0.0, 3.0, 1e30])
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_search_keeps_its_bounds(vocab: int, spread: float, dtype: torch.dtype):
    rows = 5 if vocab < 10_000 else 2
    temperatures = np.resize([0.3, 1.0, 2.0, 1e3, 1e-5], rows)
    streams = words(*streams_of(rows, vocab))
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits *= spread
    if vocab > 2:
        logits[:, 2] = -torch.inf
    wide = torch.full((rows, vocab + 3), torch.nan, dtype=dtype)  # rows that are not side by side
    wide[:, :vocab] = logits
    found = noisy_best(
        wide[:, :vocab], logits.amax(dim=1), torch.from_numpy(temperatures), as_words(streams)
    )
    check_search(found, exact_totals(logits, temperatures, streams))


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_equal_those_of_the_host(vocab: int, monkeypatch: pytest.MonkeyPatch):
    """Flat, banned, cold and hot rows, and those whose totals are all but equal."""
    monkeypatch.setattr(gumbel, "noisy_best", noisy_best)
    rows = 12 if vocab < 10_000 else 7
    temperatures = np.resize([*FOUR, 1e6, 1e-20], rows)
    seeds, positions = streams_of(rows, vocab)
    streams = words(seeds, positions)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[1] = 0.0
    logits[2, 1:] = -torch.inf
    logits[3] = levelled(temperatures, streams, vocab)[3].float()
    found = gumbel._drawn_on_device(logits, temperatures, streams)
    assert found.tolist() == gumbel.draw(logits, temperatures, seeds, positions).tolist()
    if vocab < 10_000:
        assert found.tolist() == plain(logits, temperatures, streams)


def test_rows_do_not_see_each_other():
    streams = as_words(words(*streams_of(4)))
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3))
    arguments = (logits, logits.amax(dim=1), torch.full((4,), 0.7, dtype=torch.float64), streams)
    whole = noisy_best(*arguments)
    for row in range(4):
        alone = noisy_best(*(argument[row : row + 1] for argument in arguments))
        for found, expected in zip(alone, whole, strict=True):
            assert found.equal(expected[row : row + 1])


def test_no_rows():
    none = torch.zeros(0, dtype=torch.float64)
    found = noisy_best(torch.zeros(0, 9), none.float(), none, none.to(torch.int64))
    assert found.totals.shape == found.ids.shape == (0, 3) and found.rest.shape == (0,)
