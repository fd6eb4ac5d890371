"""Recalling facts that were planted in a long text, from 0.2k to 8k tokens back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from headrace.eval import words
from headrace.eval.families.copying import sentence
from headrace.eval.items import Draw, Item, Sample, answer_of, framed, says, user
from headrace.recipe.conversation import AssistantMessage, Message

# Of the sentences below, with the tokenizer of the embedded model.
CHARACTERS_PER_TOKEN = 4.28
_QUESTION_TOKENS = 90  # control tokens, system text, effort line, question

_KINDS: dict[str, Callable[[random.Random], str]] = {
    "access code": words.code,
    "locker number": lambda rng: str(rng.randrange(10, 1000)),
    "password": words.made_up,
    "favourite colour": lambda rng: rng.choice(words.COLOURS),
    "favourite animal": lambda rng: rng.choice(words.ANIMALS),
    "home town": words.city,
    "room number": lambda rng: str(rng.randrange(100, 1000)),
    "job": lambda rng: rng.choice(words.JOBS),
    "booking code": words.code,
    "nickname": lambda rng: words.made_up(rng).capitalize(),
}
_OPENINGS = (
    "Read this text and answer my question.\n\n{text}\n\n{question}",
    "{text}\n\n{question}",
    "Here is a text:\n{text}\n\nQuestion: {question}",
    "Text: {text}\n\n{question} Answer from the text.",
)


def draw(rng: random.Random, options: Draw) -> Sample:
    """A text of `options.tokens` with 1 to 16 facts in it, and some questions about them."""
    facts = _facts(rng, rng.choice((1, 2, 4, 8, 16)))
    asked = rng.sample(range(len(facts)), rng.randrange(1, len(facts) + 1))
    if options.far:
        facts, asked = _facts(rng, 20), list(range(16))
    text = _text(rng, facts, asked, options)
    messages: tuple[Message, ...] = ()
    items = []
    frame = framed(rng, (), thinking=options.thinking)
    for number, place in enumerate(asked):
        name, kind, value = facts[place]
        question = f"What is the {kind} of {name}?"
        if number == 0:
            question = rng.choice(_OPENINGS).format(text=text, question=question)
        messages = (*messages, user(question))
        thought = f"The {kind} of {name} is {value}."
        answer = answer_of(value, thought, options)
        conversation = replace(frame, messages=(*frame.messages, *messages))
        items.append(Item("recall", _part(options.tokens), conversation, answer, says(value)))
        messages = (*messages, AssistantMessage(value))
    return tuple(items)


def _part(tokens: int) -> str:
    return f"{max(1, round(tokens / 1000))}k"


def _facts(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Different (name, kind) pairs with their values; some names carry several facts."""
    facts: dict[tuple[str, str], str] = {}
    names = [
        words.full_name(rng) if rng.random() < 0.5 else words.first_name(rng) for _ in range(count)
    ]
    while len(facts) < count:
        kind = rng.choice(tuple(_KINDS))
        facts[rng.choice(names), kind] = _KINDS[kind](rng)
    return [(name, kind, value) for (name, kind), value in facts.items()]


def _text(
    rng: random.Random, facts: list[tuple[str, str, str]], asked: list[int], options: Draw
) -> str:
    """Sentences up to the length; far facts stand in the first twentieth, others anywhere."""
    budget = (options.tokens - _QUESTION_TOKENS) * CHARACTERS_PER_TOKEN
    planted = [f"The {kind} of {name} is {value}." for name, kind, value in facts]
    size = sum(map(len, planted))
    filler = []
    while size < budget:
        line = sentence(rng)
        size += len(line) + 1
        filler.append(line)
    places = []
    for index in range(len(planted)):
        last = len(filler) // 20 if options.far and index in asked else len(filler)
        places.append((rng.randrange(last + 1), index))
    for place, index in sorted(places, reverse=True):
        filler.insert(place, planted[index])
    paragraphs = []
    start = 0
    while start < len(filler):
        end = start + rng.randrange(4, 12)
        paragraphs.append(" ".join(filler[start:end]))
        start = end
    return "\n\n".join(paragraphs)
