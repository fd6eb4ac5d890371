"""Typed fields that tools take and objects have: schema, value and how people mention it.

Plain tables and drawing functions. Used by `tools` and `json_objects`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.eval import words


@dataclass(frozen=True, slots=True)
class Field:
    """name, JSON type, description; say: how a request mentions value {v}; choices of an enum."""

    name: str
    type: str
    description: str
    say: tuple[str, ...]
    draw: Callable[[random.Random], Any]
    choices: tuple[str, ...] = ()

    def schema(self, *, described: bool) -> dict[str, Any]:
        """Its JSON schema."""
        result: dict[str, Any] = {"type": self.type}
        if described:
            result["description"] = self.description
        if self.choices:
            result["enum"] = list(self.choices)
        return result

    def mention(self, rng: random.Random, value: Any) -> str:
        """The value inside a request: `in Oslo`, `with breakfast`, `for 4 people`."""
        if isinstance(value, bool):
            return rng.choice(self.say[:2] if value else self.say[2:])
        return rng.choice(self.say).format(v=value)


def _enum(name: str, description: str, say: tuple[str, ...], choices: str) -> Field:
    options = tuple(choices.split())
    return Field(name, "string", description, say, lambda rng: rng.choice(options), options)


def _text(
    name: str, description: str, say: tuple[str, ...], draw: Callable[[random.Random], str]
) -> Field:
    return Field(name, "string", description, say, draw)


def _whole(name: str, description: str, say: tuple[str, ...], low: int, high: int) -> Field:
    return Field(name, "integer", description, say, lambda rng: rng.randrange(low, high))


def _decimal(name: str, description: str, say: tuple[str, ...], high: int) -> Field:
    def draw(rng: random.Random) -> float:
        return rng.randrange(1, high * 10) / 10

    return Field(name, "number", description, say, draw)


def _flag(name: str, description: str, yes: tuple[str, str], no: tuple[str, str]) -> Field:
    return Field(name, "boolean", description, (*yes, *no), lambda rng: rng.random() < 0.5)


FIELDS = (
    _text("city", "Name of the city", ("in {v}", "for the city {v}", "city {v}"), words.city),
    _text("origin", "Where it starts", ("from {v}", "starting in {v}"), words.city),
    _text("destination", "Where it ends", ("to {v}", "going to {v}"), words.city),
    _text(
        "country",
        "Name of the country",
        ("in the country {v}", "country {v}"),
        lambda rng: rng.choice(words.COUNTRIES),
    ),
    _text("date", "Date as YYYY-MM-DD", ("on {v}", "for {v}", "dated {v}"), words.date),
    _text("time", "Time as HH:MM", ("at {v}", "at {v} o'clock"), words.clock),
    _text(
        "name",
        "Name of the person",
        ("for {v}", "under the name {v}", "named {v}"),
        words.full_name,
    ),
    _text(
        "recipient",
        "Who receives it",
        ("addressed to {v}", "for the attention of {v}"),
        words.first_name,
    ),
    _text("email", "Mail address", ("with the address {v}", "using {v}", "mail {v}"), words.email),
    _text(
        "title",
        "Title of it",
        ('called "{v}"', 'titled "{v}"', 'with the title "{v}"'),
        words.phrase,
    ),
    _text("message", "Text of the message", ('saying "{v}"', 'with the text "{v}"'), words.phrase),
    _text("query", "What to look for", ('matching "{v}"', 'about "{v}"'), words.phrase),
    _text("code", "Reference code", ("with code {v}", "code {v}", "reference {v}"), words.code),
    _text(
        "item",
        "The thing it is about",
        ("with the item {v}", "containing {v}"),
        lambda rng: rng.choice(words.NOUNS),
    ),
    _text(
        "room",
        "Name of the room",
        ("in the {v}", "for the {v}"),
        lambda rng: rng.choice(words.PLACES),
    ),
    _text("artist", "Name of the artist", ("by {v}", "from the artist {v}"), words.full_name),
    _text(
        "day",
        "Day of the week",
        ("every {v}", "this {v}", "next {v}"),
        lambda rng: rng.choice(words.WEEKDAYS),
    ),
    _whole("count", "How many", ("{v} times", "{v} of them", "count {v}"), 1, 50),
    _whole("people", "Number of people", ("for {v} people", "for {v} persons"), 1, 20),
    _whole("nights", "Number of nights", ("for {v} nights", "staying {v} nights"), 1, 15),
    _whole("minutes", "Length in minutes", ("for {v} minutes", "lasting {v} minutes"), 1, 181),
    _whole("year", "The year", ("from the year {v}", "in {v}", "year {v}"), 1900, 2036),
    _whole("level", "Level from 0 to 100", ("at level {v}", "with level {v}"), 0, 101),
    _whole("limit", "Largest number of results", ("at most {v} results", "limited to {v}"), 1, 101),
    _whole("floor", "Number of the floor", ("on floor {v}", "floor {v}"), 1, 40),
    _whole("user_id", "Number of the user", ("for user {v}", "user number {v}"), 1, 10000),
    _decimal("price", "Price in euros", ("for {v} euros", "costing {v} euros"), 500),
    _decimal("weight", "Weight in kilograms", ("weighing {v} kg", "of {v} kg"), 90),
    _decimal("distance", "Distance in kilometres", ("within {v} km", "over {v} km"), 100),
    _decimal("amount", "Amount of money", ("over the amount {v}", "amount {v}"), 2000),
    _decimal("rating", "Rating from 0 to 10", ("rated {v}", "with a rating of {v}"), 10),
    _flag(
        "urgent", "Whether it is urgent", ("urgently", "it is urgent"), ("not urgent", "no hurry")
    ),
    _flag(
        "breakfast",
        "Whether breakfast is included",
        ("with breakfast", "including breakfast"),
        ("without breakfast", "no breakfast"),
    ),
    _flag(
        "public",
        "Whether everybody may see it",
        ("visible to everybody", "make it public"),
        ("not public", "keep it private"),
    ),
    _flag(
        "repeat", "Whether it repeats", ("repeating", "on repeat"), ("only once", "not repeating")
    ),
    _flag(
        "notify",
        "Whether to send a note",
        ("and notify me", "with a notification"),
        ("without a notification", "don't notify me"),
    ),
    _flag(
        "active", "Whether it is active", ("active", "switched on"), ("not active", "switched off")
    ),
    _enum("unit", "Unit of temperature", ("in {v}", "unit {v}"), "celsius fahrenheit kelvin"),
    _enum(
        "colour", "The colour", ("in {v}", "coloured {v}", "colour {v}"), " ".join(words.COLOURS)
    ),
    _enum("size", "The size", ("size {v}", "in size {v}"), "small medium large"),
    _enum(
        "priority", "How important it is", ("with {v} priority", "priority {v}"), "low normal high"
    ),
    _enum(
        "language",
        "The language",
        ("in {v}", "language {v}"),
        "English French German Spanish Italian Polish Turkish",
    ),
    _enum(
        "category",
        "Kind of thing",
        ("in the category {v}", "category {v}"),
        "food music sport travel work home",
    ),
    _enum(
        "status", "State it is in", ("with status {v}", "status {v}"), "open closed pending paid"
    ),
    _enum("format", "File format", ("as {v}", "in {v} format"), "pdf csv png txt json"),
    _enum("seat", "Kind of seat", ("with a {v} seat", "{v} seat"), "window aisle middle"),
)
# Mentions that could be mistaken for one another never meet in one request.
_CLASHES = (
    {"city", "country", "room", "language", "unit", "colour", "year"},
    {"year", "date", "price", "day"},
    {"name", "recipient", "date", "room"},
    {"count", "limit"},
    {"title", "name", "query", "message"},
    {"code", "user_id"},
    {"size", "level"},
    {"price", "amount", "distance"},
    {"repeat", "count", "minutes"},
)


def made_up_field(rng: random.Random) -> Field:
    """A field with a name that exists nowhere, mentioned by this name."""
    name = words.made_up(rng)
    say = (f"{name} {{v}}", f"with {name} {{v}}", f"{name} = {{v}}")
    kind = rng.randrange(3)
    if kind == 0:
        return _whole(name, f"The {name}", say, 0, 1000)
    if kind == 1:
        return _text(name, f"The {name}", say, words.code)
    return _text(name, f"The {name}", say, words.made_up)


def draw_fields(rng: random.Random, count: int, *, made_up: bool = True) -> list[Field]:
    """Different fields that can be told apart in one request.

    made_up: whether some may have names that exist nowhere, whose type only a schema tells.
    """
    result: list[Field] = []
    while len(result) < count:
        new = made_up and rng.random() < 0.12
        field = made_up_field(rng) if new else rng.choice(FIELDS)
        if all(_apart(field.name, other.name) for other in result):
            result.append(field)
    return result


def _apart(a: str, b: str) -> bool:
    return a != b and not any(a in clash and b in clash for clash in _CLASHES)
