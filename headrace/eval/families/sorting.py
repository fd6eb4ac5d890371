"""Sorting 3 to 8 numbers or words; the thought picks one after the other."""

from __future__ import annotations

import random

from headrace.eval.items import Draw, Sample, single
from headrace.eval.words import ANIMALS, FOODS

_NUMBERS = (
    "Sort these numbers in {order} order: {items}",
    "Sort in {order} order: {items}",
    "Put these numbers into {order} order: {items}.",
    "Arrange {items} in {order} order.",
    "Here are some numbers: {items}. Sort them in {order} order.",
)
_WORDS = (
    "Sort these words alphabetically: {items}",
    "Put these words into alphabetical order: {items}",
    "Sort alphabetically: {items}",
    "Here are some words: {items}. Sort them alphabetically.",
)
# Few enough to know all their spellings by heart.
SORTABLE = (*ANIMALS, *FOODS)


def draw(rng: random.Random, options: Draw) -> Sample:
    """Numbers up to 999, ascending or descending, or words from A to Z."""
    count = rng.randrange(3, 9)
    if rng.random() < 0.25:
        words = rng.sample(SORTABLE, count)
        return _sample(rng, "words", rng.choice(_WORDS), words, sorted(words), "", options)
    top = rng.choice((20, 100, 100, 1000, 1000))
    numbers = rng.sample(range(top), count)
    descending = rng.random() < 0.3
    order = "descending" if descending else "ascending"
    result = [str(number) for number in sorted(numbers, reverse=descending)]
    shown = [str(number) for number in numbers]
    return _sample(rng, "numbers", rng.choice(_NUMBERS), shown, result, order, options)


def _sample(
    rng: random.Random,
    part: str,
    question: str,
    items: list[str],
    result: list[str],
    order: str,
    options: Draw,
) -> Sample:
    text = question.format(order=order, items=", ".join(items))
    return single(rng, "sorting", part, text, ", ".join(result), steps(items, result), options)


def steps(items: list[str], result: list[str]) -> str:
    """What is left, and what is taken from it: `9 4 7: 4; 9 7: 7; 9`."""
    left = list(items)
    lines = []
    for item in result[:-1]:
        lines.append(f"{' '.join(left)}: {item}")
        left.remove(item)
    return "; ".join([*lines, left[0]])
