"""Each option of `headrace eval tiny` changes what is computed: counted on the embedded model.

The questions are two about one text of 1,000 tokens, so that the second finds it in the prefix
cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from headrace.assets import embedded_model
from headrace.eval.ablation import Ablation
from headrace.eval.families import draw
from headrace.eval.items import FIRST_TEST_SEED, Draw
from headrace.eval.plan import Question
from headrace.eval.run import EvalOptions, Examiner, PromptWork

SEED = FIRST_TEST_SEED + 3
MERGES = 2 * 9  # attention and experts of each layer
HIT = 768  # of some 1,000 tokens: six blocks, of which the last 135 tokens are kept out


def asked() -> list[Question]:
    items = draw("recall", SEED, Draw(tokens=1000, far=True))
    return [Question(item, SEED) for item in items[:2]]


@dataclass
class Seen:
    """What went through the spied operators. computed_rows: of the engine, in its cache."""

    merged_rows: int = 0
    computed_rows: int = 0
    candidate_blocks: set[int] = field(default_factory=set)
    left_out: int = 0
    random: int = 0
    engram: list[bool] = field(default_factory=list)


def spied(examiner: Examiner) -> Seen:
    """Count at the operators of a loaded model, behind its ablation."""
    seen, ops = Seen(), examiner.model.ops

    def hc_merge(y: Any, streams: Any, *rest: Any) -> Any:
        seen.merged_rows += len(y)
        return ops.hc_merge(y, streams, *rest)

    def candidate_mask(scores: Any, visible: Any, size: int, blocks: int) -> Any:
        mask = ops.candidate_mask(scores, visible, size, blocks)
        seen.candidate_blocks.add(blocks)
        reachable = torch.arange(mask.shape[1]) < visible.unsqueeze(1)
        seen.left_out += int((reachable & ~mask).sum())
        return mask

    def entry_scores(*given: Any) -> Any:
        scores = ops.entry_scores(*given)
        seen_scores = scores[scores > -torch.inf]
        seen.random += bool((seen_scores >= 0).all() and (seen_scores < 1).all())
        return scores

    def engram_add(streams: Any, gate: Any, value: Any) -> Any:
        result = ops.engram_add(streams, gate, value)
        seen.engram.append(not torch.equal(result, streams))
        return result

    examiner.model.ops = replace(
        ops,
        hc_merge=hc_merge,
        candidate_mask=candidate_mask,
        entry_scores=entry_scores,
        engram_add=engram_add,
    )
    return seen


def asked_with(**options: Any) -> tuple[Seen, PromptWork]:
    examiner = Examiner(EvalOptions(embedded_model(), **options))
    seen = spied(examiner)
    results = examiner.ask(asked())
    assert len(results) == 2 and all(result.prompt_tokens > 900 for result in results)
    seen.computed_rows = examiner.engine.stats().computed_tokens
    return seen, examiner.prompt_work()


@pytest.fixture(scope="module")
def default() -> tuple[Seen, PromptWork]:
    return asked_with()


def test_follow_ups_hit_the_prefix_cache_and_replay_a_window(
    default: tuple[Seen, PromptWork],
) -> None:
    seen, work = default
    assert (work.hit, work.replayed) == (HIT, 128)
    assert work.prompt > 2 * 900
    assert seen.candidate_blocks == {32} and seen.left_out > 10_000
    assert seen.random == 0 and all(seen.engram) and seen.engram


def test_exact_replay_hits_as_much_and_replays_more(default: tuple[Seen, PromptWork]) -> None:
    seen, work = asked_with(replay="exact")
    assert (work.hit, work.replayed) == (HIT, 640)
    assert seen.computed_rows == default[0].computed_rows + 640 - 128


def test_without_replay_everything_is_computed_cold(default: tuple[Seen, PromptWork]) -> None:
    seen, work = asked_with(replay="off")
    assert work == replace(default[1], hit=0, replayed=0)
    assert seen.computed_rows == default[0].computed_rows + HIT - 128


def test_without_truncation_all_layers_run_on_all_rows(default: tuple[Seen, PromptWork]) -> None:
    seen, work = asked_with(truncate="off")
    assert work.hit >= HIT
    assert seen.merged_rows == MERGES * seen.computed_rows
    assert default[0].merged_rows < 0.8 * MERGES * default[0].computed_rows


def test_half_of_the_candidates_leave_out_more(default: tuple[Seen, PromptWork]) -> None:
    seen, _ = asked_with(ablation=Ablation.HALF_CANDIDATES)
    assert seen.candidate_blocks == {16}
    assert seen.left_out > default[0].left_out


def test_random_scores_and_no_engram_reach_every_call(default: tuple[Seen, PromptWork]) -> None:
    seen, _ = asked_with(ablation=Ablation.RANDOM_TOP_K)
    assert seen.random >= 6  # three index sources, two prompts
    seen, _ = asked_with(ablation=Ablation.NO_ENGRAM)
    assert seen.engram and not any(seen.engram)
