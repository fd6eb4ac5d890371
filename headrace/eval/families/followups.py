"""Follow-up questions over 2 to 5 turns: facts said before, capitals, running totals, lists."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from headrace.eval import words
from headrace.eval.items import Draw, Item, Sample, answer_of, framed, says, user
from headrace.recipe.conversation import AssistantMessage, Message

# question, answer, thought, whether it counts as a follow-up (else it only sets the scene)
_Turn = tuple[str, str, str, bool]


def draw(rng: random.Random, options: Draw) -> Sample:
    """One dialogue; each turn that asks for something is an item."""
    part = rng.choice(tuple(_DIALOGUES))
    turns = _DIALOGUES[part](rng, rng.randrange(2, 6))
    frame = framed(rng, (), thinking=options.thinking)
    messages: tuple[Message, ...] = frame.messages
    items = []
    for question, text, thought, counts in turns:
        messages = (*messages, user(question))
        conversation = replace(frame, messages=messages)
        if counts:
            answer = answer_of(text, thought, options)
            items.append(Item("followups", part, conversation, answer, says(text)))
        messages = (*messages, AssistantMessage(text))
    return tuple(items)


_ABOUT: dict[str, tuple[str, Callable[[random.Random], str], str, str]] = {
    # fact -> statement, value, question, answer
    "name": ("My name is {v}.", words.first_name, "What is my name?", "Your name is {v}."),
    "town": ("I live in {v}.", words.city, "Where do I live?", "You live in {v}."),
    "cat": (
        "My cat is called {v}.",
        words.first_name,
        "What is my cat called?",
        "Your cat is called {v}.",
    ),
    "job": (
        "I work as a {v}.",
        lambda rng: rng.choice(words.JOBS),
        "What is my job?",
        "You work as a {v}.",
    ),
    "colour": (
        "I like the colour {v}.",
        lambda rng: rng.choice(words.COLOURS),
        "Which colour do I like?",
        "You like {v}.",
    ),
    "age": (
        "I am {v} years old.",
        lambda rng: str(rng.randrange(10, 90)),
        "How old am I?",
        "You are {v} years old.",
    ),
    "sister": (
        "My sister is called {v}.",
        words.first_name,
        "What is my sister called?",
        "Your sister is called {v}.",
    ),
    "food": (
        "My favourite food is {v}.",
        lambda rng: rng.choice(words.FOODS),
        "What is my favourite food?",
        "Your favourite food is {v}.",
    ),
    "code": ("My door code is {v}.", words.code, "What is my door code?", "Your door code is {v}."),
    "pet": (
        "I have a {v} at home.",
        lambda rng: rng.choice(words.ANIMALS),
        "Which animal do I have?",
        "You have a {v}.",
    ),
}
_NOTED = "I will remember that."


def _facts(rng: random.Random, count: int) -> list[_Turn]:
    kinds = rng.sample(tuple(_ABOUT), rng.randrange(1, count))
    values = {kind: _ABOUT[kind][1](rng) for kind in kinds}
    turns: list[_Turn] = [
        (_ABOUT[kind][0].format(v=values[kind]), _NOTED, "The user tells me a fact.", False)
        for kind in kinds
    ]
    for kind in rng.sample(kinds, min(len(kinds), count - len(kinds))):
        statement, _, question, answer = _ABOUT[kind]
        value = values[kind]
        thought = f"The user said: {statement.format(v=value)}"
        turns.append((question, answer.format(v=value), thought, True))
    return turns


def _capitals(rng: random.Random, count: int) -> list[_Turn]:
    turns: list[_Turn] = []
    for number, country in enumerate(rng.sample(words.COUNTRIES, count)):
        capital = words.CAPITALS[country]
        first = f"What is the capital of {country}?"
        after = rng.choice((f"And of {country}?", f"What about {country}?", f"And {country}?"))
        thought = f"The capital of {country} is {capital}."
        turns.append((after if number else first, capital, thought, number > 0))
    if rng.random() < 0.3:
        country = turns_country(turns)
        turns[-1] = ("Which country did I ask about first?", country, f"It was {country}.", True)
    return turns


def turns_country(turns: list[_Turn]) -> str:
    """The country of the first question."""
    return turns[0][0].removeprefix("What is the capital of ").removesuffix("?")


def _totals(rng: random.Random, count: int) -> list[_Turn]:
    total = rng.randrange(5, 60)
    turns: list[_Turn] = [(f"Start with {total}.", str(total), f"It is {total}.", False)]
    for _ in range(count - 1):
        step = rng.randrange(1, 31)
        if rng.random() < 0.4 and step < total:
            question, result = (
                rng.choice(("Subtract {n}.", "Take away {n}.", "Minus {n}.")),
                total - step,
            )
            thought = f"{total} - {step} = {result}."
        else:
            question, result = rng.choice(("Add {n}.", "Now add {n}.", "Plus {n}.")), total + step
            thought = f"{total} + {step} = {result}."
        turns.append((question.format(n=step), str(result), thought, True))
        total = result
    return turns


def _lists(rng: random.Random, count: int) -> list[_Turn]:
    pool = rng.sample(words.NOUNS, 8)
    items, rest = pool[:3], pool[3:]
    text = ", ".join(items)
    turns: list[_Turn] = [(f"Here is my list: {text}.", text, "Show the list.", False)]
    for _ in range(count - 1):
        kind = rng.randrange(4)
        if kind == 0 and rest:
            items = [*items, rest.pop()]
            question, text = f"Add {items[-1]}.", ", ".join(items)
        elif kind == 1 and len(items) > 1:
            gone = rng.choice(items)
            items = [item for item in items if item != gone]
            question, text = f"Remove {gone}.", ", ".join(items)
        elif kind == 2:
            question, text = "How many items are on the list?", str(len(items))
        else:
            place = rng.randrange(2)
            question = ("What is the first item?", "What is the last item?")[place]
            text = items[-place]
        turns.append((question, text, f"The list is {', '.join(items)}.", True))
    return turns


_DIALOGUES: dict[str, Callable[[random.Random, int], list[_Turn]]] = {
    "facts": _facts,
    "capitals": _capitals,
    "totals": _totals,
    "lists": _lists,
}
