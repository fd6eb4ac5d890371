"""The task families: `draw(family, seed, options)` gives the sample of a seed.

Contract: the same family, seed and options give the same sample everywhere. Used by the evaluation
with seeds of FIRST_TEST_SEED and up, by the training data with seeds below.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from headrace.eval.families import (
    arithmetic,
    copying,
    counting,
    definitions,
    followups,
    json_objects,
    recall,
    small_talk,
    sorting,
    tools,
)
from headrace.eval.items import Draw, Sample, seeded

FAMILIES: dict[str, Callable[[random.Random, Draw], Sample]] = {
    "tools": tools.draw,
    "json": json_objects.draw,
    "arithmetic": arithmetic.draw,
    "sorting": sorting.draw,
    "counting": counting.draw,
    "copying": copying.draw,
    "recall": recall.draw,
    "followups": followups.draw,
    "definitions": definitions.draw,
    "small_talk": small_talk.draw,
}


def draw(family: str, seed: int, options: Draw) -> Sample:
    """The sample of a seed. Raises KeyError for an unknown family."""
    return FAMILIES[family](seeded(family, seed), options)
