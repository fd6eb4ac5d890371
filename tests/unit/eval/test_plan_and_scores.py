from __future__ import annotations

import pytest

from headrace.eval.english import LENGTHS, TARGETS, Loss, held_out, perplexities
from headrace.eval.families import FAMILIES
from headrace.eval.items import FIRST_TEST_SEED
from headrace.eval.jobs import ENGLISH, EVERYTHING, tasks
from headrace.eval.plan import questions
from headrace.eval.run import Result
from headrace.eval.scores import flat, scores, table

SEED = FIRST_TEST_SEED + 77


@pytest.mark.parametrize("family", FAMILIES)
def test_there_are_as_many_items_as_asked_for(family: str) -> None:
    asked = questions(family, SEED, 30)
    parts = [question.item.part for question in asked]
    counted = parts.count("call") if family == "tools" else len(parts)
    assert counted == 30
    assert {question.item.conversation.thinking for question in asked} == {True, False}


def test_recall_is_asked_at_three_distances_about_different_facts() -> None:
    asked = questions("recall", SEED, 30)
    parts = [question.item.part for question in asked]
    assert {part: parts.count(part) for part in parts} == {"1k": 10, "4k": 10, "8k": 10}
    seeds = {part: {q.seed for q in asked if q.item.part == part} for part in parts}
    assert not seeds["1k"] & seeds["4k"] and not seeds["4k"] & seeds["8k"]


def test_tasks_cover_every_question_once_and_keep_samples_together() -> None:
    todo = tasks(EVERYTHING, SEED, 70)
    for family in FAMILIES:
        asked = questions(family, SEED, 70)
        ranges = sorted((t.first, t.last) for t in todo if t.family == family)
        assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
        assert ranges[-1][1] == len(asked)
        for first, _ in ranges[1:]:
            before, after = asked[first - 1], asked[first]
            assert (before.seed, before.item.part) != (after.seed, after.item.part)
    pieces = [task.first for task in todo if task.family == ENGLISH]
    sources = [source for source, _ in held_out()]
    assert sorted(sources[piece] for piece in pieces) == sorted(set(sources))


def result(
    family: str, part: str, right: bool, thinking: bool = False, valid: bool | None = None
) -> Result:
    return Result(family, part, thinking, SEED, right, valid, "", "", 1, 100)


def test_scores_count_right_and_valid_answers_by_part() -> None:
    found = [
        *[result("tools", "call", True, thinking=True)] * 19,
        result("tools", "call", False),
        result("tools", "answer", False),
        *[result("json", "flat", True, valid=True)] * 3,
        result("json", "nested", False, valid=True),
        *[result("recall", "8k", True)] * 17,
        *[result("recall", "8k", False)] * 3,
    ]
    lines = {(line.family, line.part, line.counted): line for line in scores(found)}
    call = lines["tools", "call", "right"]
    assert (call.items, call.share, call.thinking, call.direct) == (20, 0.95, 1.0, 0.0)
    assert call.passed
    assert lines["json", "all", "valid"].share == 1.0
    assert not lines["json", "all", "right"].passed
    assert lines["recall", "8k", "right"].passed
    assert lines["tools", "answer", "right"].passed  # without a gate
    assert "recall" in table(scores(found), {512: 10.0, 8192: 11.5})
    assert "MISS" in table([], {512: 10.0, 8192: 11.5})


def test_perplexity_is_over_all_pieces_and_flat_within_a_tenth() -> None:
    found = [Loss(length, p, "x", 2.0 * TARGETS + p, TARGETS) for length in LENGTHS for p in (0, 1)]
    shown = perplexities(found)
    assert list(shown) == list(LENGTHS)
    assert shown[512] == pytest.approx(2.718281828 ** (2.0 + 1 / (2 * TARGETS)))
    assert flat({512: 11.0, 8192: 10.0})
    assert not flat({512: 11.1, 8192: 10.0})


def test_every_held_out_piece_is_long_enough() -> None:
    assert len({source for source, _ in held_out()}) >= 4
    assert all(len(text) > 2 * max(LENGTHS) for _, text in held_out())
