"""A short soak by steps: the same functions as the ten minutes of `bench/soak.py`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.output import FinishReason, TokenChunk, TokenLogprobs
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.load import numerics_of
from headrace.model.loader import load_model
from headrace.recipe.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import soak
from soak_answers import Answer, Ledger, difference, repeated_share
from soak_load import Amount

STEPS = 50
CHECKED = 6
SEED = 3
FEW = Amount(
    in_flight=8,
    burst=18,
    rates=(0.3, 1.0),
    long_output=40,
    aborts=0.06,
    preemptions=0.06,
    writers=0.2,
)


@pytest.mark.slow
def test_a_random_load_loses_nothing_and_changes_no_answer(tiny_dir: Path) -> None:
    model = load_model(tiny_dir, numerics_of(soak.EXACT))
    tokenizer = Tokenizer.from_directory(tiny_dir)
    run = soak.Soak(model, tokenizer, soak.EXACT, SEED, FEW)
    run.run(lambda steps: steps >= STEPS)
    alone = soak.Alone(model, tokenizer, soak.EXACT)
    comparison = soak.compare(run, alone, SEED, lambda checked: checked >= CHECKED)
    assert soak.violations(run, comparison, equal=True) == []
    numbers = soak.summary(run, comparison)
    # The load was one: a run in which nothing happens shows nothing.
    for name in ("aborted", "preemptions", "prefix_hit_tokens", "forks", "checked_preempted"):
        assert numbers[name] > 0, name
    assert numbers["checked_alone"] == CHECKED


PARAMS = SamplingParams(max_tokens=2, logprobs=0)
LOGPROB = (TokenLogprobs(-1.0),)
FIRST = TokenChunk("a", 0, (7,), logprobs=LOGPROB)
LAST = TokenChunk("a", 1, (8,), FinishReason.LENGTH, logprobs=LOGPROB)


def ledger(*chunks: TokenChunk) -> Ledger:
    book = Ledger()
    book.open(Request("a", (5,), PARAMS))
    for chunk in chunks:
        book.take(chunk)
    return book


def test_the_ledger_takes_a_whole_answer() -> None:
    book = ledger(FIRST, LAST)
    assert (book.violations, book.live) == ([], {})
    assert book.answers["a", 0].tokens == [7, 8]


@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([FIRST, FIRST], "index 0 after 1"),
        ([LAST], "index 1 after 0"),
        ([FIRST, LAST, LAST], "behind the end"),
        ([replace(FIRST, request_id="b")], "for nobody"),
        ([replace(FIRST, finish=FinishReason.LENGTH)], "1 tokens of 2"),
        ([replace(FIRST, finish=FinishReason.ERROR)], "ended with an error"),
        ([FIRST, replace(LAST, logprobs=None)], "1 records of 2"),
    ],
)
def test_the_ledger_sees_what_is_lost_or_answered_twice(
    chunks: list[TokenChunk], what: str
) -> None:
    assert any(what in line for line in ledger(*chunks).violations)


def test_differences_of_answers_are_seen() -> None:
    request = Request("a", (5,), PARAMS)
    whole = Answer(request, [7, 8], FinishReason.LENGTH, logprobs=list(LOGPROB * 2))
    assert difference(("a", 0), whole, replace(whole)) is None
    assert "tokens, from 1" in str(difference(("a", 0), whole, replace(whole, tokens=[7, 9])))
    assert "tokens, from 1" in str(difference(("a", 0), whole, replace(whole, tokens=[7])))
    stopped = replace(whole, finish=FinishReason.STOP)
    assert "end" in str(difference(("a", 0), whole, stopped))
    other = replace(whole, logprobs=[*LOGPROB, TokenLogprobs(-1.5)])
    assert "log prob" in str(difference(("a", 0), whole, other))
    cancelled = replace(whole, finish=FinishReason.ABORT)
    assert difference(("a", 0), cancelled, whole) is None


def test_dt5_loops_are_found() -> None:
    text = list(range(100))
    assert repeated_share(text) == 0.0
    assert repeated_share([*text, 1, 2, 3]) == pytest.approx(3 / 103)
    assert repeated_share([*text[:20], *[5, 6, 7] * 30]) > 0.5
    assert repeated_share([4] * 10) == 0.9
    assert repeated_share([]) == repeated_share([1]) == 0.0
