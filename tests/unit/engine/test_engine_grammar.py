"""Grammars through the whole engine, with every other thing that a request may ask for."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from headrace.config import EngineConfig
from headrace.core.grammar import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_TRIGGER_TOKENS,
    GrammarKind,
    GrammarSpec,
)
from headrace.core.output import FinishReason, RequestOutput, TokenChunk
from headrace.core.request import Request
from headrace.core.sampling import LogprobsMode, SamplingParams
from headrace.engine import wire
from headrace.engine.engine import Engine
from headrace.engine.grammar.llguidance_backend import LlguidanceBackend
from headrace.engine.llm import LLM
from headrace.errors import ConfigError, InvalidGrammar, InvalidRequest, rebuild_error
from tests.unit.engine.fakes import EOS, VOCAB, FakeModel, FakeTokenizer
from tests.unit.engine.grammar.grammars import Letters, schema

CONFIG = EngineConfig(dtype="float64", kv_quant=False, num_blocks=40, seed=1)
PROMPT = [20, 30, 40]
PERSON = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 3, "maximum": 400},
        "b": {"enum": ["x", "yz", None]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "s": {"type": "string", "maxLength": 4},
    },
    "required": ["a", "b", "s"],
    "additionalProperties": False,
}
PARAMS = SamplingParams(grammar=schema(PERSON), max_tokens=400)
DIGITS = GrammarSpec(GrammarKind.REGEX, "[0-9]{3,6}")


def make(**changes: Any) -> LLM:
    engine = Engine(replace(CONFIG, **changes), FakeModel(), tokenizer=Letters())
    return LLM.from_engine(engine, Letters())


def run(llm: LLM, *params: SamplingParams, prompt: list[int] = PROMPT) -> list[RequestOutput]:
    outputs = llm.generate([prompt] * len(params), list(params))
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    return outputs


def digits(**changes: Any) -> SamplingParams:
    return SamplingParams(grammar=DIGITS, max_tokens=20, seed=3, **changes)


def test_the_vocabulary_fits_the_model() -> None:
    assert Letters.vocab_size == VOCAB


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7}])
def test_answers_of_every_kind_fit(changes: dict[str, Any]) -> None:
    specs = {
        r"\{.*\}": PARAMS.grammar,
        r"[0-9]{3,6}": DIGITS,
        "yes|no|maybe so": GrammarSpec(GrammarKind.CHOICE, '["yes", "no", "maybe so"]'),
        "ab[xyz]c": GrammarSpec(GrammarKind.LARK, 'start: "ab" /[xyz]/ "c"'),
    }
    params = [
        SamplingParams(grammar=spec, max_tokens=600, seed=seed, **changes)
        for spec in specs.values()
        for seed in range(3)
    ]
    outputs = run(make(), *params)
    for number, output in enumerate(outputs):
        pattern = list(specs)[number // 3]
        if output.finish is not FinishReason.LENGTH:  # greedy may repeat white space for ever
            assert output.finish is FinishReason.STOP
            assert output.token_ids[-1] == EOS
            assert re.fullmatch(pattern, output.text.strip(), re.DOTALL), output.text
            if number < 3:
                assert jsonschema_rs.is_valid(PERSON, json.loads(output.text))
        else:
            assert changes.get("temperature") == 0.0


def test_tokens_do_not_depend_on_neighbours_or_caches() -> None:
    params = [replace(PARAMS, seed=seed) for seed in range(6)]
    alone = [run(make(grammar_cache_bytes=0), one)[0].token_ids for one in params]
    shared = make()
    free = replace(PARAMS, grammar=None, max_tokens=30)
    together = run(shared, *params, free, digits())
    assert [output.token_ids for output in together[:6]] == alone
    again = run(shared, *params)  # all states are known
    assert [output.token_ids for output in again] == alone


def test_choices_have_matchers_of_their_own() -> None:
    (first, *others) = run(make(), replace(digits(), n=8))
    assert len({output.token_ids for output in (first, *others)}) > 2
    for output in (first, *others):
        assert re.fullmatch("[0-9]{3,6}", output.text)


def test_logprobs_are_of_the_model_or_of_what_is_drawn_from() -> None:
    raw, processed = run(
        make(),
        digits(logprobs=VOCAB),
        digits(logprobs=VOCAB, logprobs_mode=LogprobsMode.PROCESSED),
    )
    assert raw.token_ids == processed.token_ids
    assert raw.logprobs is not None
    assert processed.logprobs is not None
    allowed = {*Letters().encode("0123456789"), EOS}
    for record in processed.logprobs:
        drawable = {
            token
            for token, logprob in zip(record.top_ids, record.top_logprobs, strict=True)
            if logprob > float("-inf")
        }
        assert drawable <= allowed
    assert all(min(record.top_logprobs) > float("-inf") for record in raw.logprobs)


def test_stop_strings_and_stop_tokens_end_an_answer_inside_its_grammar() -> None:
    (free,) = run(make(), digits())
    text, ids = run(
        make(), digits(stop=(free.text[1],)), digits(stop_token_ids=(free.token_ids[1],))
    )
    assert text.stop == free.text[1]
    assert ids.stop == free.token_ids[1]
    assert len(text.token_ids) <= len(free.token_ids)


def test_min_tokens_holds_until_the_grammar_is_complete() -> None:
    for seed in range(5):
        (output,) = run(make(), replace(digits(min_tokens=6), seed=seed))
        assert len(output.text) >= 5
    (output,) = run(make(), digits(min_tokens=15))
    assert len(output.text) == 6  # six digits at most: then only the end is left
    assert output.finish is FinishReason.STOP


@pytest.mark.parametrize("changes", [{"ignore_eos": True}, {"min_tokens": 15}])
def test_a_complete_answer_ends_once_whatever_is_asked_for(changes: dict[str, Any]) -> None:
    """An EOS that is ignored, or too early for min_tokens, is none of the answer's text."""
    for seed in range(4):
        (output,) = run(make(), replace(digits(**changes), seed=seed))
        assert output.finish is FinishReason.STOP
        assert output.token_ids[-1] == EOS and output.token_ids.count(EOS) == 1
        assert output.text.isdigit() and len(output.text) == len(output.token_ids) - 1


def test_penalties_and_bias_come_before_the_mask() -> None:
    seven, x = Letters().encode("7x")
    (output,) = run(make(), digits(logit_bias={seven: 100.0, x: 100.0}))
    assert set(output.text) == {"7"}


@pytest.mark.parametrize("reuse", ["bounded", "off"])
def test_preempted_and_resumed_answers_are_the_same(reuse: str) -> None:
    """Long prompts in little memory: rows give way and are rebuilt in the middle of answers."""
    prompt = [2 + i % 45 for i in range(120)]
    long = GrammarSpec(GrammarKind.REGEX, "([a-z]{1,4}[0-9]){60,90}")
    params = [SamplingParams(grammar=long, max_tokens=150, seed=seed) for seed in range(3)]
    (mark,) = Letters().encode("@")
    after = replace(long, trigger_token_ids=(mark,))
    params.append(replace(params[0], grammar=after, logit_bias={mark: 8.0}))
    roomy = make(replay=reuse)
    tight = make(num_blocks=6, replay=reuse)
    expected = [output.token_ids for output in run(roomy, *params, prompt=prompt)]
    assert [output.token_ids for output in run(tight, *params, prompt=prompt)] == expected
    assert tight.engine.stats().preemptions > 0
    assert [output.token_ids for output in run(roomy, *params, prompt=prompt)] == expected


def answers(spec: GrammarSpec, max_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(grammar=spec, max_tokens=max_tokens)
    return run(make(), *(replace(params, seed=seed) for seed in range(40)))


def test_a_grammar_after_thinking_leaves_the_thinking_free() -> None:
    """SO-2, SO-5: free until the end of thinking, bound after it."""
    (end,) = Letters().encode("@")
    bound, free = 0, ""
    for output in answers(replace(DIGITS, trigger_token_ids=(end,)), 120):
        thinking, mark, answer = output.text.partition("@")
        free += thinking
        if mark:
            bound += 1
            ended = output.finish is FinishReason.STOP
            assert re.fullmatch("[0-9]{3,6}" if ended else "[0-9]*", answer)
    assert bound > 10
    assert len(set(free)) > 30


@pytest.mark.parametrize("bias", [0.0, 20.0])
def test_no_answer_ends_before_a_grammar_that_is_required(bias: float) -> None:
    """However much the model wants to end; stop tokens and stop strings of the request still do."""
    (end, stop) = Letters().encode("@z")
    spec = replace(DIGITS, trigger_token_ids=(end,))
    params = SamplingParams(grammar=spec, max_tokens=60, logit_bias={EOS: bias})
    finished = 0
    for output in run(make(), *(replace(params, seed=seed) for seed in range(30))):
        _, mark, answer = output.text.partition("@")
        if output.finish is FinishReason.STOP:
            finished += 1
            assert mark and re.fullmatch("[0-9]{3,6}", answer)
        else:
            assert output.finish is FinishReason.LENGTH
            assert EOS not in output.token_ids
    assert finished > 3
    likely = replace(params, logit_bias={EOS: 20.0, stop: 20.0}, temperature=1.0, seed=1)
    for changes in ({"stop_token_ids": (stop,)}, {"stop": ("z",)}):
        (output,) = run(make(), replace(likely, **changes))
        assert (output.finish, output.stop) == (FinishReason.STOP, next(iter(changes.values()))[0])
        assert "@" not in output.text
    free = replace(params, grammar=replace(spec, required=False), logit_bias={EOS: 100.0})
    assert run(make(), free)[0].token_ids == (EOS,)


def test_an_opened_call_is_bound_also_where_no_call_was_asked_for() -> None:
    """SO-3: free text; once the mark is out, the rest follows the grammar."""
    mark_ids = tuple(Letters().encode("x"))
    spec = GrammarSpec(GrammarKind.REGEX, "[0-9]{2}/[0-9]z", mark_ids, required=False)
    opened = 0
    for output in answers(spec, 150):
        _, mark, call = output.text.partition("x")
        if mark and output.finish is FinishReason.STOP:
            opened += 1
            assert re.fullmatch("[0-9]{2}/[0-9]z", call)
    assert 10 < opened < 40


def test_the_first_token_of_a_call_forces_the_others() -> None:
    """The mark needs several tokens: once it has begun it cannot be left half way."""
    mark = tuple(Letters().encode("xyz"))
    begun = 0
    for output in answers(replace(DIGITS, trigger_token_ids=mark, bound_token_id=mark[0]), 200):
        if "x" in output.text and output.finish is FinishReason.STOP:
            begun += 1
            assert re.fullmatch("[^x]*xyz[0-9]{3,6}", output.text)
    assert begun > 10


# --- what cannot work ----------------------------------------------------------------------------

BAD = {
    "unclosed regex": (GrammarSpec(GrammarKind.REGEX, "(a"), "unclosed group"),
    "look-around": (GrammarSpec(GrammarKind.REGEX, "(?=a)b"), "look-around"),
    "back-reference": (GrammarSpec(GrammarKind.REGEX, r"(a)\1"), "backreferences"),
    "no lark": (GrammarSpec(GrammarKind.LARK, "start: nothing"), "nothing"),
    "deep lark": (GrammarSpec(GrammarKind.LARK, "start: " + "(" * 50_000 + '"a"'), "deep"),
    "choices": (GrammarSpec(GrammarKind.CHOICE, "[1]"), "array of 1 to"),
    "no choice": (GrammarSpec(GrammarKind.CHOICE, "[]"), "array of 1 to"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_ends_its_own_request_with_the_reason(name: str) -> None:
    spec, reason = BAD[name]
    llm = make()
    (expected,) = run(llm, digits())
    good, bad = run(llm, digits(), SamplingParams(grammar=spec, max_tokens=5))
    assert good.token_ids == expected.token_ids
    assert bad.finish is FinishReason.ERROR
    assert reason in (bad.error or "")
    assert len(bad.error or "") < 400
    with pytest.raises(InvalidGrammar, match=re.escape(reason)):  # known by now
        run(llm, SamplingParams(grammar=spec, max_tokens=5))


REFUSED = {
    "no JSON": ("{", "grammar", "not valid JSON"),
    "no schema": ("[1]", "grammar", "must be an object"),
    "NaN": ('{"minimum": NaN}', "grammar.minimum", "is no number of JSON"),
    "surrogate": (r'{"const": "\ud800"}', "grammar", "lone surrogate"),
    "false": ("false", "grammar", "allows no answer"),
    "endless reference": ({"$ref": "#"}, "grammar", "leads back to itself"),
    "no target": ({"$ref": "#/$defs/a"}, "grammar.$ref", "leads nowhere"),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, "grammar.minimum", "bounds"),
    "lengths": ({"type": "string", "minLength": 5, "maxLength": 3}, "grammar.minLength", "greater"),
    "empty enum": ({"enum": []}, "grammar.enum", "at least one"),
    "false member": (
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "grammar.required",
        "not allowed",
    ),
    "unsupported": (
        {"properties": {"a": {"items": {"type": "array", "uniqueItems": True}}}},
        "grammar.properties.a.items.uniqueItems",
        "not supported",
    ),
    "lenient": ({"x-guidance": {"lenient": True}}, "grammar.x-guidance", "not supported"),
    "deep schema": ('{"items":' * 500 + "{}" + "}" * 500, "grammar", "deeper than 64 levels"),
    "very deep": ("[" * 100_000, "grammar", "too deep"),
    # As they are, these would end the process, or keep a thread for minutes.
    "chain": (
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}
            | {"3000": {"type": "integer"}},
        },
        "grammar",
        "more than 500",
    ),
    "multiple": ({"type": "integer", "multipleOf": 99999999}, "grammar.multipleOf", "multipleOf"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("lark", [False, True])
def test_schemas_are_checked_as_over_http(name: str, lark: bool) -> None:
    """SO-4: by the schema reader, before anything runs, also inside of a Lark grammar."""
    value, param, reason = REFUSED[name]
    text = value if isinstance(value, str) else json.dumps(value)
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, text)
    if lark:
        if not text.startswith("{") or name in ("no JSON", "NaN", "deep schema"):
            return  # the library says what it thinks of it
        spec = GrammarSpec(GrammarKind.LARK, f'start: "x" value\nvalue: %json {text} "y"')
        param = "grammar"
    llm = make()
    for asked in (
        lambda: run(llm, digits(), SamplingParams(grammar=spec, max_tokens=5)),
        lambda: llm.engine.add(Request("r", tuple(PROMPT), SamplingParams(grammar=spec))),
    ):
        with pytest.raises(InvalidGrammar, match=reason) as caught:
            asked()
        assert str(caught.value.param).startswith(param)
        assert len(caught.value.message) < 400
        assert ("%json in line 2" in caught.value.message) is lark
    assert not llm.engine.has_work()


def test_schemas_mean_what_they_mean_over_http() -> None:
    """Formats, anchors and open patterns are enforced, annotations and unknown keywords are not."""
    value = {
        "title": "a date",
        "unknown": 5,
        "type": "object",
        "properties": {
            "d": {"$ref": "#day"},
            "p": {"type": "string", "pattern": "b[0-9]", "maxLength": 5},
        },
        "required": ["d", "p"],
        "additionalProperties": False,
        "$defs": {"day": {"$anchor": "day", "type": "string", "format": "date"}},
    }
    lark = f"start: %json {json.dumps(value, indent=1)}"
    for spec in (schema(value), GrammarSpec(GrammarKind.LARK, lark)):
        bias = dict.fromkeys(Letters().encode(" \n"), -9.0)
        params = SamplingParams(grammar=spec, max_tokens=200, logit_bias=bias)
        outputs = run(make(), *(replace(params, seed=seed) for seed in range(4)))
        for output in outputs:
            assert output.finish is FinishReason.STOP
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", json.loads(output.text)["d"])
            assert re.search("b[0-9]", json.loads(output.text)["p"])


def test_lines_of_errors_behind_a_schema_stay() -> None:
    text = 'start: "a" %json {\n "type": "integer"\n}\n\nother: ?'
    (output,) = run(make(), SamplingParams(grammar=GrammarSpec(GrammarKind.LARK, text)))
    assert "line 5, column" in (output.error or "")


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a(a|b){20}c",
        "(a?){60}a{60}",
        "((a+)+)+b",
        "([a-z]{1000}){1000}",
        "(.*a){25}",
    ],
)
def test_a_catastrophic_pattern_costs_its_own_request_at_most(pattern: str) -> None:
    """Whatever it is, the engine goes on: it is answered, cut by length, or refused."""
    llm = make()
    (expected,) = run(llm, digits())
    bad = SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, pattern), max_tokens=60, seed=2)
    good, answer = run(llm, digits(), bad)
    assert good.token_ids == expected.token_ids
    if answer.finish is FinishReason.ERROR:
        assert "grammar" in (answer.error or "")


def test_an_error_chunk_names_the_code_of_a_bad_request() -> None:
    engine = make().engine
    engine.add(Request("bad", tuple(PROMPT), SamplingParams(grammar=BAD["no choice"][0])))
    (chunk,) = until_output(engine)
    assert (chunk.finish, chunk.error_code) == (FinishReason.ERROR, "invalid_grammar")
    error = rebuild_error("invalid_grammar", chunk.error or "")
    assert isinstance(error, InvalidGrammar)
    assert error.http_status == 400


def test_the_code_crosses_the_process_border() -> None:
    engine = make().engine
    engine.add(Request("bad", tuple(PROMPT), replace(PARAMS, grammar=BAD["no choice"][0], n=2)))
    output = engine.step()
    while not len(output):
        output = engine.step()
    frame = wire.encode_frame(wire.pack_output(output))
    message = wire.decode_event(frame[wire.HEADER_BYTES :])
    assert isinstance(message, wire.Outputs)
    back = wire.unpack_output(message, {0: ("bad", 0), 1: ("bad", 1)})
    assert [chunk.error_code for chunk in back] == ["invalid_grammar"] * 2


def test_requests_with_grammars_cross_the_process_border() -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "é+", (4, 5), 4)
    request = Request("r", (1,), SamplingParams(grammar=spec))
    frame = wire.encode_frame(wire.Submit(request))
    command = wire.decode_command(frame[wire.HEADER_BYTES :])
    assert isinstance(command, wire.Submit)
    assert command.request == request


def until_output(engine: Engine) -> list[TokenChunk]:
    for _ in range(1000):
        chunks = list(engine.step())
        if chunks:
            return chunks
    raise AssertionError("nothing came")


def test_requests_wait_for_their_grammar_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, compile_ = threading.Event(), LlguidanceBackend.compile

    def slow(self: LlguidanceBackend, kind: GrammarKind, text: str) -> Any:
        assert gate.wait(10)
        return compile_(self, kind, text)

    monkeypatch.setattr(LlguidanceBackend, "compile", slow)
    engine = make().engine
    engine.add(Request("slow", tuple(PROMPT), digits(n=2)))
    engine.add(Request("gone", tuple(PROMPT), PARAMS))
    engine.add(Request("free", tuple(PROMPT), SamplingParams(max_tokens=5, ignore_eos=True)))
    chunks: list[TokenChunk] = []
    for _ in range(20):
        chunks += list(engine.step())
    assert {chunk.request_id for chunk in chunks} == {"free"}
    assert chunks[-1].finish is FinishReason.LENGTH
    assert engine.stats().waiting == 3
    assert engine.has_work()
    engine.abort("gone")
    (aborted,) = engine.step()
    assert (aborted.request_id, aborted.finish) == ("gone", FinishReason.ABORT)
    gate.set()
    while engine.has_work():
        chunks += list(engine.step())
    done = {(chunk.request_id, chunk.choice) for chunk in chunks if chunk.finish}
    assert done == {("free", 0), ("slow", 0), ("slow", 1)}


def test_the_compile_limit_of_the_config_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def stuck(self: LlguidanceBackend, kind: GrammarKind, text: str) -> Any:
        gate.wait(10)
        raise AssertionError("too late for anybody")

    monkeypatch.setattr(LlguidanceBackend, "compile", stuck)
    (output,) = run(make(grammar_compile_timeout_s=0.05), digits())
    gate.set()
    assert output.finish is FinishReason.ERROR
    assert "longer than 0.05 s" in (output.error or "")


def test_a_grammar_needs_a_vocabulary() -> None:
    engine = Engine(CONFIG, FakeModel(), tokenizer=FakeTokenizer())
    with pytest.raises(InvalidRequest, match="checkpoint's tokenizer"):
        engine.add(Request("r", tuple(PROMPT), digits()))
    assert not engine.has_work()


@pytest.mark.parametrize("changes", [{"trigger_token_ids": (4, 50)}, {"bound_token_id": 99}])
def test_triggers_outside_the_vocabulary_are_refused(changes: dict[str, Any]) -> None:
    spec = replace(DIGITS, **({"trigger_token_ids": (4,)} | changes))
    with pytest.raises(InvalidRequest, match="allowed are 0 to 49"):
        make().engine.check(Request("r", tuple(PROMPT), SamplingParams(grammar=spec)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("ebnf", "a"), "unknown, allowed: json_schema"),
        (("regex", ""), "must not be empty"),
        (("json_object", "{}"), "must be empty"),
        (("regex", "a" * (MAX_GRAMMAR_CHARACTERS + 1)), "at most"),
        (("regex", 5), "must be a string"),
        (("regex", "\ud800"), "lone surrogate"),
        (("regex", "a", (1.5,)), "must be token ids"),
        (("regex", "a", (-1,)), "must be token ids"),
        (("regex", "a", (True,)), "must be token ids"),
        (("regex", "a", "12"), "list of at most"),
        (("regex", "a", tuple(range(MAX_TRIGGER_TOKENS + 1))), "list of at most"),
        (("regex", "a", (), 4), "needs trigger_token_ids"),
        (("regex", "a", (4,), 2**2000), "must be token ids"),
        (("regex", "a", (4,), None, 1), "required must be true or false"),
    ],
)
def test_specs_are_checked_where_they_are_built(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        GrammarSpec(*arguments)
    with pytest.raises(InvalidRequest, match="must be a GrammarSpec"):
        SamplingParams(grammar="regex")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"grammar_backend": "outlines"},
        {"grammar_cache_bytes": -1},
        {"grammar_threads": 0},
        {"grammar_compile_timeout_s": 0.0},
        {"grammar_compile_timeout_s": True},
        {"grammar_cache_dir": ""},
    ],
)
def test_settings_are_checked(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=f"engine.{name}"):
        EngineConfig(**changes)
