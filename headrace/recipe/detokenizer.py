"""Incremental ids -> text of one answer.

Contract: `push` returns only whole characters, `flush` gives an incomplete one as U+FFFD; the
concatenation equals decoding all ids at once, whatever the grouping. A control token ends an
incomplete character before it. Made by `Tokenizer.detokenizer`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Feeds the bytes of tokens to an incremental UTF-8 decoder.

    token_bytes: the bytes of an id, or None for a token that is left out of the text.
    """

    __slots__ = ("_decoder", "_is_added", "_token_bytes")

    def __init__(
        self,
        token_bytes: Callable[[int], bytes | None],
        is_added: Callable[[int], bool],
    ) -> None:
        self._decoder = _new_decoder("replace")
        self._token_bytes = token_bytes
        self._is_added = is_added

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these ids (possibly empty)."""
        parts: list[str] = []
        for token_id in token_ids:
            if self._is_added(token_id):
                parts.append(self.flush())
            data = self._token_bytes(token_id)
            if data:
                parts.append(self._decoder.decode(data))
        return "".join(parts)

    def flush(self) -> str:
        """What is left: nothing, or U+FFFD for an incomplete character. May be called any time."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def copy(self) -> IncrementalDetokenizer:
        """An independent detokenizer in the same state."""
        twin = IncrementalDetokenizer(self._token_bytes, self._is_added)
        twin._decoder.setstate(self._decoder.getstate())
        return twin
