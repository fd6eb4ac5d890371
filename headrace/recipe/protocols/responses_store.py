"""Where answers are kept for `previous_response_id`: the interface, and one in memory.

Contract: a store maps the id of a response to all items of its conversation, the answer included,
each as JSON text; `remember` writes one after the answer is complete, `convert_responses` reads it.
Whether there is a store, and which, is the server's decision. The one here forgets the least
recently used conversations when it is full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import msgspec

from headrace.recipe.protocols.responses_settings import ResponsesSettings


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """items: input and output items of the conversation so far, as JSON texts."""

    items: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.items))


class ResponseStore(Protocol):
    """What `convert_responses` and a server need of a store."""

    def get(self, response_id: str) -> StoredResponse | None:
        """The conversation up to a response, or None when it is not known (any more)."""

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a conversation under the id of its last response."""


class MemoryResponseStore:
    """Keeps the most recently used conversations; safe to use from several threads.

    max_responses, max_bytes: bounds of the whole store; a conversation larger than max_bytes is
    not kept.
    """

    def __init__(self, *, max_responses: int = 1024, max_bytes: int = 256 << 20) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = Lock()

    def get(self, response_id: str) -> StoredResponse | None:
        """The conversation up to a response, or None when it is not kept (any more)."""
        with self._lock:
            stored = self._kept.get(response_id)
            if stored is not None:
                self._kept.move_to_end(response_id)
            return stored

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a conversation, and drop old ones when there is no room."""
        with self._lock:
            old = self._kept.pop(response_id, None)
            if old is not None:
                self._bytes -= old.size
            if stored.size > self._max_bytes:
                return
            self._kept[response_id] = stored
            self._bytes += stored.size
            while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.size


def remember(
    store: ResponseStore,
    response_id: str,
    settings: ResponsesSettings,
    output: Iterable[Mapping[str, Any]],
) -> None:
    """Store a conversation with its answer, if the request wants that.

    output: the items of the complete response.
    """
    if settings.input_items is None:
        return
    answer = tuple(msgspec.json.encode(item) for item in output)
    store.put(response_id, StoredResponse(settings.input_items + answer))
