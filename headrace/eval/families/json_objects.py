"""A JSON object by a given schema, flat or nested, from facts in the request."""

from __future__ import annotations

import json
import random
from typing import Any

from headrace.eval import words
from headrace.eval.families.fields import draw_fields
from headrace.eval.items import Check, Draw, Item, Reply, Sample, answer_of, framed, user
from headrace.recipe.conversation import FormatKind, ResponseFormat
from headrace.recipe.json_text import python_json

_OPENINGS = (
    "Write this as JSON: {facts}",
    "Turn this into JSON.\n{facts}",
    "Extract the data: {facts}",
    "{facts}\n\nGive me the object.",
    "Fill in the schema. {facts}",
    "Make an object of this: {facts}",
)
_LISTS = {"tags": words.ADJECTIVES, "items": words.NOUNS, "names": words.FIRST_NAMES}
_GROUPS = ("address", "details", "contact", "options", "owner", "product", "place", "info")


def draw(rng: random.Random, options: Draw) -> Sample:
    """1 to 6 fields, one in two with an inner object, one in four with a list of words."""
    by_schema = rng.random() < 0.88
    properties, value, facts = _object(rng, rng.randrange(1, 6), "", by_schema)
    if rng.random() < 0.5:
        group = rng.choice(_GROUPS)
        inner, inner_value, inner_facts = _object(rng, rng.randrange(1, 4), f"{group} ", by_schema)
        properties[group] = _schema(rng, inner)
        value[group] = inner_value
        facts += inner_facts
    if rng.random() < 0.25:
        name = rng.choice(tuple(_LISTS))
        properties[name] = {"type": "array", "items": {"type": "string"}}
        value[name] = rng.sample(_LISTS[name], rng.randrange(1, 5))
        facts.append((name, ", ".join(value[name])))
    if rng.random() < 0.6:
        rng.shuffle(facts)
    question = rng.choice(_OPENINGS).format(facts=_told(rng, facts))
    if not by_schema:
        question += f" Use the keys {words.listed(list(properties))}."
        answer_format = ResponseFormat(FormatKind.JSON_OBJECT)
    else:
        answer_format = ResponseFormat(FormatKind.JSON_SCHEMA, _schema(rng, properties))
    conversation = framed(
        rng, (user(question),), thinking=options.thinking, response_format=answer_format
    )
    thought = f"Keys: {', '.join(properties)}."
    answer = answer_of(python_json(value), thought, options)
    part = "nested" if any(isinstance(entry, dict) for entry in value.values()) else "flat"
    return (Item("json", part, conversation, answer, _right(value), _valid(properties)),)


def _schema(rng: random.Random, properties: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = list(properties)
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _object(
    rng: random.Random, count: int, prefix: str, made_up: bool
) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]:
    """Schemas, values and facts to tell of `count` fields."""
    properties, value, facts = {}, {}, []
    for field in draw_fields(rng, count, made_up=made_up):
        properties[field.name] = field.schema(described=False)
        value[field.name] = drawn = field.draw(rng)
        shown = ("yes" if drawn else "no") if isinstance(drawn, bool) else str(drawn)
        facts.append((prefix + field.name.replace("_", " "), shown))
    return properties, value, facts


def _told(rng: random.Random, facts: list[tuple[str, str]]) -> str:
    style = rng.randrange(3)
    if style == 0:
        return "; ".join(f"{name}: {value}" for name, value in facts)
    if style == 1:
        return "\n".join(f"{name}: {value}" for name, value in facts)
    return " ".join(f"The {name} is {value}." for name, value in facts)


def _parsed(reply: Reply) -> Any:
    try:
        return json.loads(reply.content)
    except ValueError:
        return None


def _right(value: dict[str, Any]) -> Check:
    # Text of equal values is equal, and true is not 1 in it.
    text = json.dumps(value, sort_keys=True)

    def check(reply: Reply) -> bool:
        return not reply.calls and json.dumps(_parsed(reply), sort_keys=True) == text

    return check


def _valid(properties: dict[str, Any]) -> Check:
    def check(reply: Reply) -> bool:
        return _fits(_parsed(reply), {"type": "object", "properties": properties})

    return check


_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value has the form that these simple schemas ask for, with all keys."""
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and value.keys() == properties.keys()
            and all(_fits(value[name], inner) for name, inner in properties.items())
        )
    if kind == "array":
        return isinstance(value, list) and all(_fits(entry, schema["items"]) for entry in value)
    if kind != "boolean" and isinstance(value, bool):
        return False
    return isinstance(value, _TYPES[kind]) and value in schema.get("enum", (value,))
