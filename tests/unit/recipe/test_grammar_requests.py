"""From requests of all protocols to grammars: which fields ask for what, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.errors import InvalidRequest
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from headrace.recipe.protocols.form_fields import FormFields
from tests.unit.recipe.grammars import accepts, matcher_of, tiny_codec, tiny_vocabulary

CODEC = tiny_codec()
ADDED = CODEC.tokenizer.added
DSML, THINKING_END = ADDED[CODEC.special.dsml], ADDED[CODEC.special.thinking_end]
USER = [{"role": "user", "content": "Say json."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# As it is, it would end the engine process.
CHAIN = {
    "$ref": "#/$defs/0",
    "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": True},
}
BAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}


def body(protocol: str, **fields: Any) -> bytes:
    base: dict[str, Any] = {"model": "tiny"}
    base |= {"input": "Say json."} if protocol == "responses" else {"messages": USER}
    if protocol == "messages":
        base["max_tokens"] = 100
    return json.dumps(base | fields).encode()


def spec(protocol: str, *, thinking: bool = False, **fields: Any) -> GrammarSpec | None:
    options = CODEC.options("tiny", default_thinking_mode=thinking)
    request = convert(protocol, body(protocol, **fields), options)
    sampling = CODEC.sampling(request, 10, 4096)
    assert sampling.grammar == CODEC.grammar(request)
    return sampling.grammar


def error(protocol: str, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        spec(protocol, **fields)
    assert caught.value.http_status == 400
    return caught.value


def chat_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


FORMS: list[tuple[str, dict[str, Any], GrammarKind, list[str], list[str]]] = [
    (
        "chat",
        {"response_format": {"type": "json_object"}},
        GrammarKind.JSON_OBJECT,
        ['{"b": [1]}'],
        ["[1]", "x"],
    ),
    (
        "chat",
        {"response_format": chat_format(SCHEMA)},
        GrammarKind.JSON_SCHEMA,
        ['{"a":1}'],
        ["{}"],
    ),
    (
        "chat",
        {"response_format": chat_format(SCHEMA, strict=True)},
        GrammarKind.JSON_SCHEMA,
        ['{"a": 1}'],
        ['{"a":1,"b":2}', "{}"],
    ),
    (
        "chat",
        {"response_format": {"type": "regex", "regex": "a+|b"}},
        GrammarKind.REGEX,
        ["aa", "b"],
        ["ab", ""],
    ),
    ("chat", {"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, ['{"a":1}'], ["{}"]),
    ("chat", {"guided_json": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, ['{"a":1}'], ["{}"]),
    ("chat", {"guided_regex": "^[ab]{2}$"}, GrammarKind.REGEX, ["ab"], ["a"]),
    ("chat", {"guided_choice": ["yes", "no"]}, GrammarKind.CHOICE, [], []),
    ("chat", {"guided_grammar": 'root ::= "a" | "b" "c"*'}, GrammarKind.REGEX, ["bcc"], ["ac"]),
    ("chat", {"guided_grammar": 'start: "a" start?'}, GrammarKind.LARK, ["aa"], ["b"]),
    (
        "chat",
        {"guided_grammar": 'start: "a" %json {"type": "string", "pattern": "b", "unknown": 1}'},
        GrammarKind.LARK,
        ['a"xby"'],
        ['a"x"', "a1"],
    ),
    (
        "chat",
        {"structured_outputs": {"json": SCHEMA}},
        GrammarKind.JSON_SCHEMA,
        ['{"a":1}'],
        ["{}"],
    ),
    ("chat", {"structured_outputs": {"regex": "a"}}, GrammarKind.REGEX, ["a"], ["b"]),
    ("chat", {"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, [], []),
    ("chat", {"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ["{}"], ["1"]),
    (
        "responses",
        {
            "text": {
                "format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
            }
        },
        GrammarKind.JSON_SCHEMA,
        ['{"a":1}'],
        ["{}"],
    ),
    (
        "responses",
        {"text": {"format": {"type": "json_object"}}},
        GrammarKind.JSON_OBJECT,
        ["{}"],
        ["1"],
    ),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        GrammarKind.JSON_SCHEMA,
        ['{"a":1}'],
        ["{}"],
    ),
    (
        "messages",
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        GrammarKind.JSON_SCHEMA,
        ['{"a":1}'],
        ["{}"],
    ),
]


@pytest.mark.parametrize(("protocol", "fields", "kind", "good", "bad"), FORMS)
def test_a_form_is_enforced_behind_the_reasoning(
    protocol: str, fields: dict[str, Any], kind: GrammarKind, good: list[str], bad: list[str]
) -> None:
    free, bound = spec(protocol, **fields), spec(protocol, thinking=True, **fields)
    assert free is not None and bound is not None
    assert free.kind is kind
    assert free.trigger_token_ids == ()
    assert bound.trigger_token_ids == (THINKING_END,)
    assert (free.kind, free.text) == (bound.kind, bound.text)
    assert free.checked and bound.checked
    if good:
        matcher = matcher_of(free)
        assert [accepts(matcher, text) for text in good + bad] == [True] * len(good) + [
            False
        ] * len(bad)


def test_without_a_wish_there_is_no_grammar() -> None:
    assert spec("chat") is None
    assert spec("chat", response_format={"type": "text"}, structured_outputs={}) is None
    assert spec("chat", structured_outputs={"json_object": False, "backend": "auto"}) is None
    assert spec("responses", text={"format": {"type": "text"}}) is None
    assert spec("messages") is None
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    assert spec("chat", tools=tools, tool_choice="none") is None


def test_level_official_enforces_nothing() -> None:
    data = body("chat", model="DeepSeek-V4.1-Flash", response_format=chat_format(SCHEMA))
    assert convert("chat", data, ConvertOptions(level=Level.OFFICIAL)).rules is None


TOOLS: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    "responses": {"type": "function", "name": "f", "parameters": SCHEMA},
    "messages": {"name": "f", "input_schema": SCHEMA},
}
CHOICES: list[tuple[str, Any, bool]] = [
    # protocol, choice, whether the prompt opens the block
    ("chat", "required", True),
    ("chat", {"type": "function", "function": {"name": "f"}}, True),
    ("responses", "required", True),
    ("responses", {"type": "function", "name": "f"}, True),
    ("messages", {"type": "any"}, False),
    ("messages", {"type": "tool", "name": "f"}, True),
]
CALL = (
    '<|D| invoke name="f">\n<|D| parameter name="a" string="false">1</|D| parameter>\n</|D| invoke>'
)


def ids(text: str) -> list[int]:
    first, *parts = text.split("|D|")
    encode = CODEC.tokenizer.encode
    return [*encode(first), *(i for part in parts for i in (DSML, *encode(part)))]


@pytest.mark.parametrize(("protocol", "choice", "opened"), CHOICES)
def test_a_demanded_call_comes(protocol: str, choice: Any, opened: bool) -> None:
    fields = {"tools": [TOOLS[protocol]], "tool_choice": choice}
    plain = spec(protocol, **fields)
    assert plain is not None and plain.trigger_token_ids == ()
    block = f"\n\n<|D| calls>\n{CALL}\n</|D| calls>"
    expected = block.removeprefix("\n\n<|D| calls>\n") if opened else block
    matcher = matcher_of(plain, tiny_vocabulary())
    assert accepts(matcher, ids(expected))
    assert not accepts(matcher, ids("Hello"))
    thinking = spec(protocol, thinking=True, **fields)
    assert thinking is not None
    assert (thinking.trigger_token_ids, thinking.bound_token_id) == ((THINKING_END,), DSML)
    assert accepts(matcher_of(thinking, tiny_vocabulary()), ids(block))


@pytest.mark.parametrize("protocol", TOOLS)
def test_a_call_that_may_come_is_bound_once_it_begins(protocol: str) -> None:
    for thinking in (False, True):
        found = spec(protocol, thinking=thinking, tools=[TOOLS[protocol]])
        assert found is not None
        assert (found.trigger_token_ids, found.bound_token_id) == ((DSML,), None)
        matcher = matcher_of(found, tiny_vocabulary())
        assert accepts(matcher, ids(f" calls>\n{CALL}\n</|D| calls>"))
        assert not accepts(matcher, ids(f" calls>\n{CALL.replace('1<', 'x<')}\n</|D| calls>"))


def test_one_call_when_the_client_wants_one() -> None:
    two = ids(f" calls>\n{CALL}\n{CALL}\n</|D| calls>")
    for protocol, one in (
        ("chat", {"parallel_tool_calls": False}),
        ("responses", {"parallel_tool_calls": False}),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ):
        for fields, expected in (({}, True), (one, False)):
            found = spec(protocol, tools=[TOOLS[protocol]], **fields)
            assert found is not None
            assert accepts(matcher_of(found, tiny_vocabulary()), two) is expected


def test_strict_tools_have_the_properties_that_prompts_show() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    found = spec("chat", tools=[tool])
    assert found is not None
    matcher = matcher_of(found, tiny_vocabulary())
    call = '<|D| invoke name="f">\n{}</|D| invoke>'
    value = '<|D| parameter name="a" string="true">{}</|D| parameter>\n'
    for inside, expected in (
        ("\n", False),
        (value.format("ab"), True),
        (value.format("abc"), False),
    ):
        text = f" calls>\n{call.format(inside)}\n</|D| calls>"
        # The official normal form has lost `maxLength`; the client has not.
        assert accepts(matcher, ids(text)) is expected


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    (
        "chat",
        {"response_format": chat_format(BAD)},
        "response_format.json_schema.schema.properties.a.pattern",
    ),
    (
        "chat",
        {
            "response_format": chat_format(
                {"type": "object", "properties": {"a": {"type": "string", "x": 1}}}, strict=True
            )
        },
        "response_format.json_schema.schema.properties.a.x",
    ),
    ("chat", {"response_format": {"type": "regex", "regex": r"(a)\1"}}, "response_format.regex"),
    ("chat", {"guided_json": BAD}, "guided_json.properties.a.pattern"),
    ("chat", {"guided_json": "{"}, "guided_json"),
    ("chat", {"guided_json": 3}, "guided_json"),
    ("chat", {"guided_regex": "(?!a)"}, "guided_regex"),
    ("chat", {"guided_regex": ["a"]}, "guided_regex"),
    ("chat", {"guided_choice": []}, "guided_choice"),
    ("chat", {"guided_choice": ["a", ""]}, "guided_choice"),
    ("chat", {"guided_choice": "a"}, "guided_choice"),
    ("chat", {"guided_grammar": ""}, "guided_grammar"),
    ("chat", {"guided_grammar": f"start: %json {json.dumps(CHAIN)}"}, "guided_grammar"),
    ("chat", {"guided_grammar": 'start: %json {"multipleOf": 99999999}'}, "guided_grammar"),
    (
        "chat",
        {"guided_grammar": 'start: %lark {\nstart: %json {"multipleOf": 99999999}\n}'},
        "guided_grammar",
    ),
    ("chat", {"guided_grammar": "root ::= (x"}, "guided_grammar"),
    ("chat", {"guided_grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}, "guided_grammar"),
    ("chat", {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ("chat", {"structured_outputs": []}, "structured_outputs"),
    ("chat", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    (
        "chat",
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
    ),
    ("chat", {"guided_grammar": 'start: "a"', "tools": [TOOLS["chat"]]}, "guided_grammar"),
    (
        "chat",
        {
            "guided_regex": "a",
            "messages": [*USER, {"role": "assistant", "content": "b", "prefix": True}],
        },
        "guided_regex",
    ),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
        "text.format.schema.properties.a.pattern",
    ),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
        "output_config.format.schema.properties.a.pattern",
    ),
    (
        "chat",
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": BAD, "strict": True}}
            ]
        },
        "tools[0].function.parameters.properties.a.pattern",
    ),
    (
        "responses",
        {
            "tools": [
                TOOLS["responses"],
                {"type": "function", "name": "g", "parameters": BAD, "strict": True},
            ]
        },
        "tools[1].parameters.properties.a.pattern",
    ),
    (
        "messages",
        {"tools": [{"name": "f", "input_schema": BAD, "strict": True}]},
        "tools[0].input_schema.properties.a.pattern",
    ),
]


@pytest.mark.parametrize(("protocol", "fields", "param"), ERRORS)
def test_what_cannot_be_enforced_is_named(
    protocol: str, fields: dict[str, Any], param: str
) -> None:
    found = error(protocol, **fields)
    assert found.param == param
    assert found.message.startswith(param)


def test_of_two_forms_both_are_named() -> None:
    message = error("chat", guided_regex="a", guided_json=SCHEMA).message
    assert "guided_regex" in message and "guided_json" in message
    form = {"type": "json_schema", "schema": SCHEMA}
    message = error("messages", output_format=form, output_config={"format": form}).message
    assert "output_config.format" in message and "output_format" in message


def test_forms_beside_tools_allow_either() -> None:
    found = spec("chat", tools=[TOOLS["chat"]], response_format=chat_format(SCHEMA))
    assert found is not None
    matcher = matcher_of(found, tiny_vocabulary())
    assert accepts(matcher, ids('{"a": 1}')) and accepts(
        matcher, ids(f"\n\n<|D| calls>\n{CALL}\n</|D| calls>")
    )
    assert not accepts(matcher, ids("{}"))
    for form in ({"guided_choice": ["yes", "no"]}, {"guided_regex": "yes|no"}):
        found = spec("chat", tools=[TOOLS["chat"]], **form)
        assert found is not None and accepts(matcher_of(found, tiny_vocabulary()), ids("no"))


def test_tools_that_are_not_strict_never_fail_a_request() -> None:
    odd: list[Any] = [
        BAD,
        {"type": "object", "properties": {"a": {"not": {}}}},
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"$ref": "#/$defs/a"}},
        },
        {"type": "object", "properties": {'q"': {}}, "required": ['q"']},
        {"type": "object", "properties": {"a": {"minimum": 3, "maximum": 1}}},
    ]
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}}
        for i, schema in enumerate(odd)
    ]
    found = spec("chat", tools=tools)
    assert found is not None
    matcher_of(found, tiny_vocabulary())


@pytest.mark.parametrize(
    ("protocol", "instead"), [("responses", "text.format"), ("messages", "output_config.format")]
)
@pytest.mark.parametrize("name", FormFields.__struct_fields__)
def test_forms_in_the_words_of_another_protocol_are_refused(
    protocol: str, instead: str, name: str
) -> None:
    for value in (SCHEMA, "[ab]", ["a"], {"type": "json_object"}, True, {}):
        refused = error(protocol, **{name: value})
        assert refused.param == name
        assert refused.message.startswith(f"{name}: ") and instead in refused.message
    for value in (
        None,
        {"guided_json_object": False, "response_format": {"type": "text"}}.get(name),
    ):
        assert spec(protocol, **{name: value}) is None


def test_what_is_no_grammar_has_the_code_of_one() -> None:
    """Also what is found while schemas and expressions are read."""
    for fields in (
        {"guided_json": {"enum": []}},
        {"guided_json": {"minimum": 2, "maximum": 1}},
        {"guided_json": "{"},
        {"guided_regex": "(?=a)"},
        {"guided_grammar": "root ::= x"},
        {"response_format": chat_format({"type": "x"})},
        {"response_format": chat_format({"not": {}}, strict=True)},
    ):
        assert error("chat", **fields).code == "invalid_grammar", fields
    assert error("chat", guided_choice=[1]).code == "invalid_request_error"


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_a_choice_of_no_tool_is_told_by_its_field(protocol: str) -> None:
    choices: dict[str, Any] = {
        "chat": {"type": "function", "function": {"name": "none"}},
        "responses": {"type": "function", "name": "none"},
        "messages": {"type": "tool", "name": "none"},
    }
    refused = error(protocol, tools=[TOOLS[protocol]], tool_choice=choices[protocol])
    assert refused.param == "tool_choice"
    assert refused.message.startswith("Invalid value for 'tool_choice': no function named 'none'")
