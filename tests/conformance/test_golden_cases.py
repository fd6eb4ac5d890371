"""The golden cases: all checks of `headrace check model` pass, and deliberate errors fail them.

The errors are those of tests/golden/model/README.md section 1, whose measured size is known: a
check that passed in spite of one of them would prove nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.check.case import GoldenCase, run_case
from headrace.check.model import FP32, Result, check_case, chunking_results
from headrace.model.deepseek.model import Model
from headrace.ops.reference.indexer import candidate_mask
from headrace.ops.reference.moe import expert_mlp

# `headrace check model` feeds all 300; these cover both long prefills and every ring's wrap.
CHUNKED_TOKENS = 176
CASES = ("v41_dims", "v41_a", "v41_fp8", "v41_smooth", "v4_tiny")
GoldenDir = Callable[[str], Path]


def check(results: Iterator[Result]) -> list[Result]:
    """All results; every one that failed is in the message, with its numbers."""
    found = list(results)
    failed = [
        f"{r.case}: {r.check}: {r.error:.6g}, gate {'>=' if r.at_least else '<='} {r.gate:.6g}"
        for r in found
        if not r.passed
    ]
    assert not failed, "\n".join(failed)
    return found


# The slow halves first, and apart from each other, so that parallel workers end together.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_do_not_depend_on_chunking(golden_model_dir: GoldenDir, name: str):
    """Teacher-forced decode and chunks of all sizes equal one prefill (fp64, 1e-10)."""
    found = check(chunking_results(GoldenCase.open(golden_model_dir(name)), tokens=CHUNKED_TOKENS))
    assert len(found) == 8  # prefills of 1, 150, 151 tokens; chunks of 1, 2, 3, 7, 64, 128
    assert {r.gate for r in found} == {1e-10}


# What a case must have been checked for: one check of each group that it has data for.
EXPECTED_CHECKS = {
    "v41_a": ["probe_stream_out", "top-k topk_L6", "engram rows layer 3", "drafts: token ids"],
    "v41_fp8": ["released path mean KL", "drafts, kvq: logits", "greedy tokens"],
    "v41_dims": ["released path argmax", "drafts: confidence", "engram gate layer 1"],
    "v41_smooth": ["bf16 worst KL", "kvq positions within 5e-3", "engram token map"],
    "v4_tiny": ["fp32 logits", "fp64 logits"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_golden_case(golden_model_dir: GoldenDir, name: str):
    """Every other check: fp64, fp32, KV quantised, bf16, released path, drafts, tokens."""
    found = check(check_case(GoldenCase.open(golden_model_dir(name)), quick=True))
    assert set(EXPECTED_CHECKS[name]) <= {r.check for r in found}
    fp32 = next(r for r in found if r.check == "fp32 logits")
    assert fp32.gate == (1e-4 if name == "v4_tiny" else 2e-5)


# --- deliberate errors ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """What is done wrong, on a case where it is known to show; `size`: its known max abs error."""

    size: float
    ops: Callable[[Any], dict[str, Any]] = lambda ops: {}
    spec: Callable[[Any], dict[str, Any]] = lambda spec: {}
    model: Callable[[Model], dict[str, Any]] = lambda model: {}


def without_newest_block(scores: Tensor, visible: Tensor, block: int, keep: int) -> Tensor:
    """The best blocks, whichever they are: the forced one is moved out of the way."""
    moved = torch.nn.functional.pad(scores, (0, block), value=-torch.inf)
    far = torch.full_like(visible, moved.shape[-1])
    return candidate_mask(moved, far, block, keep + 1)[:, : scores.shape[-1]]


def with_sink(
    attention: Callable[..., Tensor], change: Callable[[Tensor, float], Tensor]
) -> Callable[..., Tensor]:
    """Attention that takes change(sink, scale) for its sink."""

    def wrong(*args: Any) -> Tensor:
        *others, sink, scale = args
        return attention(*others, change(sink, scale), scale)

    return wrong


def no_sink(sink: Tensor, scale: float) -> Tensor:
    return torch.full_like(sink, -math.inf)


def scaled_sink(sink: Tensor, scale: float) -> Tensor:
    return sink * scale


def no_inverse(rope: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, turn, inverse: x if inverse else rope(x, turn, inverse)


def unclamped_shared(moe: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The difference that an unlimited shared expert makes is added afterwards."""

    def wrong(x: Tensor, *args: Any) -> Tensor:
        *_, shared13, shared2, limit, group = args
        shared = (*shared13.chunk(2), shared2, None)
        free, limited = (expert_mlp(x, *shared, size, group) for size in (math.inf, limit))
        return moe(x, *args) + free - limited

    return wrong


def mean_pooled(rows: Tensor, tokens: Tensor, ape: Tensor | None, overlap: bool) -> Tensor:
    return rows[tokens].chunk(2, dim=-1)[0].mean(1)


MISTAKES = {
    "comb not transposed": Mistake(
        0.62, lambda o: {"hc_merge": lambda y, s, post, c: o.hc_merge(y, s, post, c.mT)}
    ),
    "hc pre not shifted": Mistake(1.05, spec=lambda s: {"hc_shifted": False}),
    "1 Sinkhorn iteration": Mistake(0.88, spec=lambda s: {"hc_iters": 1}),
    "no sink": Mistake(1.1, lambda o: {"sparse_attention": with_sink(o.sparse_attention, no_sink)}),
    "sink scaled like a score": Mistake(
        1.1, lambda o: {"sparse_attention": with_sink(o.sparse_attention, scaled_sink)}
    ),
    "no inverse RoPE on output": Mistake(1.8, lambda o: {"rope": no_inverse(o.rope)}),
    "no YaRN": Mistake(1.5, spec=lambda s: {"yarn": None}),
    "one theta for all": Mistake(
        2.2, spec=lambda s: {"compress_rope_theta": s.rope_theta, "yarn": None}
    ),
    "engram off": Mistake(2.8, lambda o: {"engram_add": lambda streams, gate, value: streams}),
    "engram pad id wrong": Mistake(2.6, model=lambda m: {"_pad": 0}),
    "window one short": Mistake(1.3, spec=lambda s: {"window": s.window - 1}),
    "index_topk one short": Mistake(1.7, spec=lambda s: {"index_topk": s.index_topk - 1}),
    "no candidate filter": Mistake(
        1.0, lambda o: {"candidate_mask": lambda s, *rest: torch.ones_like(s, dtype=torch.bool)}
    ),
    "newest block not pinned": Mistake(0.8, lambda o: {"candidate_mask": without_newest_block}),
    "index scores with wrong head weights": Mistake(
        1.8, lambda o: {"entry_scores": lambda q, w, *rest: o.entry_scores(q, w.roll(1, -1), *rest)}
    ),
    "mean instead of gated pooling": Mistake(1.6, lambda o: {"pool_entries": mean_pooled}),
    "no selection bias": Mistake(
        2.2,
        lambda o: {
            "router": lambda x, gate, bias, *rest: o.router(x, gate, torch.zeros_like(bias), *rest)
        },
    ),
    "no routed scaling": Mistake(1.2, spec=lambda s: {"routed_scaling": 1.0}),
    "weights not normalised": Mistake(4.5, spec=lambda s: {"norm_topk_prob": False}),
    "shared expert unclamped": Mistake(2.2, lambda o: {"moe": unclamped_shared(o.moe)}),
    "wo_a groups rotated": Mistake(
        2.6,
        lambda o: {
            "grouped_projection": lambda x, w, n: o.grouped_projection(
                x, w.roll(w.shape[0] // n, 0), n
            )
        },
    ),
}


@pytest.fixture(scope="module")
def right(golden_model_dir: GoldenDir) -> tuple[GoldenCase, Model]:
    case = GoldenCase.open(golden_model_dir("v41_a"))
    return case, case.load(FP32)


def worst_logit(case: GoldenCase, model: Model) -> float:
    return float(np.abs(run_case(case, model) - case.expected["logits"]).max())


def test_the_model_without_a_mistake_passes(right: tuple[GoldenCase, Model]):
    assert worst_logit(*right) <= 2e-5


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistake_fails_the_check(right: tuple[GoldenCase, Model], name: str):
    """By as much as it is known to: the gate is 2e-5, the smallest of these errors 0.15."""
    case, model = right
    mistake = MISTAKES[name]
    wrong = copy.copy(model)
    wrong.ops = replace(model.ops, **mistake.ops(model.ops))
    wrong.spec = replace(model.spec, **mistake.spec(model.spec))
    for attribute, value in mistake.model(model).items():
        setattr(wrong, attribute, value)
    found = worst_logit(case, wrong)
    assert found > 0.15
    assert found == pytest.approx(mistake.size, abs=0.1)
