"""The form that an answer of `headrace generate` must have, from the options of the command line.

Contract: at most one of --json-schema, --regex, --choice and --grammar; what is wrong with it is
raised as InvalidRequest that begins with the option, before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.core.grammar import MAX_GRAMMAR_CHARACTERS
from headrace.errors import InvalidRequest
from headrace.recipe.grammar.rules import (
    FormatRule,
    choice_rule,
    grammar_rule,
    regex_rule,
    schema_rule,
)


@dataclass(frozen=True, slots=True)
class FormOptions:
    """Options as given. json_schema: a file, or the schema itself. grammar: a file."""

    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()
    grammar: Path | None = None


def form_of(options: FormOptions) -> FormatRule | None:
    """The form, None: any answer."""
    given = {
        "--json-schema": options.json_schema,
        "--regex": options.regex,
        "--choice": options.choices or None,
        "--grammar": options.grammar,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidRequest(
            f"{names[1]}: cannot be combined with {names[0]}; an answer has one form.",
            param=names[1],
        )
    if options.json_schema is not None:
        return schema_rule(_schema(options.json_schema), "--json-schema")
    if options.regex is not None:
        return regex_rule(options.regex, "--regex")
    if options.choices:
        return choice_rule(list(options.choices), "--choice")
    if options.grammar is not None:
        return grammar_rule(_text(options.grammar, "--grammar"), "--grammar")
    return None


def _schema(given: str) -> object:
    """A JSON schema: the text itself if it looks like one, else the file of this name."""
    inline = given.lstrip().startswith("{") or given.strip() in ("true", "false")
    text = given if inline else _text(Path(given), "--json-schema")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        what = "the schema" if inline else given
        raise InvalidRequest(
            f"--json-schema: {what} is not JSON: {error}.", param="--json-schema"
        ) from None


def _text(path: Path, option: str) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_GRAMMAR_CHARACTERS + 1)
    except OSError as error:
        more = ", and it is no JSON object either" if option == "--json-schema" else ""
        raise InvalidRequest(
            f"{option}: {path} cannot be read: {error.strerror}{more}.", param=option
        ) from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{option}: {path} is not UTF-8.", param=option) from None
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"{option}: {path} has more than {MAX_GRAMMAR_CHARACTERS} characters.", param=option
        )
    return text
