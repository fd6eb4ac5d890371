from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headrace.eval.families import FAMILIES, draw
from headrace.eval.families.arithmetic import add_steps, subtract_steps
from headrace.eval.items import FIRST_TEST_SEED, Draw, Item, Reply
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.conversation import AssistantMessage
from headrace.recipe.render.v41 import render

SEEDS = range(FIRST_TEST_SEED, FIRST_TEST_SEED + 60)


def items_of(family: str, **options: object) -> list[Item]:
    options = {"tokens": 300, **options}
    return [item for seed in SEEDS for item in draw(family, seed, Draw(**options))]  # type: ignore[arg-type]


def reply_of(answer: AssistantMessage) -> Reply:
    calls = tuple((call.name, json.loads(call.arguments)) for call in answer.tool_calls or ())
    return Reply(answer.content, calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_expected_answer_is_right(family: str) -> None:
    for thinking in (False, True):
        for item in items_of(family, thinking=thinking):
            reply = reply_of(item.answer)
            assert item.check(reply)
            assert item.valid is None or item.valid(reply)
            assert (item.answer.reasoning_content is not None) == thinking
            assert item.family == family


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_to_another_question_is_wrong(family: str) -> None:
    items = items_of(family)
    answers = [item.answer for item in items]
    for item, other in zip(items, [*answers[1:], answers[0]], strict=True):
        if reply_of(other) != reply_of(item.answer):
            assert not item.check(reply_of(other))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_or_empty_answer_is_wrong(family: str) -> None:
    for item in items_of(family):
        reply = reply_of(item.answer)
        assert not item.check(Reply(""))
        assert not item.check(Reply(reply.content[:-1], reply.calls[:-1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_the_same_sample_and_another_seed_another_one(family: str) -> None:
    options = Draw(thinking=True, tokens=400)
    shown = [[_shown(item) for item in draw(family, seed, options)] for seed in SEEDS]
    assert shown == [[_shown(item) for item in draw(family, seed, options)] for seed in SEEDS]
    assert len({str(sample) for sample in shown}) > len(SEEDS) * 0.6


def test_the_same_seed_draws_independently_by_family() -> None:
    first = [draw("copying", seed, Draw())[0].answer.content for seed in SEEDS]
    assert not set(first) & {draw("sorting", seed, Draw())[0].answer.content for seed in SEEDS}


def test_a_number_is_no_boolean_and_a_text_no_number_in_calls() -> None:
    found = 0
    for item in items_of("tools"):
        calls = reply_of(item.answer).calls
        for place, (name, arguments) in enumerate(calls):
            for key, value in arguments.items():
                wrong = str(value) if not isinstance(value, (str, bool)) else 1
                changed = (*calls[:place], (name, {**arguments, key: wrong}), *calls[place + 1 :])
                assert not item.check(Reply("", changed))
                found += 1
            assert not item.check(Reply("", (*calls[:place], (name + "x", arguments))))
    assert found > 50


def test_calls_may_give_arguments_in_any_order() -> None:
    turned = 0
    for item in items_of("tools"):
        calls = reply_of(item.answer).calls
        reversed_calls = tuple((name, dict(reversed(a.items()))) for name, a in calls)
        turned += any(len(a) > 1 for _, a in calls)
        if calls:
            assert item.check(Reply("", reversed_calls))
    assert turned > 10


def test_json_may_be_valid_and_wrong_and_must_be_an_object_of_the_schema() -> None:
    for item in items_of("json"):
        value = json.loads(item.answer.content)
        key, old = next(iter(value.items()))
        assert item.valid is not None
        assert not item.valid(Reply(json.dumps({**value, "surplus": 1})))
        assert not item.valid(Reply(json.dumps({**value, key: None})))
        assert not item.valid(Reply(item.answer.content[:-1]))
        assert not item.valid(Reply("[]"))
        if isinstance(old, bool):
            other = Reply(json.dumps({**value, key: not old}))
            assert item.valid(other) and not item.check(other)
        # A number that is 1 is not true.
        if old is True:
            assert not item.check(Reply(json.dumps({**value, key: 1})))
        assert item.check(Reply(json.dumps(dict(reversed(value.items())), indent=1)))


def test_steps_of_arithmetic_end_in_the_result() -> None:
    assert add_steps(347, 85) == "347 + 85: 7+5+0=12, 4+8+1=13, 3+0+1=4. So 432."
    assert subtract_steps(402, 15) == "402 - 15: 2-5-0=7 borrow, 0-1-1=8 borrow, 4-0-1=3. So 387."
    assert subtract_steps(15, 402).endswith("So 387, negated -387.")


def test_a_negative_difference_keeps_its_sign() -> None:
    seeds = range(FIRST_TEST_SEED, FIRST_TEST_SEED + 300)
    items = [draw("arithmetic", seed, Draw())[0] for seed in seeds]
    negative = [item for item in items if item.answer.content.startswith("-")]
    assert negative
    assert all(not item.check(Reply(item.answer.content[1:])) for item in negative)


def test_sorted_answers_hold_the_same_items() -> None:
    for item in items_of("sorting"):
        question = item.conversation.messages[-1].content.shown("")  # type: ignore[union-attr]
        assert all(word in question for word in item.answer.content.split(", "))
        assert 3 <= len(item.answer.content.split(", ")) <= 8


def test_counts_are_those_of_the_list() -> None:
    for item in items_of("counting"):
        text = item.conversation.messages[-1].content.shown("")  # type: ignore[union-attr]
        words = [word.strip(" ?.:") for word in text.split(",")]
        words[0] = words[0].split()[-1]
        if item.part == "items":
            assert item.answer.content == str(len(words))


def test_far_facts_stand_at_the_far_end() -> None:
    for item in items_of("recall", far=True, tokens=2000):
        text = item.conversation.messages
        whole = "".join(m.content.shown("") for m in text if hasattr(m.content, "shown"))
        assert item.answer.content in whole[: len(whole) // 4]


@pytest.mark.parametrize("tokens", [300, 1000, 4000])
def test_texts_have_the_length_that_was_asked_for(tokens: int) -> None:
    for seed in list(SEEDS)[:5]:
        item = draw("recall", seed, Draw(tokens=tokens, far=True))[0]
        length = len(render(item.conversation, SpecialTokens()).text)
        assert abs(length - tokens * 4.28) < 500
        assert item.part == f"{max(1, round(tokens / 1000))}k"


def _shown(item: Item) -> tuple[str, AssistantMessage, str]:
    conversation = replace(item.conversation)
    return render(conversation, SpecialTokens()).text, item.answer, item.part
