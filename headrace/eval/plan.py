"""Which items an evaluation asks: by family, number and first seed.

Contract: the same arguments give the same items everywhere. Items of one sample stay together and
in order, so that an engine finds the text they share in its cache. Used by `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.eval.families import draw
from headrace.eval.items import FIRST_TEST_SEED, Draw, Item

# Distances of what recall asks for, in tokens.
RECALL_TOKENS = (1000, 4000, 8000)
# Parts that count towards the number of items; of the others only those of every fourth sample are
# asked, since they cost as much time.
_COUNTED = {"tools": ("call",)}
_OTHERS_EVERY = 4


@dataclass(frozen=True, slots=True)
class Question:
    """An item and where it came from."""

    item: Item
    seed: int


def questions(family: str, seed: int, count: int) -> list[Question]:
    """At least `count` items of `family` (parts that do not count come on top).

    Samples with even seeds think, those with odd seeds do not. Recall is asked at three distances,
    a third of the items each.
    """
    if family != "recall":
        return _drawn(family, seed, count, lambda number: Draw(thinking=number % 2 == 0))
    share = -(-count // len(RECALL_TOKENS))
    result: list[Question] = []
    for place, tokens in enumerate(RECALL_TOKENS):
        # Other seeds at every distance: else the same facts would be asked three times.
        first = seed + place * share

        def options(number: int, tokens: int = tokens, place: int = place) -> Draw:
            return Draw(thinking=(number + place) % 2 == 0, tokens=tokens, far=True)

        result += _drawn(family, first, share, options)
    return result[: max(count, 1)] if count < len(RECALL_TOKENS) else result


def _drawn(family: str, seed: int, count: int, options: Callable[[int], Draw]) -> list[Question]:
    counted = _COUNTED.get(family)
    result: list[Question] = []
    while count > 0:
        for item in draw(family, seed, options(seed)):
            counts = counted is None or item.part in counted
            if counts or seed // 2 % _OTHERS_EVERY == 0:
                result.append(Question(item, seed))
            count -= counts
            if count == 0:
                break
        seed += 1
    return result


def is_test_seed(seed: int) -> bool:
    """Whether the model was never trained on items of this seed."""
    return seed >= FIRST_TEST_SEED
