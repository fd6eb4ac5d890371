"""A short run of bench/fuzz_codec.py, and megabytes that make naive codecs quadratic.

The seeds are fixed, so a failure names a case that `fuzz_codec.py --replay` repeats. Nothing here
asserts a time: an input that takes thirty seconds instead of one is stopped as a hang.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.unit.recipe import golden

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

import fuzz_codec
from fuzz_extremes import extremes

SECONDS = 15
# The rest of the several hundred inputs is for the script: `fuzz_codec.py --extremes`.
UNITS = ("less-than", "bars", "newlines", "half-markers", "braces", "nested-body", "calls")
HANG_S = 30


@contextmanager
def no_hang() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"takes longer than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["encode", "decode"])
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_input_raises_only_what_is_documented(direction: str, seed: int) -> None:
    run = fuzz_codec.fuzz(seed, SECONDS, (direction,))
    assert run.counts[direction] > 100
    assert run.failures == []


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_megabytes_of_one_character_do_not_hang(unit: str) -> None:
    calls = [
        (name, call)
        for name, call in extremes(golden.real_tokenizer())
        if "-clients-" in name and name.endswith(f"-{unit}")
    ]
    assert calls
    for name, call in calls:
        print(name)  # shown when it fails
        with no_hang():
            call()
