"""The bounded cache of encoded regions, against its bound and against a plain dict."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headrace.recipe.segment_cache import SegmentCache

TEXTS = st.text(alphabet="abé北😀", max_size=6)


def packed(*ids: int) -> array[int]:
    return array("I", ids)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_finds_what_was_added_in_order() -> None:
    cache = SegmentCache(10_000)
    cache.add([("a", packed(1)), ("", packed())])
    assert cache.find(["", "b", "a", "a"]) == [(), None, (1,), (1,)]
    assert len(cache) == 2


@given(st.lists(st.lists(TEXTS, max_size=6), max_size=60), st.integers(0, 4_000))
def test_never_wrong_and_never_above_the_bound(rounds: list[list[str]], bound: int) -> None:
    cache = SegmentCache(bound)
    for texts in rounds:
        for text, ids in zip(texts, cache.find(texts), strict=True):
            assert ids is None or ids == ids_of(text)
            cache.add([(text, packed(*ids_of(text)))])
        assert cache.size_bytes <= bound


def test_what_is_used_stays_and_the_rest_goes() -> None:
    cache = SegmentCache(20_000)
    cache.add([("kept", packed(1)), ("unused", packed(2))])
    for number in range(1_000):
        cache.add([(f"other {number}", packed(number))])
        assert cache.find(["kept"]) == [(1,)]
    assert cache.find(["unused"]) == [None]
    assert len(cache) > 30


def test_what_is_too_large_is_not_kept() -> None:
    cache = SegmentCache(2_000)
    cache.add([("small", packed(1)), ("x" * 1_500, packed(2))])
    assert cache.find(["small", "x" * 1_500]) == [(1,), None]


def test_without_room_nothing_is_kept() -> None:
    cache = SegmentCache(0)
    cache.add([("", packed())])
    assert (cache.find([""]), len(cache), cache.size_bytes) == ([None], 0, 0)


def test_ids_share_their_objects() -> None:
    numbers = list(range(1000, 3000))
    cache = SegmentCache(10_000, numbers)
    cache.add([("a", packed(0, 700)), ("b", packed(700))])
    first, second = cache.find(["a", "b"])
    assert first == (1000, 1700) and second == (1700,)
    assert first[1] is second[0] is numbers[700]
