"""What an answer is held to, as protocols find it in a request: a form, tools, or both.

Contract: frozen plain data without token ids, checked while it is made: what stands here can be
written as a grammar (`spec.py`). Made by `protocols/`, at level `clients` only; read by the codec.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from headrace.core.grammar import MAX_GRAMMAR_CHARACTERS, GrammarKind
from headrace.core.schema.normal import normal_lark
from headrace.core.schema.regex import RegexError, normal_regex
from headrace.core.schema.schema import check_schema_form
from headrace.core.schema.tables import Mode
from headrace.errors import InvalidGrammar, InvalidRequest
from headrace.recipe.grammar.ebnf import GrammarError, is_gbnf, translate
from headrace.recipe.grammar.tool_rules import ToolRules

MAX_CHOICES = 5_000
_LARK_OPTIONS = re.compile(r"^\s*%llguidance|x-guidance", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FormatRule:
    """The form of the whole answer. text: as in `GrammarSpec`. path: the field that asks for it."""

    kind: GrammarKind
    text: str
    path: str


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """tools: whose calls are held to their schemas, None when none may be called.

    required: there has to be a call. parallel: there may be several.
    """

    format: FormatRule | None = None
    tools: ToolRules | None = None
    required: bool = False
    parallel: bool = True


def answer_rules(
    form: FormatRule | None, tools: ToolRules | None, *, required: bool, parallel: bool
) -> AnswerRules | None:
    """The rules of one request, or None when there are none."""
    if form is not None and form.kind is GrammarKind.LARK and tools is not None:
        raise InvalidRequest(
            f"{form.path}: a grammar cannot be combined with tools; use tool_choice = none.",
            param=form.path,
        )
    if form is None and tools is None:
        return None
    return AnswerRules(form, tools, required, parallel)


def json_object_rule(path: str) -> FormatRule:
    """Any JSON object."""
    return FormatRule(GrammarKind.JSON_OBJECT, "", path)


def schema_rule(schema: Any, path: str, *, strict: bool = False, close: bool = False) -> FormatRule:
    """JSON that fits a schema. close: objects need all their properties and have no others."""
    mode = Mode.STRICT if strict else Mode.PLAIN
    form = check_schema_form(schema, path, mode, close=close)
    return FormatRule(GrammarKind.JSON_SCHEMA, form.text(), path)


def regex_rule(pattern: Any, path: str) -> FormatRule:
    """Text that a regular expression matches as a whole."""
    if not isinstance(pattern, str):
        _fail(path, "must be a string")
    try:
        return FormatRule(GrammarKind.REGEX, normal_regex(pattern, whole=True), path)
    except RegexError as error:
        _refuse(path, f"the expression {error}")


def choice_rule(choices: Any, path: str) -> FormatRule:
    """One of several texts."""
    if not isinstance(choices, list) or not all(isinstance(entry, str) for entry in choices):
        _fail(path, "must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
        _fail(path, f"must hold 1 to {MAX_CHOICES} strings, none of them empty")
    text = msgspec.json.encode(list(dict.fromkeys(choices))).decode()
    _check_size(text, path)
    return FormatRule(GrammarKind.CHOICE, text, path)


def grammar_rule(grammar: Any, path: str) -> FormatRule:
    """A grammar in Lark's notation, or in that of llama.cpp and xgrammar."""
    if not isinstance(grammar, str) or not grammar.strip():
        _fail(path, "must be the text of a grammar")
    _check_size(grammar, path)
    if not is_gbnf(grammar):
        if _LARK_OPTIONS.search(grammar):
            _refuse(path, "cannot set options of the grammar engine (`%llguidance`)")
        return FormatRule(GrammarKind.LARK, normal_lark(grammar, path), path)
    try:
        regular, text = translate(grammar)
    except GrammarError as error:
        _refuse(path, f"the grammar {error}")
    return FormatRule(GrammarKind.REGEX if regular else GrammarKind.LARK, text, path)


def _check_size(text: str, path: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        _refuse(path, f"has {len(text)} characters, at most {MAX_GRAMMAR_CHARACTERS} are allowed")


def _refuse(path: str, problem: str) -> NoReturn:
    """What the field holds is no grammar, or none that can be enforced."""
    raise InvalidGrammar(f"{path}: {problem}.", param=path)


def _fail(path: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{path}: {problem}.", param=path)


# --- fields of other servers -----------------------------------------------------------------


def _guided_json(value: Any, path: str) -> FormatRule:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            _refuse(path, f"is not the text of a JSON schema: {error}")
    return schema_rule(value, path)


def _any_object(value: Any, path: str) -> FormatRule | None:
    if not isinstance(value, bool):
        _fail(path, "must be true or false")
    return json_object_rule(path) if value else None


_Rule = Callable[[Any, str], FormatRule | None]
_OBJECT_FIELDS: dict[str, _Rule] = {
    "json": _guided_json,
    "regex": regex_rule,
    "choice": choice_rule,
    "grammar": grammar_rule,
    "json_object": _any_object,
}
GUIDED_FIELDS: dict[str, _Rule] = {
    "guided_json": _guided_json,
    "guided_regex": regex_rule,
    "guided_choice": choice_rule,
    "guided_grammar": grammar_rule,
    "guided_json_object": _any_object,
}
# How other servers' engines are set up; nothing that an answer has to have.
_SETTINGS = (
    "backend",
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
)


def guided_rule(
    fields: dict[str, Any], structured: Any, asked: FormatRule | None
) -> FormatRule | None:
    """The one form that a request asks for. Raises InvalidRequest when there are several.

    fields: those of `GUIDED_FIELDS` that are given. structured: `structured_outputs`. asked: by the
    fields of the protocol itself.
    """
    found = [] if asked is None else [asked]
    for name, value in fields.items():
        if (rule := GUIDED_FIELDS[name](value, name)) is not None:
            found.append(rule)
    if structured is not None:
        found += _structured(structured)
    if len(found) > 1:
        _fail(found[1].path, f"cannot be combined with {found[0].path}: an answer has one form")
    return found[0] if found else None


def _structured(value: Any) -> list[FormatRule]:
    if not isinstance(value, dict):
        _fail("structured_outputs", "must be an object")
    found: list[FormatRule] = []
    for name, entry in value.items():
        path = f"structured_outputs.{name}"
        if entry is None or (name.lstrip("_") in _SETTINGS and entry in (False, "auto")):
            continue
        read = _OBJECT_FIELDS.get(name)
        if read is None:
            _fail(path, f"is not supported; known: {', '.join(_OBJECT_FIELDS)}")
        if (rule := read(entry, path)) is not None:
            found.append(rule)
    return found
