"""Lists of ids that leave nothing of a grammar: the request's own error, told as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.output import FinishReason
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.grammar.backend import MatcherFailed
from headrace.engine.grammar.matcher import Matcher
from headrace.errors import InvalidRequest
from tests.unit.engine.grammar.grammars import Letters
from tests.unit.engine.test_engine_grammar import DIGITS, EOS, PROMPT, VOCAB, digits, make, run

ids = Letters().encode
YES = GrammarSpec(GrammarKind.CHOICE, '["yes"]')


def last_chunk(engine: Any, params: SamplingParams) -> Any:
    engine.add(Request("r", tuple(PROMPT), params))
    while True:
        for chunk in engine.step():
            if chunk.finish is not None:
                return chunk


@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("params", "field", "drawn"),
    [
        (digits(allowed_token_ids=(*ids("abc"), EOS)), "allowed_token_ids", 0),
        (digits(banned_token_ids=tuple(ids("0123456789"))), "banned_token_ids", 0),
        (digits(allowed_token_ids=tuple(ids("7"))), "allowed_token_ids", 6),  # its end is not
        (
            digits(allowed_token_ids=tuple(ids("7x")), banned_token_ids=tuple(ids("7"))),
            "allowed_token_ids",
            0,
        ),
        (SamplingParams(grammar=YES, banned_token_ids=tuple(ids("s"))), "banned_token_ids", 2),
        (SamplingParams(grammar=YES, allowed_token_ids=tuple(ids("yes"))), "allowed_token_ids", 3),
        (SamplingParams(grammar=YES, banned_token_ids=(EOS,)), "banned_token_ids", 3),
        # min_tokens takes the 3, of what the list leaves.
        (
            digits(allowed_token_ids=tuple(ids("3a")), min_tokens=2, stop_token_ids=ids("3")),
            "allowed_token_ids",
            0,
        ),
    ],
)
def test_a_list_that_leaves_nothing_of_the_grammar_is_named(
    params: SamplingParams, field: str, drawn: int, temperature: float, jump_forward: bool
) -> None:
    llm = make(jump_forward=jump_forward)
    chunk = last_chunk(llm.engine, replace(params, temperature=temperature, max_tokens=30))
    assert (chunk.finish, chunk.error_code) == (FinishReason.ERROR, InvalidRequest.code)
    assert chunk.error.startswith(f"{field} excludes every token")
    assert f"after {drawn} tokens" in chunk.error
    stats = llm.engine.stats()
    assert (stats.failed, stats.refused, stats.finished) == (0, 1, 1)


def test_others_in_the_batch_are_not_touched() -> None:
    (alone,) = run(make(), digits())
    good, bad = run(make(), digits(), digits(allowed_token_ids=(EOS,)))
    assert good.token_ids == alone.token_ids
    assert bad.finish is FinishReason.ERROR


def test_a_grammar_that_cannot_be_compiled_is_no_failure_of_the_engine() -> None:
    llm = make()
    run(llm, SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, "(a"), n=2))
    stats = llm.engine.stats()
    assert (stats.failed, stats.refused, stats.finished) == (0, 2, 2)


def test_logits_that_are_not_finite_stay_an_internal_error() -> None:
    """Also where a list and a grammar leave something."""
    llm = make()
    model = llm.engine._executor._runner._model  # type: ignore[attr-defined]
    forward = model.forward
    model.forward = lambda *a, **k: forward(*a, **k) * float("nan")
    chunk = last_chunk(llm.engine, digits(allowed_token_ids=(*ids("12"), EOS)))
    assert (chunk.finish, chunk.error_code) == (FinishReason.ERROR, "internal_error")
    assert "not finite" in chunk.error
    assert (llm.engine.stats().failed, llm.engine.stats().refused) == (1, 0)


def test_a_limit_of_the_library_is_the_grammars_and_a_masked_token_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept = Matcher.accept

    def limited(self: Matcher, token: int) -> bool:
        if len(self._tokens) == 1:
            raise MatcherFailed("too many states")
        return accept(self, token)

    with monkeypatch.context() as patch:
        patch.setattr(Matcher, "accept", limited)
        chunk = last_chunk(make().engine, digits())
    assert (chunk.error_code, "too many states" in chunk.error) == ("invalid_grammar", True)

    def forgetful(self: Matcher, token: int) -> bool:
        return len(self._tokens) < 1 and accept(self, token)

    with monkeypatch.context() as patch:
        patch.setattr(Matcher, "accept", forgetful)
        chunk = last_chunk(make().engine, digits())
    assert (chunk.error_code, "although it was masked" in chunk.error) == ("internal_error", True)


def test_every_list_that_leaves_the_end_works() -> None:
    every = tuple(range(VOCAB))
    (free,) = run(make(), digits())
    (listed,) = run(make(), digits(allowed_token_ids=every))
    assert listed.token_ids == free.token_ids
    (banned,) = run(make(), digits(banned_token_ids=tuple(ids("abcxyz"))))
    assert banned.token_ids == free.token_ids
    assert free.token_ids[-1] == EOS and DIGITS.kind is GrammarKind.REGEX
