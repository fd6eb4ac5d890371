"""Random schemas: whatever their grammars allow is valid, and every valid value is allowed.

A schema that passes the reader compiles, but for contradictions that only an automaton shows.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.schema.schema import check_schema_form
from headrace.errors import InvalidRequest
from tests.bench_records import write_record
from tests.conformance.test_json_schema_suite import serialisations
from tests.json_judge import is_valid
from tests.property.recipe.drawn_schemas import MISSING, run_drawn
from tests.unit.recipe.grammars import accepts, compiled, random_answer

END = 256
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 1.5, -2, 12, -3.5, "", "a", "ab", '\n"\\', "\u00e9", "1"),
    *("2020-01-01", [], [1], [1, 2], ["a", None], [[]], {}, {"a": 1}, {"a": "a"}, {"b": None}),
    *({"a": 1, "b": 2}, {"z": 1}),
]
TYPES = ["string", "integer", "number", "object", "array", "boolean", "null"]
PATTERNS = ["a", "^a", "b$", "^[a-c]*$", r"^\d+$", "[^x]", "a|b", "^(ab|cd)+$", r"\s", "^.{2}$"]
NAMES = ["a", "b", "c", "\u00e9", "a b", '"q"', "x\ny"]
ENDS = frozenset(b'"}]')
# Conditions exclude each other, or the library cannot tell whether patterns do.
CONTRADICTION, UNDETERMINED = "Unsatisfiable schema", "Unable to determine if regex is empty"


class Schemas:
    """Draws schemas; all keywords that are enforced, and some odd combinations."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def whole(self) -> dict[str, Any]:
        node = self.node(0)
        root = node if isinstance(node, dict) else {}
        return {**root, "$defs": {"A": self.node(2), "B": self.node(2)}}

    def node(self, level: int) -> Any:
        if level > 3:
            return self.draw.choice([True, {"type": "integer"}, {"type": "string"}])
        if self.chance(0.05):
            return self.draw.choice([True, True, False])
        schema: dict[str, Any] = {}
        kinds = self.draw.sample(TYPES, 3 if self.chance(0.1) else 1)
        if self.chance(0.8):
            schema["type"] = kinds[0] if len(kinds) == 1 else kinds
        else:
            kinds = TYPES
        for kind, add in (
            ("string", self.strings),
            ("integer", self.numbers),
            ("number", self.numbers),
            ("object", self.objects),
            ("array", self.arrays),
        ):
            if kind in kinds and self.chance(0.7):
                add(schema, level)
        self.combine(schema, level)
        entries = list(schema.items())
        self.draw.shuffle(entries)
        return dict(entries)

    def strings(self, schema: dict[str, Any], level: int) -> None:
        options = {
            "minLength": self.draw.randint(0, 3),
            "maxLength": self.draw.randint(1, 6),
            "pattern": self.draw.choice(PATTERNS),
            "format": self.draw.choice(["date", "time", "ipv4", "uuid", "email"]),
        }
        schema |= {key: value for key, value in options.items() if self.chance(0.3)}

    def numbers(self, schema: dict[str, Any], level: int) -> None:
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self.chance(0.25):
                schema[name] = self.draw.choice([0, 1, 2, 3, 5, 10, -1, -3, 2.5, 0.5, -7.25, 100])
        if self.chance(0.2):
            schema["multipleOf"] = self.draw.choice([1, 2, 3, 0.5, 0.1, 7, 10, 2.5])

    def objects(self, schema: dict[str, Any], level: int) -> None:
        names = self.draw.sample(NAMES, self.draw.randint(0, 4))
        schema["properties"] = {name: self.node(level + 1) for name in names}
        if self.chance(0.5):
            schema["required"] = self.draw.sample([*names, "z"], self.draw.randint(0, len(names)))
        if self.chance(0.6):
            schema["additionalProperties"] = self.draw.choice([False, False, self.node(level + 1)])
        if self.chance(0.15):
            schema["patternProperties"] = {self.draw.choice(["^a", "b$"]): self.node(level + 1)}
        for name in ("minProperties", "maxProperties"):
            if self.chance(0.12):
                schema[name] = self.draw.randint(0, 4)

    def arrays(self, schema: dict[str, Any], level: int) -> None:
        if self.chance(0.7):
            schema["items"] = self.node(level + 1)
        if self.chance(0.3):
            schema["prefixItems"] = [self.node(level + 1) for _ in range(self.draw.randint(1, 3))]
        for name, most in (("minItems", 3), ("maxItems", 4)):
            if self.chance(0.3):
                schema[name] = self.draw.randint(0, most)

    def combine(self, schema: dict[str, Any], level: int) -> None:
        if self.chance(0.1):
            schema["enum"] = self.draw.sample(VALUES, self.draw.randint(1, 5))
        if self.chance(0.05):
            schema["const"] = self.draw.choice(VALUES)
        if level < 3:
            for name in ("anyOf", "allOf", "oneOf"):
                if self.chance(0.1):
                    schema[name] = [self.node(level + 1) for _ in range(self.draw.randint(1, 3))]
            if self.chance(0.1):
                schema["$ref"] = self.draw.choice(["#/$defs/A", "#/$defs/B", "#"])


def judge(schema: dict[str, Any], draw: random.Random) -> str:
    """ "refused", "contradictory", "undetermined" (both refused by the compiler) or "enforced";
    AssertionError for anything wrong.
    """
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    try:
        form = check_schema_form(schema, "S")
    except InvalidRequest as error:
        assert error.param is not None and error.param.startswith("S")
        return "refused"
    matcher = compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, form.text()))
    if matcher.is_error():
        if UNDETERMINED in matcher.get_error():
            return "undetermined"
        assert CONTRADICTION in matcher.get_error(), (matcher.get_error(), schema)
        assert not any(map(validator.is_valid, VALUES)), schema
        return "contradictory"
    for _ in range(4):
        tokens = random_answer(matcher, draw, END, prefer=ENDS, limit=200)
        if tokens is not None:
            assert is_valid(validator, bytes(tokens)), (bytes(tokens), schema)
    for value in VALUES:
        if validator.is_valid(value):
            texts = serialisations(value)
            assert any(accepts(matcher, text) for text in texts), (value, schema)
    return "enforced"


def judge_seed(seed: int) -> str:
    """The same for a schema of our own generator."""
    draw = random.Random(seed)
    return judge(Schemas(draw).whole(), draw)


def judge_drawn(count: int) -> Counter[str]:
    """The same for `count` schemas of hypothesis-jsonschema, always the same ones."""
    verdicts: Counter[str] = Counter()

    def judge_one(schema: dict[str, Any]) -> None:
        verdicts[judge(schema, random.Random(verdicts.total()))] += 1

    run_drawn(count, judge_one)
    return verdicts


def test_grammars_of_random_schemas_allow_the_valid_values() -> None:
    verdicts = Counter(map(judge_seed, range(150)))
    assert verdicts["enforced"] > 50
    assert verdicts["contradictory"] < 5


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_grammars_of_drawn_schemas_allow_the_valid_values() -> None:
    assert judge_drawn(50)["enforced"] > 20


@pytest.mark.sweep
def test_grammars_of_many_random_schemas() -> None:
    verdicts = Counter(map(judge_seed, range(1000, 4000)))
    assert verdicts["contradictory"] < 60
    assert verdicts["undetermined"] < 5
    write_record("grammar_schemas.jsonl", "grammars", schemas=verdicts.total(), **verdicts)


@pytest.mark.sweep
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_grammars_of_many_drawn_schemas() -> None:
    verdicts = judge_drawn(1000)
    write_record("grammar_schemas.jsonl", "drawn-grammars", schemas=verdicts.total(), **verdicts)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"exclusiveMinimum": 2}, "2.0000000000000000003"),
        ({"exclusiveMinimum": 1}, "1.000000000000000050000002"),
        ({"exclusiveMinimum": 0}, "0.%s1" % ("0" * 400)),
        ({"exclusiveMaximum": 2.5}, "2.49999999999999999999"),
        ({"exclusiveMaximum": -3, "minimum": -3.5}, "-3.00000000000000000001"),
        ({"exclusiveMaximum": 2**53 - 1}, "9007199254740990.99999"),
        ({"multipleOf": 2.5}, "12345678901234567892.5"),
        ({"multipleOf": 7}, "700000000000000000000000007"),
    ],
)
def test_no_float_of_an_answer_lies_on_a_bound_that_is_excluded(
    schema: dict[str, Any], text: str
) -> None:
    schema = {"type": "number", **schema}
    form = check_schema_form(schema, "S")
    assert not accepts(compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, form.text())), text)
