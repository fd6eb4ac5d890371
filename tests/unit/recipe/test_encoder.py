"""Both encoder libraries: equal ids, and fastokens only where it agrees."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.tiny_tokenizer import tiny_tokenizer
from headrace.recipe.encoder import BatchEncoder, load_encoder
from tests.unit.recipe import golden

TINY: dict[str, Any] = tiny_tokenizer()
GPT2: dict[str, Any] = {
    **TINY,
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
}
# All kinds of characters that a pre-tokenizer tells apart.
TEXTS = st.lists(
    st.sampled_from("aT1 \n\r\t北ア゠゜・\u0301😀\u200d<｜'")
    | st.sampled_from(["The", "  ", "\r\n", "4567", "'s", "e\u0301", "北京"])
    | st.sampled_from("_。éßا\0\x85\u00a0\ufffd½|")
    | st.characters(exclude_categories=["Cs"]),
    max_size=20,
).map("".join)


def with_and_without_fastokens(content: dict[str, Any]) -> tuple[BatchEncoder, BatchEncoder]:
    pytest.importorskip("fastokens", reason="no wheel for this platform")
    fast = load_encoder(content, "t.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fastokens", None)
        slow = load_encoder(content, "t.json")
    assert fast.__qualname__ != slow.__qualname__
    return fast, slow


PAIRS = {
    "tiny": with_and_without_fastokens(TINY),
    "gpt2": with_and_without_fastokens(GPT2),
    "released": with_and_without_fastokens(msgspec.json.decode(golden.patched_json())),
}


@pytest.mark.parametrize("name", PAIRS)
@settings(deadline=None)
@given(texts=st.lists(TEXTS, max_size=5))
def test_the_libraries_agree(name: str, texts: list[str]) -> None:
    fast, slow = PAIRS[name]
    assert fast(texts) == slow(texts)


def test_another_pre_tokenizer_may_need_the_reference() -> None:
    # Without any, fastokens gives other ids than tokenizers: the probe finds out.
    pytest.importorskip("fastokens", reason="no wheel for this platform")
    content = {**TINY, "pre_tokenizer": None}
    assert "reference" in load_encoder(content, "t.json").__qualname__


class PanicException(BaseException):
    """What Rust libraries raise."""


@pytest.mark.parametrize("error", [ValueError, PanicException])
def test_a_refusal_of_fastokens_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def refuse(_: str) -> None:
        raise error

    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=refuse))
    monkeypatch.setitem(sys.modules, "fastokens", library)
    encoder = load_encoder(TINY, "t.json")
    assert encoder(["the house"]) == PAIRS["tiny"][1](["the house"])


def test_an_interrupt_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=interrupt))
    monkeypatch.setitem(sys.modules, "fastokens", library)
    with pytest.raises(KeyboardInterrupt):
        load_encoder(TINY, "t.json")
