"""Counting the items of a list, or how often one of them stands there; the thought numbers them."""

from __future__ import annotations

import random

from headrace.eval.items import Draw, Sample, single
from headrace.eval.words import NOUNS, made_up

_ALL = (
    "How many items are in this list: {items}?",
    "Count the items: {items}",
    "How many words are there: {items}?",
    "Count these words: {items}.",
)
_ONE = (
    'How many times does "{word}" appear in: {items}?',
    'Count how often "{word}" occurs: {items}',
    "How often does the word {word} stand in this list: {items}?",
    'How many "{word}" are there in {items}?',
)


def draw(rng: random.Random, options: Draw) -> Sample:
    """A list of 2 to 16 words; how many, or how many of one kind."""
    count = rng.randrange(2, 17)
    if rng.random() < 0.4:
        words = [_word(rng) for _ in range(count)]
        thought = " ".join(f"{word} {number}" for number, word in enumerate(words, 1))
        question = rng.choice(_ALL).format(items=", ".join(words))
        return single(rng, "counting", "items", question, str(count), thought, options)
    kinds = [_word(rng) for _ in range(rng.randrange(2, 6))]
    word = kinds[0]
    others = kinds[1:]
    wanted = rng.randrange(0, min(count, 9) + 1)
    words = [word] * wanted + [rng.choice(others) for _ in range(count - wanted)]
    rng.shuffle(words)
    number = 0
    lines = []
    for other in words:
        number += other == word
        lines.append(f"{other} {number}")
    question = rng.choice(_ONE).format(word=word, items=", ".join(words))
    # A made-up kind may by chance equal the word.
    return single(rng, "counting", "kind", question, str(number), " ".join(lines), options)


def _word(rng: random.Random) -> str:
    return made_up(rng) if rng.random() < 0.1 else rng.choice(NOUNS)
