"""A request's tokens and logits do not depend on what runs beside it, chunking or preemption.

fp64 with plain caches: equal tokens, logits within 1e-10. fp32 with the batch-invariant operators
and the released quantised caches: bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams

from .conftest import Outcome, Serve, assert_same

EXACT = {"dtype": "float64", "kv_quant": False}
BITWISE = {"dtype": "float32", "kv_quant": True, "batch_invariant": True}
PLAIN_BITWISE = {"dtype": "float32", "kv_quant": False, "batch_invariant": True}
LENGTHS = (1, 2, 9, 33, 64, 150)


def make_requests(count: int, seed: int) -> list[Request]:
    """Prompts of mixed lengths, greedy and sampled in turn."""
    rng = np.random.default_rng(seed)
    out = []
    for number in range(count):
        length = LENGTHS[number % len(LENGTHS)] + number // len(LENGTHS)
        prompt = tuple(int(t) for t in rng.integers(0, 512, size=length))
        params = SamplingParams(
            temperature=0.0 if number % 2 else 1.0,
            top_k=40 if number % 4 == 0 else -1,
            top_p=0.9 if number % 3 == 0 else 1.0,
            seed=1000 + number,
            max_tokens=6 + number % 3,
            ignore_eos=True,
        )
        out.append(Request(f"{seed}-{number}", prompt, params))
    return out


@pytest.fixture(scope="module", params=["exact", "bitwise", "plain_bitwise"])
def mode(request: pytest.FixtureRequest) -> tuple[dict[str, object], float]:
    return {
        "exact": (EXACT, 1e-10),
        "bitwise": (BITWISE, 0.0),
        "plain_bitwise": (PLAIN_BITWISE, 0.0),
    }[request.param]


@pytest.fixture(scope="module")
def alone(mode: tuple[dict[str, object], float], serve: Serve) -> Outcome:
    """Six requests, each the only one of its engine, in whole prefills."""
    settings, _ = mode
    config = EngineConfig(**settings, max_model_len=256, num_blocks=80)
    tokens: dict[str, list[int]] = {}
    logits = {}
    for request in make_requests(6, seed=7):
        outcome = serve(config, [request])
        tokens |= outcome.tokens
        logits |= outcome.logits
    return Outcome(tokens, logits)


def mixed(others: int) -> list[Request]:
    """The six requests in the middle of `others` more."""
    more = make_requests(others, seed=99)
    return more[: others // 2] + make_requests(6, seed=7) + more[others // 2 :]


@pytest.mark.parametrize("others", [2, 7, 32])
def test_inside_batches(mode, alone: Outcome, serve: Serve, others: int) -> None:
    settings, atol = mode
    config = EngineConfig(**settings, max_model_len=256, num_blocks=100, max_num_seqs=38)
    assert_same(serve(config, mixed(others)), alone, atol)


@pytest.mark.parametrize("budget", [7, 16, 33, 130])
def test_chunked_prefill(mode, alone: Outcome, serve: Serve, budget: int) -> None:
    settings, atol = mode
    config = EngineConfig(
        **settings,
        max_model_len=256,
        num_blocks=80,
        max_num_seqs=min(budget, 6),
        max_num_batched_tokens=budget,
    )
    assert_same(serve(config, make_requests(6, seed=7)), alone, atol)


def test_arriving_while_others_run(mode, alone: Outcome, serve: Serve) -> None:
    settings, atol = mode
    config = EngineConfig(**settings, max_model_len=256, num_blocks=80, max_num_batched_tokens=40)
    assert_same(serve(config, mixed(4), arrive_every=2), alone, atol)


def test_preempted(mode, alone: Outcome, serve: Serve) -> None:
    """A pool of four blocks cannot hold the requests at once: some are recomputed."""
    settings, atol = mode
    config = EngineConfig(**settings, max_model_len=256, num_blocks=5, max_num_batched_tokens=64)
    crowd = list(mixed(4))
    assert_same(serve(config, crowd), alone, atol)
