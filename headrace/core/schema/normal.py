"""Grammars of users with their schemas in normal form: what keeps every library safe.

Contract: `normal_spec` reads the schema of a `GrammarSpec` that somebody has built by hand as
schemas over HTTP are read; `normal_lark` does the same to each `%json {...}` of a Lark text, whose
lines stay where they are, and bounds its white space. A library given such schemas as they are can
end the process (long chains of references) or never return (`multipleOf` of many digits). Raises
InvalidGrammar with the path of the keyword. Called by `engine/engine.py` and by
`recipe/grammar/rules.py`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

from headrace.core.grammar import MAX_JSON_SPACES, GrammarKind, GrammarSpec
from headrace.core.schema.schema import check_schema_form
from headrace.core.schema.tables import step
from headrace.errors import InvalidGrammar

# Texts may have a million characters.
_REMEMBERED = 16
# As in whole schemas: white space has an end.
_JSON_OPTIONS = f'"x-guidance":{{"whitespace_pattern":"[ \\n\\r\\t]{{1,{MAX_JSON_SPACES}}}"}}'
# A failure takes time by the length of the text.
_MAX_UNREAD = 100
_EMBEDDED = re.compile(r"%json[ \t\r\n]*(?=\{)")


@lru_cache(maxsize=_REMEMBERED)
def normal_spec(spec: GrammarSpec) -> GrammarSpec:
    """The same grammar with `checked` set; a spec that has it set already is given back."""
    if spec.checked:
        return spec
    text = spec.text
    if spec.kind is GrammarKind.JSON_SCHEMA:
        text = _normal_text(_decoded(text), "grammar")
    elif spec.kind is GrammarKind.LARK:
        text = normal_lark(text, "grammar")
    return replace(spec, text=text, checked=True)


def normal_lark(text: str, path: str) -> str:
    """A Lark text in llguidance's dialect. path: the field that holds it, `param` of errors."""
    parts: list[str] = []
    end = unread = 0
    for found in _EMBEDDED.finditer(text):
        start = found.end()
        if start < end:
            continue  # in a text of the schema before
        try:
            value, after = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            # The library cannot read it either, or it is no schema: a literal, a comment.
            unread += 1
            if unread > _MAX_UNREAD:
                raise InvalidGrammar(
                    f"{path}: more than {_MAX_UNREAD} places look like %json with a schema and "
                    "are none.",
                    param=path,
                ) from None
            continue
        schema = text[start:after]
        try:
            normal = _normal_text(value, "schema")
        except InvalidGrammar as error:
            line = text.count("\n", 0, start) + 1
            raise InvalidGrammar(
                f"{path}: %json in line {line}: {error.message}", param=path
            ) from None
        rest = normal.removeprefix("{") if value else "}"
        options = _JSON_OPTIONS if rest == "}" else _JSON_OPTIONS + ","
        parts += (text[end:start], "{", "\n" * schema.count("\n"), options, rest)
        end = after
    return "".join((*parts, text[end:]))


def _normal_text(value: Any, path: str) -> str:
    try:
        return check_schema_form(value, path).text()
    except UnicodeEncodeError:
        _fail("it holds a lone surrogate, which is not a character", path)


def _decoded(text: str) -> Any:
    try:
        value = json.loads(text)
        _check_numbers(value, "grammar")
        return value
    except RecursionError:
        _fail("the JSON text is nested too deep", "grammar")
    except ValueError as error:
        _fail(f"it is not valid JSON: {error}", "grammar")


def _fail(problem: str, path: str) -> NoReturn:
    raise InvalidGrammar(f"{path}: the schema cannot be read: {problem}.", param=path)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_numbers(value: Any, path: str) -> None:
    """Refuse NaN and infinity, which Python reads and JSON does not have, by their place."""
    level = [(path, value)]
    for place, inner in level:  # grows on the way
        if isinstance(inner, dict):
            level += [(f"{place}{step(key)}", entry) for key, entry in inner.items()]
        elif isinstance(inner, list):
            level += [(f"{place}[{number}]", entry) for number, entry in enumerate(inner)]
        elif isinstance(inner, float) and not math.isfinite(inner):
            _fail(f"{inner} is no number of JSON", place)


_DECODER = json.JSONDecoder(parse_constant=_no_number)
