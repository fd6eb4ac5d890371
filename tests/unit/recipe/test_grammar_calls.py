"""Grammars of calls: whatever they allow, both parsers read as valid arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.errors import InvalidRequest
from headrace.recipe.chunks import EngineFinish, Finish, Tokens
from headrace.recipe.conversation import ToolCall, ToolDefinition
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.grammar.calls import Markup
from headrace.recipe.grammar.rules import AnswerRules, FormatRule, answer_rules, schema_rule
from headrace.recipe.grammar.spec import AnswerStart, grammar_spec
from headrace.recipe.grammar.tool_rules import ToolRules, tool_rule
from headrace.recipe.options import Level, ModelVersion
from headrace.recipe.parser.items import CallArguments, CallNamed, Content
from headrace.recipe.parser.parser import OutputParser
from headrace.recipe.render import CALL_FORMATS
from headrace.recipe.render.prompt import PromptBuilder
from tests.json_judge import is_valid
from tests.unit.recipe.grammars import (
    accepts,
    matcher_of,
    random_answer,
    tiny_codec,
    tiny_vocabulary,
)

CODEC = tiny_codec()
TOKENIZER = CODEC.tokenizer
DSML = TOKENIZER.added[CODEC.special.dsml]
THINKING_END = TOKENIZER.added[CODEC.special.thinking_end]
EOS = TOKENIZER.added[CODEC.special.eos]
# Without them random text would hardly ever end.
ENDS = frozenset(
    [DSML, THINKING_END]
    + [
        i
        for i in range(TOKENIZER.vocab_size)
        if TOKENIZER.token_bytes(i) in (b"<", b"</", b'"', b"}", b"]", b"\n", b"\n<")
    ]
)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "unit": {"enum": ["c", "f", 3]},
        "days": {"type": ["integer", "null"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    },
    "required": ["city"],
}
LIST = {
    "type": "object",
    "properties": {
        "first": {"$ref": "#/$defs/node"},
        "day": {"type": "string", "format": "date"},
        "path": {"type": "string", "pattern": '^<[a-z]*>/"$'},
        "flag": {"type": "boolean"},
        "any": {},
    },
    "required": ["first", "flag"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
        }
    },
}
OPEN = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "kind": {"const": "a<b"}},
    "additionalProperties": {"type": "integer"},
}
SCHEMAS = [WEATHER, {"type": "object", "properties": {}}, LIST, OPEN]
RESULT = schema_rule(
    {"type": "object", "properties": {"r": {"type": "integer"}}, "required": ["r"]}, "form"
)


def tool(schema: Any, name: str = "get", strict: bool | None = True) -> ToolDefinition:
    return ToolDefinition(name, None, schema, strict, path="tools[0].function.parameters")


def rules_of(
    *schemas: Any,
    strict: bool | None = True,
    required: bool = True,
    parallel: bool = True,
    form: FormatRule | None = None,
) -> AnswerRules:
    tools = [tool(schema, f"t{i}", strict) for i, schema in enumerate(schemas)]
    made = ToolRules(tuple(tool_rule(entry, entry.parameters) for entry in tools))
    rules = answer_rules(form, made, required=required, parallel=parallel)
    assert rules is not None
    return rules


def spec_of(
    rules: AnswerRules,
    version: ModelVersion = ModelVersion.V41,
    *,
    thinking: bool = False,
    in_calls: bool = False,
) -> GrammarSpec:
    start = AnswerStart(thinking, in_calls, THINKING_END)
    spec = grammar_spec(rules, start, Markup(CALL_FORMATS[version], DSML))
    assert spec is not None
    return spec


def parse(ids: list[int], level: Level, parsing: ParsingOptions) -> tuple[list[list[str]], str]:
    """Calls as [name, arguments], and the content."""
    parser = OutputParser(parsing, CODEC.special, level, TOKENIZER)
    calls: list[list[str]] = []
    content = ""
    for item in [*parser.push(Tokens(ids)), *parser.push(Finish(EngineFinish.STOP, 1))]:
        if isinstance(item, CallNamed):
            calls.append([item.name, ""])
        elif isinstance(item, CallArguments):
            calls[-1][1] += item.text
        elif isinstance(item, Content):
            content += item.text
    return calls, content


def markup(text: str) -> list[int]:
    """Ids of a text in which the spelling of the DSML token is the token."""
    parts = [TOKENIZER.encode(part) for part in text.split("|D|")]
    ids = parts[0]
    for part in parts[1:]:
        ids = [*ids, DSML, *part]
    return ids


MODES = {
    # thinking, required, a form as well, what comes before the grammar holds
    "in the block": (False, True, False, []),
    "required": (False, True, False, []),
    "auto": (False, False, False, [*TOKENIZER.encode("Well,\n\n<"), DSML]),
    "required, thinking": (True, True, False, [*TOKENIZER.encode("hm"), THINKING_END]),
    "required, moved": (True, True, False, [*TOKENIZER.encode("hm\n\n<"), DSML, THINKING_END]),
    "auto or form": (False, False, True, []),
    "auto or form, thinking": (True, False, True, []),
}


@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.parametrize("version", ModelVersion)
@pytest.mark.parametrize("mode", MODES)
def test_random_calls_parse_to_valid_arguments(
    mode: str, version: ModelVersion, strict: bool | None
) -> None:
    thinking, required, with_form, before = MODES[mode]
    inside = mode == "in the block"
    rules = rules_of(*SCHEMAS, strict=strict, required=required, form=RESULT if with_form else None)
    matcher = matcher_of(
        spec_of(rules, version, thinking=thinking, in_calls=inside), tiny_vocabulary()
    )
    parsing = ParsingOptions(
        True, inside, False, ThinkingStage.REASONING_START if thinking else None, ()
    )
    validators = [jsonschema_rs.validator_for(s, validate_formats=True) for s in SCHEMAS]
    draw = random.Random(f"{mode}{version}{strict}")
    finished = 0
    while finished < 6:
        ids = random_answer(matcher, draw, EOS, prefer=ENDS)
        if ids is None:
            continue
        finished += 1
        for level in Level:
            calls, content = parse([*before, *ids], level, parsing)
            if with_form and not calls:
                assert isinstance(json.loads(content)["r"], int)
            else:
                assert calls
            for name, arguments in calls:
                assert is_valid(validators[int(name[1:])], arguments), (name, arguments)


@pytest.mark.parametrize("version", ModelVersion)
def test_calls_as_prompts_write_them_are_accepted_in_any_order(version: ModelVersion) -> None:
    arguments = {"flag": True, "day": "2024-02-29", "any": "x</y", "path": '<a>/"'}
    arguments["first"] = {"value": 1, "next": {"value": 2, "next": None}}  # type: ignore[assignment]
    names = list(arguments)
    draw = random.Random(3)
    rules = rules_of(*SCHEMAS)
    matcher = matcher_of(spec_of(rules, version), tiny_vocabulary())
    for _ in range(10):
        draw.shuffle(names)
        shuffled = {name: arguments[name] for name in names}
        calls = [ToolCall("1", "t2", json.dumps(shuffled)), ToolCall("2", "t1", "{}")]
        assert accepts(matcher, written(calls, version))
        del shuffled["flag"]
        assert not accepts(matcher, written([ToolCall("1", "t2", json.dumps(shuffled))], version))


def written(calls: list[ToolCall], version: ModelVersion) -> list[int]:
    """Calls as a prompt shows them."""
    prompt = PromptBuilder("")
    CALL_FORMATS[version].write(prompt, calls, CODEC.special.dsml)
    return TOKENIZER.encode_prompt(prompt.build())


OPENING = "\n\n<|D| calls>\n"
END = "</|D| calls>"


def call(name: str, *parameters: str) -> str:
    inside = "".join(f"<|D| parameter {entry}</|D| parameter>\n" for entry in parameters) or "\n"
    return f'<|D| invoke name="{name}">\n{inside}</|D| invoke>\n'


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        (call("t0", 'name="city" string="true">Bern'), True, True),
        (call("t0", 'name="city" string="true">Zurich'), False, False),
        (call("t0"), False, False),
        (call("t9"), False, False),
        (call("t1"), True, True),
        (call("t1", 'name="x" string="true">y'), False, False),
        (call("t0", 'name="city" string="true">a', 'name="city" string="true">b'), False, False),
        (call("t0", 'name="city" string="true">a', 'name="town" string="true">b'), False, False),
        (call("t0", 'name="city" string="false">"Bern"'), False, False),
        (call("t0", 'name="city" string="true">a', 'name="days" string="false">2'), True, True),
        (call("t0", 'name="city" string="true">a', 'name="days" string="false">2.5'), False, False),
        (call("t0", 'name="city" string="true">a', 'name="unit" string="false">3'), True, True),
        (call("t0", 'name="city" string="true">a', 'name="unit" string="true">3'), False, False),
        (
            call("t0", 'name="city" string="true">a', 'name="note" string="false">["b", "c"]'),
            True,
            True,
        ),
        (call("t0", 'name="city" string="true">'), True, True),
        (call("t0", 'name="city" string="true">a</b'), True, True),
        (call("t1") + call("t1"), True, True),
        (call("t2", 'name="uniq" string="false">[1, 2]'), True, True),
        (call("t2", 'name="uniq" string="true">[1, 2]'), False, False),
        (call("t3", 'name="free" string="true">text'), True, True),
        (call("t3", 'name="free" string="false">{"a": [1]}'), True, True),
    ],
)
def test_single_calls(text: str, strict: bool, loose: bool) -> None:
    unique = {"type": "object", "properties": {"uniq": {"type": "array", "uniqueItems": True}}}
    free = {"type": "object", "additionalProperties": True}
    others = [WEATHER, {"type": "object", "properties": {}}]
    for declared, expected in ((True, strict), (None, loose)):
        tools = [tool(schema, f"t{i}", declared) for i, schema in enumerate(others)]
        # The third one cannot be strict.
        tools += [tool(unique, "t2", None), tool(free, "t3", declared)]
        made = ToolRules(tuple(tool_rule(entry, entry.parameters) for entry in tools))
        rules = answer_rules(None, made, required=True, parallel=True)
        assert rules is not None
        matcher = matcher_of(spec_of(rules), tiny_vocabulary())
        assert accepts(matcher, markup(OPENING + text + END)) is expected


def test_one_call_at_most_without_parallel_calls() -> None:
    matcher = matcher_of(spec_of(rules_of(WEATHER, parallel=False)), tiny_vocabulary())
    one = call("t0", 'name="city" string="true">a')
    assert accepts(matcher, markup(OPENING + one + END))
    assert not accepts(matcher, markup(OPENING + one + one + END))


def test_where_the_grammar_begins() -> None:
    rules = rules_of(WEATHER)
    required = spec_of(rules, thinking=True)
    assert (required.trigger_token_ids, required.bound_token_id) == ((THINKING_END,), DSML)
    assert required.required
    assert (spec_of(rules).trigger_token_ids, spec_of(rules).bound_token_id) == ((), None)
    for thinking in (False, True):
        auto = spec_of(rules_of(WEATHER, required=False), thinking=thinking)
        assert (auto.kind, auto.trigger_token_ids) == (GrammarKind.LARK, (DSML,))
        assert not auto.required
        form = AnswerRules(RESULT)
        expected = (THINKING_END,) if thinking else ()
        assert spec_of(form, thinking=thinking).trigger_token_ids == expected
        assert spec_of(form, thinking=thinking).required
    assert (
        grammar_spec(
            AnswerRules(),
            AnswerStart(False, False, THINKING_END),
            Markup(CALL_FORMATS[ModelVersion.V41], DSML),
        )
        is None
    )


def test_equal_tools_give_the_same_text_once() -> None:
    rules = rules_of(WEATHER)
    assert spec_of(rules).text is spec_of(rules).text


def test_many_parameters_come_in_the_order_of_the_schema() -> None:
    names = [f"p{i}" for i in range(70)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": ["p3", "p69"],
    }
    matcher = matcher_of(spec_of(rules_of(schema)), tiny_vocabulary())

    def fits(*chosen: str) -> bool:
        parameters = [f'name="{name}" string="false">true' for name in chosen]
        return accepts(matcher, markup(OPENING + call("t0", *parameters) + END))

    assert fits("p3", "p69") and fits("p1", "p3", "p40", "p69")
    assert not fits("p69", "p3") and not fits("p3")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "object", "properties": {"a b": {}}}, "properties['a b']"),
        ({"type": "object", "properties": {'a"b': {}}}, "properties['a\"b']"),
        ({"type": "object", "required": ["a"], "additionalProperties": True}, "required"),
        ({"type": "object", "properties": {"a": {"pattern": "(?=a)"}}}, "properties.a.pattern"),
        ({"type": "object", "properties": {"a": {"odd": 1}}}, "properties.a.odd"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
    ],
)
def test_strict_tools_that_cannot_be_kept_are_refused(schema: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_rule(tool(schema), schema)
    assert str(caught.value.param).endswith(path)
    assert str(caught.value.param).startswith("tools[0].function.parameters")
    loose = tool_rule(tool(schema, strict=None), schema)
    matcher_of(spec_of(AnswerRules(None, ToolRules((loose,)), True)), tiny_vocabulary())


def test_grammars_that_are_too_large_are_refused() -> None:
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"enum": [f"{i}" * 50]} for i in range(200)},
    }
    with pytest.raises(InvalidRequest, match="the grammar of their calls"):
        spec_of(rules_of(*[schema] * 100))
