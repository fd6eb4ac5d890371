"""Chunks of ids -> pieces of text (spec recipe 10.1).

Contract: ids are kept back until they end with a whole character; a control token is a piece of its
own and ends an incomplete character before it. The work is linear whatever the bytes. Used by
`parser.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from headrace.core.output import TokenLogprobs
from headrace.recipe.parser.matcher import Kind
from headrace.recipe.parser.scanner import Piece

REPLACEMENT = "\ufffd"
_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenTexts(Protocol):
    """What is needed of a tokenizer."""

    @property
    def whole_text(self) -> Callable[[int], str | None]:
        """Text of a token that is complete UTF-8 on its own, else None."""

    @property
    def is_added(self) -> Callable[[int], bool]:
        """Whether an id belongs to the added vocabulary."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; empty for an unknown id."""


class PieceMaker:
    """The ids of one answer that are not text yet."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._bytes = tokenizer.token_bytes
        self._whole_text = tokenizer.whole_text
        self._is_added = tokenizer.is_added
        self._decoder = _new_decoder("replace")
        self._text: list[str] = []
        self._ids: list[int] = []
        self._entries: list[TokenLogprobs] = []

    @property
    def empty(self) -> bool:
        """Whether no ids are kept back."""
        return not self._ids

    @property
    def waiting(self) -> int:
        """How many ids are kept back."""
        return len(self._ids)

    def push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> Iterable[Piece]:
        """The pieces that these ids complete."""
        if not self._ids:
            texts = list(map(self._whole_text, ids))
            if None not in texts:
                places = [i for i, added in enumerate(map(self._is_added, ids)) if added]
                pieces = _pieces(texts, places, ids, logprobs)  # type: ignore[arg-type]
                if pieces is not None:
                    return pieces
        return self._push_slowly(ids, logprobs)

    def _push_slowly(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> Iterator[Piece]:
        is_added, token_bytes = self._is_added, self._bytes
        for place, token_id in enumerate(ids):
            special = is_added(token_id)
            if special:
                yield from self.flush()
            self._ids.append(token_id)
            if logprobs is not None:
                self._entries.append(logprobs[place])
            data = token_bytes(token_id)
            if special:
                # Ids without text that came before it go with it.
                self._text.append(data.decode("utf-8", "replace"))
                yield self._piece(Kind.SPECIAL)
            elif data:
                text = self._decoder.decode(data)
                if text:
                    self._text.append(text)
        # Bytes of an incomplete character would be decoded as U+FFFD.
        whole = self._text and not self._text[-1].endswith(REPLACEMENT)
        if whole and not self._decoder.getstate()[0]:
            yield self._piece(Kind.PLAIN)

    def flush(self) -> Iterator[Piece]:
        """What is kept back, an incomplete character as U+FFFD. Ids without text stay."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        if rest:
            self._text.append(rest)
        if self._text:
            yield self._piece(Kind.PLAIN)

    def rest(self) -> list[Piece]:
        """What is kept back, without the incomplete character, as one piece if there is any."""
        self._decoder.reset()
        return [self._piece(Kind.PLAIN)] if self._ids else []

    def _piece(self, kind: Kind) -> Piece:
        ids = tuple(self._ids)
        # Log probabilities that are not known for every id are no use.
        entries = tuple(self._entries) if len(self._entries) == len(ids) else ()
        piece = Piece("".join(self._text), kind, len(ids), ids, entries)
        self._text.clear()
        self._ids.clear()
        self._entries.clear()
        return piece


def _pieces(
    texts: Sequence[str],
    places: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] | None,
) -> list[Piece] | None:
    """The pieces of ids with control tokens at these places; None when it is not that simple."""
    pieces = []
    start = 0
    for place in (*places, len(ids)):
        if place > start:
            text = "".join(texts[start:place])
            if not text or text.endswith(REPLACEMENT):
                return None
            entries = () if logprobs is None else tuple(logprobs[start:place])
            part = tuple(ids[start:place])
            pieces.append(Piece(text, Kind.PLAIN, len(part), part, entries))
        if place < len(ids):
            entries = () if logprobs is None else (logprobs[place],)
            pieces.append(Piece(texts[place], Kind.SPECIAL, 1, (ids[place],), entries))
        start = place + 1
    return pieces
