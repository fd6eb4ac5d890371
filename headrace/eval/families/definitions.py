"""Short definitions of common words, from WordNet (assets/tiny/definitions.tsv)."""

from __future__ import annotations

import random
from functools import cache

from headrace.assets import embedded_model
from headrace.eval.items import Draw, Sample, single

_QUESTIONS = (
    'What does "{word}" mean?',
    "Define {word}.",
    "What is a {word}?",
    'Explain the word "{word}".',
    "Give a short definition of {word}.",
)


@cache
def definitions() -> tuple[tuple[str, str], ...]:
    """(word, definition), in the order of the file."""
    path = embedded_model() / "definitions.tsv"
    lines = path.read_text("utf-8").splitlines()
    return tuple((word, text) for word, _, text in (line.partition("\t") for line in lines))


def draw(rng: random.Random, options: Draw) -> Sample:
    """One word of the list."""
    word, text = rng.choice(definitions())
    question = rng.choice(_QUESTIONS).format(word=word)
    return single(rng, "definitions", "all", question, text, f"Define {word}.", options)
