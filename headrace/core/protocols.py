"""Protocols by which lower layers use tokenizers without importing `recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Incremental ids -> text of one answer; never splits a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these ids (possibly empty)."""
        ...

    def flush(self) -> str:
        """What is left at the end (an incomplete character becomes U+FFFD)."""
        ...

    def copy(self) -> Detokenizer:
        """An independent detokenizer in the same state."""
        ...


class Tokenizer(Protocol):
    """Plain text <-> ids of a checkpoint. `encode` never yields control tokens."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; spellings of control tokens stay ordinary text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; control tokens are left out by default."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer."""
        ...
