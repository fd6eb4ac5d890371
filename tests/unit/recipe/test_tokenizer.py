"""Tokenizer and incremental detokenizer on the tiny byte-level tokenizer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CheckpointError, InvalidRequest
from headrace.model.tiny_tokenizer import control_ids, tiny_tokenizer
from headrace.recipe.render.prompt import RenderedPrompt
from headrace.recipe.tokenizer import Tokenizer
from tests.unit.recipe import golden

CONTENT = tiny_tokenizer()
IDS = control_ids()
TOKENIZER = Tokenizer(json.dumps(CONTENT).encode())


@given(st.text())
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 5)), st.data())
def test_grouping_does_not_matter(ids: list[int], data: st.DataObject) -> None:
    whole = TOKENIZER.decode(ids)
    detokenizer = TOKENIZER.detokenizer()
    parts, rest = [], ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    assert "".join(parts) + detokenizer.flush() == whole


def test_a_character_is_never_split() -> None:
    ids = TOKENIZER.encode("né👍🏽北")
    detokenizer = TOKENIZER.detokenizer()
    pieces = [detokenizer.push([token]) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == "né👍🏽北"
    assert detokenizer.flush() == ""


def test_an_incomplete_character_shows_at_the_end_or_before_a_control_token() -> None:
    first_byte = TOKENIZER.encode("北")[:1]
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.push(first_byte) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert (
        TOKENIZER.decode([*first_byte, IDS["<｜end▁of▁sentence｜>"], *first_byte]) == "\ufffd" * 2
    )


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = [0, *TOKENIZER.encode("hi"), 1]
    assert TOKENIZER.decode(ids) == "hi"
    assert TOKENIZER.decode(ids, skip_special=False) == (
        "<｜begin▁of▁sentence｜>hi<｜end▁of▁sentence｜>"
    )


def test_plain_text_has_no_control_ids() -> None:
    for spelling in IDS:
        assert not any(TOKENIZER.is_added(token) for token in TOKENIZER.encode(spelling))


def test_a_control_token_outside_the_added_vocabulary_is_refused() -> None:
    # "the" is a token, but not an added one.
    prompt = RenderedPrompt(("a", "the", "b"))
    for encode in (TOKENIZER.encode_prompt, TOKENIZER.count):
        with pytest.raises(InvalidRequest) as caught:
            encode(prompt)
        assert str(caught.value) == (
            'failed to encode conversation: special token "the" is not in the added vocabulary'
        )


def test_a_lone_surrogate_is_refused() -> None:
    for call in (
        lambda: TOKENIZER.encode("\ud800"),
        lambda: TOKENIZER.encode_full("\ud800"),
        lambda: TOKENIZER.encode_prompt(RenderedPrompt(("\ud800",))),
    ):
        with pytest.raises(InvalidRequest, match="surrogate"):
            call()


REGIONS = st.lists(st.text(alphabet="ab 1\n<｜>User北é", max_size=12), min_size=1, max_size=8)


@settings(deadline=None)
@given(REGIONS, st.data())
def test_regions_do_not_see_each_other(regions: list[str], data: st.DataObject) -> None:
    parts, ids = [regions[0]], TOKENIZER.encode(regions[0])
    for region in regions[1:]:
        spelling = data.draw(st.sampled_from(sorted(IDS)))
        parts += [spelling, region]
        ids += [IDS[spelling], *TOKENIZER.encode(region)]
    prompt = RenderedPrompt(tuple(parts))
    # The second time from the cache.
    assert TOKENIZER.encode_prompt(prompt) == ids
    assert TOKENIZER.encode_prompt(prompt) == ids
    assert TOKENIZER.count(prompt) == len(ids) >= TOKENIZER.least_tokens(prompt)


def test_a_result_can_be_changed_without_harm() -> None:
    prompt = RenderedPrompt(("hello there", "<｜User｜>", "hello"))
    expected = list(TOKENIZER.encode_prompt(prompt))
    TOKENIZER.encode_prompt(prompt).clear()
    assert TOKENIZER.encode_prompt(prompt) == expected


def test_only_the_helper_for_full_text_finds_spellings() -> None:
    text = "a<｜User｜>b</think>"
    full = [*TOKENIZER.encode("a"), IDS["<｜User｜>"], *TOKENIZER.encode("b"), IDS["</think>"]]
    assert TOKENIZER.encode_full(text) == full
    assert len(TOKENIZER.encode(text)) > len(full)


def test_tables_by_id() -> None:
    north = TOKENIZER.encode("北")
    assert [TOKENIZER.whole_text(token) for token in north] == [None] * len(north)
    assert b"".join(map(TOKENIZER.token_bytes, north)) == "北".encode()
    (the,) = TOKENIZER.encode(" the")
    assert (TOKENIZER.whole_text(the), TOKENIZER.is_added(the)) == (" the", False)
    user = IDS["<｜User｜>"]
    assert (TOKENIZER.whole_text(user), TOKENIZER.is_added(user)) == ("<｜User｜>", True)
    assert TOKENIZER.token_bytes(user) == "<｜User｜>".encode()
    for unknown in (-1, TOKENIZER.vocab_size):
        assert TOKENIZER.whole_text(unknown) is None
        assert TOKENIZER.token_bytes(unknown) == b""
        assert not TOKENIZER.is_added(unknown)


def test_threads_share_one_tokenizer() -> None:
    # A cache too small for all of it, so that generations change all the time.
    tokenizer = Tokenizer(json.dumps(CONTENT).encode(), cache_bytes=6_000)
    prompts = [
        RenderedPrompt((f"the number {n % 7}", "<｜User｜>", "house " * (n % 11), "<think>", ""))
        for n in range(300)
    ]
    expected = [TOKENIZER.encode_prompt(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            assert list(threads.map(tokenizer.encode_prompt, prompts)) == expected
    assert tokenizer.cache.size_bytes <= 6_000


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (b"{", "not valid JSON"),
        (b"[]", '"model"'),
        ({"decoder": None}, "byte-level"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "model.vocab"),
        ({"model": {"type": "Nonsense"}}, "cannot be loaded"),
        ({"added_tokens": [{"id": "x"}]}, "added_tokens"),
    ],
)
def test_broken_files_are_named(change: bytes | dict[str, Any], text: str) -> None:
    data = change if isinstance(change, bytes) else json.dumps({**CONTENT, **change}).encode()
    with pytest.raises(CheckpointError, match="t.json.*" + text):
        Tokenizer(data, source="t.json")


ADDED: list[dict[str, Any]] = CONTENT["added_tokens"]  # type: ignore[assignment]
VOCAB: dict[str, int] = CONTENT["model"]["vocab"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {**CONTENT["model"], "vocab": {**VOCAB, "zq": 300}}}, "model.vocab.* id 300"),  # type: ignore[dict-item]
        ({"added_tokens": [*ADDED, {**ADDED[-1], "content": "zq"}]}, "same id"),
        ({"added_tokens": [*ADDED, {**ADDED[-1], "id": 600}]}, "same content"),
        ({"added_tokens": [*ADDED, {**ADDED[-1], "content": "zq", "id": 300}]}, "another token"),
        ({"added_tokens": [*ADDED, {**ADDED[-1], "content": "a", "id": 600}]}, "another id"),
        ({"added_tokens": [{**ADDED[-1], "id": 600.5}]}, "malformed"),
        ({"added_tokens": [{**ADDED[-1], "id": -1}]}, "malformed"),
        ({"added_tokens": [{**ADDED[-1], "id": True}]}, "malformed"),
    ],
)
def test_one_token_has_one_id(change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match="t.json.*" + text):
        Tokenizer(json.dumps({**CONTENT, **change}).encode(), source="t.json")


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "unit", ["<", "｜", " ", "\n", "a", "qz", "7", "的", "😀", "\0", "\u0301", "[", '{"a":', "\\"]
)
def test_a_megabyte_of_anything_survives(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    tokenizer = golden.real_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.least_text_tokens(text) <= len(ids)
    assert tokenizer.decode(ids) == text
