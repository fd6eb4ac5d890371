"""Protocols by which lower layers use tokenizers without importing `recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


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


@runtime_checkable
class Vocabulary(Protocol):
    """What each id stands for; a grammar needs it to know which tokens may come next."""

    @property
    def vocab_size(self) -> int:
        """Highest known id + 1."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; of a control token its spelling; empty for an unknown id."""
        ...

    def is_added(self, token_id: int) -> bool:
        """Whether the id is a control token: never part of a text, only drawn by its id."""
        ...
