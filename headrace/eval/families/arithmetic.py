"""Addition and subtraction of numbers of 2 and 3 digits; the thought works digit by digit."""

from __future__ import annotations

import random

from headrace.eval.items import Draw, Sample, single

_SUMS = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
    "Compute the sum of {a} and {b}.",
    "What do you get when you add {b} to {a}?",
)
_DIFFERENCES = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "How much is {a} minus {b}?",
    "What is the difference {a} - {b}?",
    "Take {b} away from {a}.",
)


def draw(rng: random.Random, options: Draw) -> Sample:
    """One sum or difference; one difference in ten is negative."""
    a, b = (rng.randrange(10, rng.choice((100, 1000, 1000))) for _ in range(2))
    if rng.random() < 0.5:
        question, result, thought = rng.choice(_SUMS), a + b, add_steps(a, b)
    else:
        if a < b and rng.random() < 0.8:
            a, b = b, a
        question, result, thought = rng.choice(_DIFFERENCES), a - b, subtract_steps(a, b)
    return single(
        rng, "arithmetic", "all", question.format(a=a, b=b), str(result), thought, options
    )


def add_steps(a: int, b: int) -> str:
    """Digits from the right: `7+5=12, write 2 carry 1`, in short form."""
    steps, carry = [], 0
    for x, y in _digits(a, b):
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return f"{a} + {b}: {', '.join(steps)}. So {a + b}."


def subtract_steps(a: int, b: int) -> str:
    """Digits from the right with borrows; a negative result is turned round first."""
    if a < b:
        return f"{a} < {b}. {subtract_steps(b, a)[:-1]}, negated -{b - a}."
    steps, borrow = [], 0
    for x, y in _digits(a, b):
        rest = x - y - borrow
        steps.append(f"{x}-{y}-{borrow}={rest % 10}" + (" borrow" if rest < 0 else ""))
        borrow = int(rest < 0)
    return f"{a} - {b}: {', '.join(steps)}. So {a - b}."


def _digits(a: int, b: int) -> list[tuple[int, int]]:
    length = max(len(str(a)), len(str(b)))
    pairs = zip(f"{a:0{length}d}"[::-1], f"{b:0{length}d}"[::-1], strict=True)
    return [(int(x), int(y)) for x, y in pairs]
