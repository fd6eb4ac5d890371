"""How many requests may run at once: per key and in all.

Contract: `hold` counts a request from before its body is read until its answer is sent, so memory
is bounded by limit x body size. Used by the routes; asyncio only, no locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import LimitReached, Overloaded


class RequestLimits:
    """Counts running requests; a key is any string, only its count is kept while it is above 0."""

    def __init__(self, max_requests: int, max_requests_per_key: int) -> None:
        self._max_requests = max_requests
        self._max_requests_per_key = max_requests_per_key
        self._by_key: Counter[str] = Counter()
        self.running = 0

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """One running request. Raises LimitReached (429) or Overloaded (503)."""
        if self._by_key[key] >= self._max_requests_per_key:
            raise LimitReached(
                f"{self._by_key[key]} requests of this key are running, which is the limit. "
                "Wait for one of them to end."
            )
        if self.running >= self._max_requests:
            raise Overloaded(f"{self.running} requests are running, which is the limit.")
        self._by_key[key] += 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]
