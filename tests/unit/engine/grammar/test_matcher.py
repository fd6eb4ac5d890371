"""Triggers, ends and rollback of one answer, and the rows of a step with drafts."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.engine.grammar.backend import MaskWords, MatcherFailed
from headrace.engine.grammar.matcher import MAX_ROLLBACK, Matcher
from headrace.engine.grammar.rows import GrammarRows, Masks
from headrace.engine.grammar.states import StateGraph
from headrace.engine.grammar.trigger import Trigger
from headrace.errors import InternalError, InvalidGrammar
from tests.unit.engine.grammar.grammars import (
    EOS,
    GRAMMARS,
    VOCAB,
    Walker,
    graph_of,
    ids_of,
    schema,
    table,
    tokenizer,
)

A, B, C, D = 400, 401, 402, 403
YES_NO = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]')


def encode(text: str) -> list[int]:
    return tokenizer().encode(text)


def allowed(matcher: Matcher) -> list[int] | None:
    mask = matcher.mask()
    return None if mask is None else ids_of(mask)


# --- triggers ------------------------------------------------------------------------------------


def test_the_trigger_is_found_wherever_it_first_ends() -> None:
    """Against a search in the whole text, for all texts of 7 tokens over 2 letters."""
    for length in (1, 2, 3, 4):
        for wanted in itertools.product((A, B), repeat=length):
            trigger = Trigger(wanted, None)
            for text in itertools.product((A, B), repeat=7):
                progress, ends = 0, None
                for place, token in enumerate(text):
                    progress, _ = trigger.after(progress, False, token)
                    if progress == length:
                        ends = place
                        break
                naive = [p for p in range(7) if text[: p + 1][-length:] == wanted]
                assert ends == (naive[0] if naive else None)


def test_generation_is_free_until_the_trigger_is_complete() -> None:
    spec = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]', (A, B), required=False)
    matcher = Matcher(spec, graph_of(YES_NO))
    for token in (5, A, A, EOS, 9, B, A):
        assert matcher.mask() is None
        assert matcher.accept(token)
    assert matcher.mask() is None
    assert matcher.accept(B)
    starts = {token for token in range(VOCAB) if table().texts[token][:1] in (b"y", b"n")}
    assert set(allowed(matcher) or ()) <= starts
    assert not matcher.accept(A)
    for token in encode("yes"):
        assert matcher.accept(token)
    assert allowed(matcher) == [EOS]


@pytest.mark.parametrize("bound", [None, D])
def test_eos_waits_for_the_trigger_of_a_required_grammar(bound: int | None) -> None:
    spec = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]', (A, B), bound)
    assert spec.required
    matcher, others = Matcher(spec, graph_of(YES_NO)), [t for t in range(VOCAB) if t != EOS]
    for token in (5, A, A, 9, B, A):
        assert (allowed(matcher) or [])[: len(others)] == others
        assert matcher.forced() == -1
        assert not matcher.accept(EOS)
        assert matcher.accept(token)
    matcher.rollback(2)
    assert not matcher.accept(EOS)
    for token in (A, B, *encode("no")):
        assert matcher.accept(token)
    assert allowed(matcher) == [EOS]


def test_a_trigger_that_holds_eos_can_come() -> None:
    spec = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]', (A, EOS))
    matcher = Matcher(spec, graph_of(YES_NO))
    assert matcher.accept(A)
    assert matcher.accept(EOS)
    assert allowed(matcher) == allowed(Matcher(YES_NO, graph_of(YES_NO)))


def test_the_bound_token_forces_the_rest_of_the_trigger() -> None:
    spec = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]', (A, B, C), bound_token_id=B)
    graph = graph_of(YES_NO)
    within, alone = Matcher(spec, graph), Matcher(spec, graph)
    for token in (7, A):
        assert within.accept(token)
        assert within.forced() == -1
    assert within.accept(B)  # as the second token of the trigger
    assert allowed(within) == [C]
    assert within.forced() == C
    assert alone.accept(B)  # without its beginning: the whole trigger follows
    for token in (A, B, C):
        assert allowed(alone) == [token]
        assert not alone.accept(D)
        assert alone.accept(token)
    assert within.accept(C)
    assert allowed(within) == allowed(alone) == allowed(Matcher(YES_NO, graph))


def test_eos_only_where_the_grammar_may_end_and_nothing_but_eos_after_it() -> None:
    matcher = Matcher(spec := GrammarSpec(GrammarKind.REGEX, "ab*"), graph_of(spec))
    assert not matcher.accept(EOS)
    assert matcher.accept(encode("a")[0])
    assert EOS in (allowed(matcher) or ())
    assert not matcher.ended
    for _ in range(3):
        assert matcher.accept(EOS)
        assert matcher.ended
        assert allowed(matcher) == [EOS]
        assert not matcher.accept(encode("b")[0])
    matcher.rollback(3)
    assert matcher.accept(encode("b")[0])


# --- rollback ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, len(GRAMMARS) - 1), st.booleans())
def test_rollback_is_exact(seed: int, which: int, cached: bool) -> None:
    """Against a matcher that has seen the remaining tokens only, triggers and EOS included."""
    chance = random.Random(seed)
    base = GRAMMARS[which]
    trigger = chance.choice([(), (A,), (A, B, A)])
    bound, required = B if len(trigger) > 1 else None, chance.random() < 0.5
    spec = GrammarSpec(base.kind, base.text, trigger, bound, required)
    graph = graph_of(spec, 10**8 if cached else 0)
    matcher, walker, tokens = Matcher(spec, graph), Walker(seed), list[int]()
    for _ in range(25):
        if tokens and chance.random() < 0.3:
            count = chance.randrange(1, min(6, len(tokens)) + 1)
            matcher.rollback(count)
            del tokens[-count:]
        free = allowed(matcher)
        before = [A, B, 9, *trigger]
        if free is not None and not set(before) <= set(free):
            before = [walker.pick(free)]
        token = chance.choice(before)
        assert matcher.accept(token)
        tokens.append(token)
        fresh = Matcher(spec, graph)
        assert all(map(fresh.accept, tokens))
        assert allowed(matcher) == allowed(fresh)
        assert matcher.forced() == fresh.forced()


def test_rollback_beyond_the_history_is_refused() -> None:
    matcher = Matcher(spec := GrammarSpec(GrammarKind.REGEX, "a*"), graph_of(spec))
    with pytest.raises(InternalError):
        matcher.rollback(1)
    token = encode("a")[0]
    for _ in range(MAX_ROLLBACK + 5):
        assert matcher.accept(token)
    with pytest.raises(InternalError):
        matcher.rollback(MAX_ROLLBACK + 1)
    matcher.rollback(MAX_ROLLBACK)
    assert matcher.accept(token)


# --- rows with drafts ----------------------------------------------------------------------------


def rows_with(spec: GrammarSpec, output: Sequence[int] = (), row: int = 3) -> GrammarRows:
    rows = GrammarRows(VOCAB)
    rows.admit(row, spec, graph_of(spec), output)
    return rows


def one(row: int = 3) -> np.ndarray:
    return np.array([row])


def by_index(masks: Masks | None) -> dict[int, list[int]]:
    if masks is None:
        return {}
    return {i: ids_of(words) for i, words in zip(masks.index.tolist(), masks.words, strict=True)}


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, len(GRAMMARS) - 1))
def test_rows_of_drafts_have_the_masks_of_drawing_one_by_one(seed: int, which: int) -> None:
    """SD-6: a draft is treated as a drawn token would be, triggers included, and leaves nothing."""
    chance, walker = random.Random(seed), Walker(seed)
    base = GRAMMARS[which]
    trigger = chance.choice([(), (A,), (A, B)])
    spec = GrammarSpec(base.kind, base.text, trigger, required=chance.random() < 0.5)
    rows, plain, known = rows_with(spec), Matcher(spec, graph_of(spec)), list[int]()
    for _ in range(5):
        draft: list[int] = []
        expected: dict[int, list[int]] = {}
        twin = Matcher(spec, graph_of(spec))
        assert all(map(twin.accept, known))
        for offset in range(6):
            may = allowed(twin)
            if may is not None:
                expected[offset] = may
            token = chance.choice([A, B, 9]) if may is None else walker.pick(may)
            if chance.random() < 0.15:
                token = D  # control tokens fit none of the grammars
            if offset < 5:
                draft.append(token)
            if not twin.accept(token):
                break
        found = by_index(rows.masks(one(), [draft]))
        assert found == expected
        assert by_index(rows.masks(one(), [draft])) == found  # nothing has moved
        may = allowed(plain)
        token = chance.choice([A, B]) if may is None else walker.pick(may)
        known.append(token)
        assert plain.accept(token)
        rows.commit(one(), None, np.array([token]))


def test_markup_that_a_draft_opens_inside_thinking_is_free_text() -> None:
    """SD-6: the grammar waits for the end of thinking, whoever opens a call before."""
    end = 410
    lark = f"start: <[{A}]> /[a-z]+/ <[{B}]>"
    spec = GrammarSpec(GrammarKind.LARK, lark, (end,), required=False)
    rows = rows_with(spec)
    assert by_index(rows.masks(one(), [[A, 9, EOS, A, 9]])) == {}
    with_end = by_index(rows.masks(one(), [[A, end, A, 9, B]]))
    assert with_end == {2: [A], 3: with_end[3]}  # 9 is no letter: no rows behind it
    assert set(with_end[3]) == {
        t
        for t in range(VOCAB)
        if table().texts[t].isalpha()
        and (table().texts[t].islower())
        and t not in table().control_ids
    }


def test_several_requests_share_a_step() -> None:
    rows = rows_with(YES_NO, row=2)
    rows.admit(5, spec := GrammarSpec(GrammarKind.REGEX, "a+"), graph_of(spec), encode("a"))
    a, n, o = encode("a")[0], *encode("no")[:2]
    masks = rows.masks(np.array([9, 5, 2]), [[4, 4], [a], [n, o]])
    assert masks is not None
    # Rows 0 to 2 are of the request without a grammar.
    assert masks.index.tolist() == [3, 4, 5, 6, 7][: masks.index.size]
    assert by_index(masks)[3] == by_index(masks)[4]
    rows.commit(np.array([9, 5, 2]), np.array([3, 2, 1]), np.array([4, 4, 4, a, a, n]))
    assert by_index(rows.masks(np.array([2])))[0] != by_index(masks)[5]


def test_preemption_with_drafts_in_flight_rebuilds_the_matcher() -> None:
    """SD-12: the row is given back and admitted again; stale drafts do no harm."""
    spec = GrammarSpec(GrammarKind.REGEX, "abcd", (A,))
    rows, text = rows_with(spec), encode("abcd")
    rows.masks(one(), [[A, *text]])
    rows.commit(one(), np.array([3]), np.array([A, *text[:2]]))
    rows.release(3)
    assert rows.masks(one(), [[7, 7]]) is None
    rows.admit(4, spec, graph_of(spec), [A, *text[:2]])
    stale = rows.masks(one(4), [[A, *text]])
    assert stale is not None
    assert by_index(stale)[0] == [text[2]]
    assert stale.index.tolist() == [0]
    rows.commit(one(4), np.array([2]), np.array(text[2:]))
    assert by_index(rows.masks(one(4))) == {0: [EOS]}


def test_a_fork_starts_from_the_prompt() -> None:
    rows = rows_with(YES_NO, row=1)
    rows.admit(2, YES_NO, graph_of(YES_NO), [])
    rows.commit(np.array([1]), None, np.array(encode("n")[:1]))
    assert by_index(rows.masks(np.array([1, 2])))[1] == by_index(rows_with(YES_NO).masks(one()))[0]


def test_forced_runs_end_at_the_first_choice_and_before_eos() -> None:
    spec = GrammarSpec(
        GrammarKind.LARK, f"start: <[{A}]> <[{B}]> (<[{C}]> | <[{D}]>) <[{A}]>", (D,), D
    )
    rows = rows_with(spec)
    assert rows.forced(3, 9) == []  # free
    rows.commit(one(), None, np.array([D]))
    assert rows.forced(3, 9) == [A, B]
    assert rows.forced(3, 1) == [A]
    rows.commit(one(), np.array([3]), np.array([A, B, C]))
    assert rows.forced(3, 9) == [A]
    assert by_index(rows.masks(one())) == {0: [A]}  # nothing has moved
    rows.commit(one(), np.array([2]), np.array([A, EOS]))
    assert rows.forced(3, 9) == []
    assert rows.forced(4, 9) == []


# --- failures ------------------------------------------------------------------------------------


class _LimitedMatcher:
    """Everything is allowed, until there are more than `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0

    def accept(self, tokens: Sequence[int]) -> None:
        self._count += len(tokens)
        if self._count > self._limit:
            raise MatcherFailed("too many states")

    def rollback(self, count: int) -> None:
        assert self._count <= self._limit  # a failed matcher is of no use
        self._count -= count

    def fill_mask(self, words: MaskWords) -> None:
        words[:] = -1


class _Limited:
    json_schema = None

    def matcher(self) -> _LimitedMatcher:
        return _LimitedMatcher(3)


def test_a_limit_of_the_library_ends_that_row_only() -> None:
    rows = GrammarRows(VOCAB)
    rows.admit(1, YES_NO, StateGraph(_Limited(), table(), 0), [])
    rows.admit(2, YES_NO, graph_of(YES_NO), [])
    rows.commit(np.array([1, 2]), np.array([3, 1]), np.array([7, 7, 7, *encode("n")[:1]]))
    beyond = by_index(rows.masks(np.array([1]), [[7, 7]]))
    assert len(beyond[0]) == VOCAB
    assert beyond[1] == []  # nothing may be drawn behind the draft that fails
    assert rows.error(1) is None
    assert len(by_index(rows.masks(np.array([1])))[0]) == VOCAB  # and the row is as it was
    rows.commit(np.array([1, 2]), None, np.array([7, *encode("o")[:1]]))
    assert isinstance(rows.error(1), InvalidGrammar)
    assert "too many states" in str(rows.error(1))
    masks = by_index(rows.masks(np.array([1, 2])))
    assert masks == {0: [], 1: [EOS]}
    rows.release(1)
    assert rows.error(1) is None
    assert not rows.has(1)


def test_output_that_does_not_fit_is_an_error_of_the_row() -> None:
    rows = rows_with(YES_NO, encode("maybe"))
    assert isinstance(rows.error(3), InternalError)
    assert "does not fit" in str(rows.error(3))
    assert by_index(rows.masks(one())) == {0: []}


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(GrammarKind.CHOICE, json.dumps([f"o{n}" for n in range(5000)])),
        GrammarSpec(GrammarKind.LARK, "start: " + " | ".join(f'"w{n}"' for n in range(5000))),
        schema(
            {
                "type": "object",
                "properties": {f"p{n}": {"type": "integer"} for n in range(1000)},
                "additionalProperties": False,
            }
        ),
    ],
    ids=["choice", "lark", "optional members"],
)
def test_the_largest_forms_can_be_followed(spec: GrammarSpec) -> None:
    """The library's own limit of 2,000 open alternatives ended such answers with an error."""
    matcher, walker = Matcher(spec, graph_of(spec)), Walker(1)
    for _ in range(8):
        mask = matcher.mask()
        assert mask is not None
        token = walker.pick(ids_of(mask))
        assert matcher.accept(token)
        if matcher.ended:
            break
