"""Plain text -> ids in batches: `fastokens` where it is installed and agrees, else `tokenizers`.

Contract: `load_encoder` gives a thread-safe function from texts to their ids without any added
vocabulary; both libraries give the same ids, which a probe at the start makes sure of for the
tokenizer at hand. Raises CheckpointError for a file that is no tokenizer. Used by
`recipe/tokenizer.py`.
"""

from __future__ import annotations

import importlib
import struct
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import tokenizers

from headrace.errors import CheckpointError

# The arrays are of unsigned 32 bit integers.
BatchEncoder = Callable[[list[str]], "list[array[int]]"]

# All classes of characters that pre-tokenizers tell apart, and borders between them.
_PROBES = (
    "",
    " ",
    "Hello, world! It's 1234567 o'clock;  don't\tpanic.\r\n\r\n  def f(x_1):\n\t\treturn x**2  ",
    "请帮我写一首诗。カタカナのテスト・ー゛゜ 한국어 العربية ไทย हिन्दी Ελληνικά Кириллица",
    "<｜User｜></think>｜DSML｜ <｜end▁of▁sentence｜>",
    "e\u0301a\u0300\u0300 ﬁ Å \ufeff\ufffd\0\x01\x7f\x85\u00a0\u2028\u3000 👩‍👩‍👧🏽 𠀀𝔘",
    "a北1 b京22 c3三d ½²Ⅷ١٢٣ x=[{'k':-1.5e-7}]//#$%^&*()~`|\\",
    "   \n \n\n   x    y\n   ",
    "theandfunctionreturn" * 20,
)


def bare_tokenizer(content: dict[str, Any], source: str) -> tokenizers.Tokenizer:
    """The `tokenizers` object without truncation, padding and post-processing."""
    content = {**content, "truncation": None, "padding": None, "post_processor": None}
    try:
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(content).decode())
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise CheckpointError(f"{source}: cannot be loaded as a tokenizer: {error}.") from error


def load_encoder(content: dict[str, Any], source: str) -> BatchEncoder:
    """The fastest encoder that is installed and gives the reference's ids."""
    content = {**content, "added_tokens": []}
    # First, because it says what is wrong with a malformed file.
    reference = _reference_encoder(bare_tokenizer(content, source))
    return _fast_encoder(content, reference) or reference


def _reference_encoder(tokenizer: tokenizers.Tokenizer) -> BatchEncoder:
    def encode(texts: list[str]) -> list[array[int]]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]

    return encode


def _fast_encoder(content: dict[str, Any], reference: BatchEncoder) -> BatchEncoder | None:
    """The fastokens encoder; None where the library is absent, refuses or gives other ids."""
    bare = {**content, "truncation": None, "padding": None, "post_processor": None}
    probes = list(_PROBES)
    try:
        library = importlib.import_module("fastokens")
        tokenizer = library.Tokenizer.from_json_str(msgspec.json.encode(bare).decode())
        encoder = _flat_encoder(tokenizer.encode_batch_flat)
        return encoder if encoder(probes) == reference(probes) else None
    except Exception:
        return None
    except BaseException as error:
        # A panic of a Rust library is no Exception, and its class cannot be imported.
        if type(error).__name__ == "PanicException":
            return None
        raise


def _flat_encoder(encode_flat: Callable[[list[str]], tuple[bytes, bytes]]) -> BatchEncoder:
    def encode(texts: list[str]) -> list[array[int]]:
        # Little-endian u32 ids and u64 borders; the library exists for such machines only.
        data, borders = encode_flat(texts)
        ids = array("I", data)
        if len(texts) == 1:
            return [ids]
        ends = struct.unpack(f"<{len(texts) + 1}Q", borders)
        return [ids[ends[i] : ends[i + 1]] for i in range(len(texts))]

    return encode
