"""The form of answers of `headrace generate`: options, errors, and what the engine is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.answer_form import FormOptions, form_of
from headrace.cli.main import main
from headrace.cli.prompt_file import PromptOptions
from headrace.core.grammar import GrammarKind
from headrace.core.sampling import SamplingParams
from headrace.errors import InvalidRequest
from tests.unit.cli.generate_fakes import Case

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_each_option_is_a_form(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    gbnf = tmp_path / "yes.gbnf"
    gbnf.write_text('root ::= "yes"')
    lark = tmp_path / "many.lark"
    lark.write_text('start: "a" start?')
    for options, kind in (
        (FormOptions(json_schema=str(file)), GrammarKind.JSON_SCHEMA),
        (FormOptions(json_schema=json.dumps(SCHEMA)), GrammarKind.JSON_SCHEMA),
        (FormOptions(regex="-?[0-9]+"), GrammarKind.REGEX),
        (FormOptions(choices=("yes", "no")), GrammarKind.CHOICE),
        (FormOptions(grammar=gbnf), GrammarKind.REGEX),
        (FormOptions(grammar=lark), GrammarKind.LARK),
    ):
        form = form_of(options)
        assert form is not None
        assert form.kind is kind
    assert form_of(FormOptions()) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (FormOptions(json_schema="nowhere.json"), "--json-schema: nowhere.json cannot be read"),
        (FormOptions(json_schema='{"a'), "--json-schema: the schema is not JSON"),
        (FormOptions(json_schema='{"type": 5}'), "--json-schema.type: must be the name of a type"),
        (FormOptions(json_schema="false"), "--json-schema: the schema `false`"),
        (FormOptions(regex="(a"), "--regex: the expression has a `(`"),
        (FormOptions(choices=("",)), "--choice: must hold"),
        (FormOptions(grammar=Path("nowhere")), "--grammar: nowhere cannot be read"),
        (FormOptions(regex="a", choices=("b",)), "--choice: cannot be combined with --regex"),
    ],
)
def test_what_is_wrong_is_named_by_its_option(options: FormOptions, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        form_of(options)
    assert caught.value.message.startswith(text)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    (tmp_path / "b").write_text("[1")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        form_of(FormOptions(grammar=tmp_path / "a"))
    with pytest.raises(InvalidRequest, match="b is not JSON"):
        form_of(FormOptions(json_schema=str(tmp_path / "b")))


def test_every_kind_of_prompt_gets_the_grammar(tmp_path: Path) -> None:
    case = Case(tmp_path)
    form = form_of(FormOptions(choices=("yes", "no")))
    ask = {"messages": [{"role": "user", "content": "Odd?"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    case.write(
        {"id": "prompt", "prompt": "Odd?"},
        {"id": "ids", "token_ids": [0, 20]},
        {"id": "messages", **ask},
        {"id": "thinking", "prompt": "Odd?", "thinking": True},
        {"id": "tools", **ask, "tools": [tool]},
    )
    engine = case.engine()
    assert case.run(engine, prompts=PromptOptions(SamplingParams(), form=form)) == 0
    grammars = [request.sampling.grammar for request in engine.requests]
    kinds = [None if grammar is None else grammar.kind for grammar in grammars]
    assert kinds == [GrammarKind.CHOICE] * 4 + [GrammarKind.LARK]
    triggers = [grammar.trigger_token_ids for grammar in grammars if grammar is not None]
    assert [bool(ids) for ids in triggers] == [False, False, False, True, False]
    engine = case.engine()
    assert case.ask(engine, "1 +", PromptOptions(SamplingParams(), raw=True, form=form)) == 0
    assert engine.requests[0].sampling.grammar is not None


def run(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--choice", "maybe", "--choice", "never"], {"maybe", "never"}),
        (["--regex", "x[yz]"], {"xy", "xz"}),
    ],
)
def test_the_embedded_model_answers_in_the_form(
    options: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "tiny", "Is 7 odd?", "--seed", "1", "--max-tokens", "20", *options]
    assert run(arguments) == 0
    assert capsys.readouterr().out.strip() in expected


def test_what_only_the_compiler_sees_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    schema = '{"type": "string", "pattern": "^a{5}$", "maxLength": 3}'
    assert run(["generate", "tiny", "Hi", "--json-schema", schema]) == 2
    assert "cannot be compiled" in capsys.readouterr().err
