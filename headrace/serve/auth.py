"""API keys: `Authorization: Bearer KEY` on every route but /health.

Contract: `KeyRing.check` gives a name for the caller (for limits and logs, never the key itself) or
raises Unauthorized (no key) or Forbidden (wrong key). Without configured keys everybody may call.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from headrace.errors import Forbidden, Unauthorized

ANYBODY = "-"
_SCHEME = "bearer "


class KeyRing:
    """The configured keys, kept as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, headers: Mapping[str, str]) -> str:
        """Name of the caller: a short digest of the key, or "-" without configured keys."""
        if not self._digests:
            return ANYBODY
        value = headers.get("authorization", "")
        # SDKs of other protocols send the key in a header of its own.
        key = value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""
        key = key or headers.get("x-api-key", "").strip()
        if not key:
            raise Unauthorized(
                "This server needs an API key: send the header 'Authorization: Bearer KEY'."
            )
        given = _digest(key)
        # All are compared, in constant time: the time taken says nothing about the keys.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise Forbidden("The API key is not valid for this server.")
        return given.hex()[:8]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
