"""Rules of an answer -> the `GrammarSpec` that the engine enforces.

Contract: reasoning is free, what follows it is bound. A form is bound from the end of the reasoning
(from the first token where there is none); a call that has to come, too; calls that may come are
bound once their markup has begun. Called by the codec, which knows the ids of control tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec

from headrace.core.grammar import MAX_GRAMMAR_CHARACTERS, GrammarKind, GrammarSpec
from headrace.core.schema.regex import literal_regex
from headrace.core.schema.regex_classes import ANY
from headrace.errors import InvalidRequest
from headrace.recipe.grammar.calls import CallGrammar, Markup, json_rule
from headrace.recipe.grammar.rules import AnswerRules, FormatRule

_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Where an answer begins. thinking: in its reasoning. in_calls: behind the mark of a block.

    thinking_end: id of the token that ends the reasoning.
    """

    thinking: bool
    in_calls: bool
    thinking_end: int


def grammar_spec(rules: AnswerRules, start: AnswerStart, markup: Markup) -> GrammarSpec | None:
    """The grammar of an answer; None when there are no rules."""
    trigger = (start.thinking_end,) if start.thinking else ()
    form = rules.format
    if rules.tools is None:
        return None if form is None else GrammarSpec(form.kind, form.text, trigger)
    if rules.required:
        top = "inside" if start.in_calls else "block"
        # A call that the model begins in its reasoning is moved behind it.
        bound = markup.dsml if start.thinking else None
        return GrammarSpec(GrammarKind.LARK, _calls(rules, markup, top), trigger, bound)
    if form is None:
        return GrammarSpec(GrammarKind.LARK, _calls(rules, markup, "opened"), (markup.dsml,))
    # Calls or an answer of the form: which one shows only at the end of the reasoning, and a call
    # may also end it, so that the grammar holds from the first token.
    text = _calls_or_form(rules, form, markup, start.thinking_end if start.thinking else None)
    return GrammarSpec(GrammarKind.LARK, text)


@lru_cache(maxsize=_REMEMBERED)
def _calls(rules: AnswerRules, markup: Markup, top: str) -> str:
    return _checked(f"start: {top}", *_lines(rules, markup))


@lru_cache(maxsize=_REMEMBERED)
def _calls_or_form(
    rules: AnswerRules, form: FormatRule, markup: Markup, thinking_end: int | None
) -> str:
    lines = ["answer: block | form", _form(form), *_lines(rules, markup)]
    if thinking_end is None:
        return _checked("start: answer", *lines)
    return _checked(
        f"start: REASONING <[{thinking_end}]> answer | REASONING_CALL <[{markup.dsml}]> opened",
        f"REASONING: /{ANY}*/",
        f'REASONING_CALL: /{ANY}*/ "<"',
        *lines,
    )


def _lines(rules: AnswerRules, markup: Markup) -> list[str]:
    tools = () if rules.tools is None else rules.tools.tools
    return CallGrammar(tools, markup, parallel=rules.parallel).lines


_ANY_OBJECT = '{"type":"object"}'


def _form(form: FormatRule) -> str:
    match form.kind:
        case GrammarKind.JSON_OBJECT:
            return f"form: %json {json_rule(_ANY_OBJECT)}"
        case GrammarKind.JSON_SCHEMA:
            return f"form: %json {json_rule(form.text)}"
        case GrammarKind.CHOICE:
            choices = msgspec.json.decode(form.text, type=list[str])
            return f"form: FORM\nFORM: /{'|'.join(map(literal_regex, choices))}/"
    return f"form: FORM\nFORM: /{form.text}/"


def _checked(*lines: str) -> str:
    text = "\n".join(lines)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"tools: the grammar of their calls has {len(text)} characters, at most "
            f"{MAX_GRAMMAR_CHARACTERS} are possible; declare fewer or smaller tools.",
            param="tools",
        )
    return text
