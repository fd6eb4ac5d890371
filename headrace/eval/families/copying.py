"""Repeating a text of 5 to 60 tokens exactly."""

from __future__ import annotations

import random

from headrace.eval import words
from headrace.eval.items import Draw, Sample, single

_QUESTIONS = (
    "Repeat exactly: {text}",
    "Repeat the following text exactly:\n{text}",
    "Say this: {text}",
    "Copy this text: {text}",
    "Write this again, unchanged:\n\n{text}",
    "Echo: {text}",
    "Please repeat after me: {text}",
)
_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def draw(rng: random.Random, options: Draw) -> Sample:
    """Words, sentences, numbers, codes or odd strings."""
    part = rng.choice(("words", "words", "numbers", "codes", "sentence"))
    text = _TEXTS[part](rng)
    thought = "Repeat the text."
    return single(
        rng, "copying", part, rng.choice(_QUESTIONS).format(text=text), text, thought, options
    )


def _words(rng: random.Random) -> str:
    count = rng.randrange(5, 31)
    pools = (words.NOUNS, words.ADJECTIVES, words.FIRST_NAMES, words.CITIES, words.PLACES)
    drawn = [
        words.made_up(rng) if rng.random() < 0.2 else rng.choice(rng.choice(pools))
        for _ in range(count)
    ]
    return " ".join(drawn)


def _numbers(rng: random.Random) -> str:
    top = rng.choice((10, 100, 1000))
    separator = rng.choice((" ", ", "))
    return separator.join(str(rng.randrange(top)) for _ in range(rng.randrange(5, 15)))


def _codes(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return " ".join(words.code(rng) for _ in range(rng.randrange(2, 8)))
    pieces = [
        "".join(rng.choice(_ALPHABET) for _ in range(rng.randrange(3, 9)))
        for _ in range(rng.randrange(1, 6))
    ]
    return rng.choice("-_ .").join(pieces)


def _sentence(rng: random.Random) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randrange(1, 4)))


def sentence(rng: random.Random) -> str:
    """A plain sentence about nothing in particular."""
    choice = rng.choice
    kind = rng.randrange(5)
    if kind == 0:
        return (
            f"{words.first_name(rng)} {choice(words.VERBS_PAST)} the {choice(words.ADJECTIVES)} "
            f"{choice(words.NOUNS)} in the {choice(words.PLACES)}."
        )
    if kind == 1:
        return (
            f"The {choice(words.ADJECTIVES)} {choice(words.NOUNS)} was near the "
            f"{choice(words.PLACES)} on {choice(words.WEEKDAYS)}."
        )
    if kind == 2:
        return (
            f"In {words.city(rng)} the {choice(words.JOBS)} {choice(words.VERBS_PAST)} "
            f"{rng.randrange(2, 100)} {choice(words.COLOURS)} {choice(words.THINGS)}s."
        )
    if kind == 3:
        return (
            f"On {choice(words.WEEKDAYS)} {words.first_name(rng)} and {words.first_name(rng)} "
            f"went to the {choice(words.PLACES)} because it was {choice(words.ADJECTIVES)}."
        )
    return (
        f"There is a {choice(words.ADJECTIVES)} {choice(words.THINGS)} behind the "
        f"{choice(words.PLACES)} of {words.city(rng)}."
    )


_TEXTS = {"words": _words, "numbers": _numbers, "codes": _codes, "sentence": _sentence}
