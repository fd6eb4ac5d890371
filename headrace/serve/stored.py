"""The response store as one caller sees it.

Contract: what one API key has stored, no other key can go on with. Used by the Responses route.
"""

from __future__ import annotations

from headrace.recipe.protocols.responses_store import ResponseStore, StoredResponse


class CallerStore:
    """A view of a store; `caller` is the name of a key (`serve/auth.py`)."""

    def __init__(self, store: ResponseStore, caller: str) -> None:
        self._store = store
        self._caller = caller

    def get(self, response_id: str) -> StoredResponse | None:
        """The caller's conversation up to a response."""
        return self._store.get(f"{self._caller}/{response_id}")

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a conversation of the caller."""
        self._store.put(f"{self._caller}/{response_id}", stored)
