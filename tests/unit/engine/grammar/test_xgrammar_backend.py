"""The second library behind the same interface; skipped where its extra is not installed."""

from __future__ import annotations

import importlib.util

import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.engine.grammar.matcher import Matcher
from headrace.engine.grammar.states import StateGraph
from headrace.errors import InvalidGrammar
from tests.unit.engine.grammar.grammars import EOS, GRAMMARS, Walker, ids_of, table, text_of

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("xgrammar") is None, reason="the extra xgrammar is not installed"
    ),
    pytest.mark.filterwarnings("default"),  # its imports warn
]


@pytest.fixture(scope="module")
def library():
    from headrace.engine.grammar.xgrammar_backend import XgrammarBackend

    return XgrammarBackend(table())


TAKEN = [spec for spec in GRAMMARS if spec.kind is not GrammarKind.LARK]


@pytest.mark.parametrize("spec", TAKEN, ids=lambda spec: f"{spec.kind}-{spec.text[:24]}")
def test_cached_states_are_those_of_a_fresh_matcher(library, spec: GrammarSpec) -> None:
    """Rollback included; a grammar that was written and read again is the same."""
    compiled = library.compile(spec.kind, spec.text)
    again = library.deserialise(library.serialise(compiled))
    graph = StateGraph(compiled, table(), 10**8)
    for seed in range(4):
        matcher, walker, tokens = Matcher(spec, graph), Walker(seed), list[int]()
        for step in range(20):
            fresh = Matcher(spec, StateGraph(again, table(), 0))
            assert all(map(fresh.accept, tokens))
            mask, other = matcher.mask(), fresh.mask()
            assert mask is not None
            assert other is not None
            assert ids_of(mask) == ids_of(other), text_of(tokens)
            if step % 5 == 4:
                matcher.rollback(2)
                del tokens[-2:]
                continue
            token = walker.pick(ids_of(mask))
            assert matcher.accept(token)
            if token == EOS:
                break
            tokens.append(token)


def test_what_it_does_not_take_is_refused(library) -> None:
    with pytest.raises(InvalidGrammar, match="grammar_backend llguidance"):
        library.compile(GrammarKind.LARK, 'start: "a"')
    with pytest.raises(InvalidGrammar, match="regex grammar cannot be compiled"):
        library.compile(GrammarKind.REGEX, "(a")
    with pytest.raises(InvalidGrammar, match="deeper than"):
        library.compile(GrammarKind.JSON_SCHEMA, '{"items":' * 90 + "{}" + "}" * 90)
    with pytest.raises(ValueError, match="no compiled grammar"):
        library.deserialise(b"{}")
