"""Content keys of token blocks: chained SHA-256 over a namespace, a salt and token ids.

Contract: K_0 = SHA256("kvkey-v1" | namespace | salt), K_{i+1} = SHA256(K_i | the ids of block i as
little-endian int32 | extra of block i). A key therefore names the rows of its block and of all
blocks before it, for one kind of cache (namespace: what makes rows comparable at all) and one
circle of users (salt: who may learn from a hit). Text and sampling parameters never enter. Full
32-byte keys everywhere. Used by the engine for its requests, by stores, routers and directories.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TypeAlias

from headrace.errors import InternalError

KEY_BYTES = 32
KEY_VERSION = b"kvkey-v1"
GRAIN_TOKENS = 128
_TOKEN_BYTES = 4

# Ids as contiguous little-endian int32: bytes, or the `.data` of an int32 array (which is in the
# order of the machine; big-endian ones are not supported).
TokenBuffer: TypeAlias = "bytes | bytearray | memoryview"


def namespace_key(profile: Mapping[str, object]) -> bytes:
    """32-byte namespace of a cache profile: SHA-256 of its JSON with sorted keys.

    The profile names everything that cached rows depend on (model, weights, layout, numerics and
    replay mode, ...). Raises TypeError for values that JSON does not know.
    """
    text = json.dumps(profile, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return sha256(text.encode()).digest()


def salt_key(secret: bytes, domain: str) -> bytes:
    """32-byte salt of a domain ("tenant:<id>", "org:<id>" or "public") under a cluster's secret."""
    return hmac.digest(secret, domain.encode(), "sha256")


def root_key(namespace: bytes, salt: bytes) -> bytes:
    """K_0: the key before the first block. Raises InternalError unless both have 32 bytes."""
    if len(namespace) != KEY_BYTES or len(salt) != KEY_BYTES:
        raise InternalError("A namespace and a salt have 32 bytes each.")
    return sha256(KEY_VERSION + namespace + salt).digest()


def media_extra(items: Iterable[tuple[int, int, bytes]], adapter: bytes = b"") -> bytes:
    """Extra of a block: each overlapping item as (its start minus the block's, its length, hash).

    Starts may be negative (the item began before the block). `hash` has 32 bytes. `adapter` is the
    hash of the adapter's id, if there is one.
    """
    parts = [struct.pack("<ii", start, length) + digest for start, length, digest in items]
    return b"".join(parts) + adapter


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Ids as a TokenBuffer. Raises struct.error for ids beyond 32 bits."""
    return struct.pack(f"<{len(ids)}i", *ids)


class BlockKeys:
    """Keys of the full blocks of one sequence, computed once, as its tokens become known.

    keys[i] is K_{i+1}, the name of block i. The sequence keeps its ids in one buffer; this object
    remembers only how far it has read.
    """

    __slots__ = ("_block_bytes", "_root", "keys")

    def __init__(self, root: bytes, block_tokens: int = GRAIN_TOKENS) -> None:
        """root: K_0, see `root_key`."""
        self.keys: list[bytes] = []
        self._root = root
        self._block_bytes = block_tokens * _TOKEN_BYTES

    def __len__(self) -> int:
        return len(self.keys)

    def cover(
        self, tokens: TokenBuffer, count: int, extras: Mapping[int, bytes] | None = None
    ) -> list[bytes]:
        """Name the full blocks among the first `count` tokens; returns the keys that are new.

        tokens: all ids of the sequence from position 0 on, at least `count`. extras: block number
        -> its extra bytes; blocks without one have none. Raises InternalError if `tokens` is short.
        """
        view = memoryview(tokens).cast("B")
        first = len(self.keys)
        begin = first * self._block_bytes
        end = count * _TOKEN_BYTES // self._block_bytes * self._block_bytes
        if end <= begin:
            return []
        if end > view.nbytes:
            raise InternalError(f"{count} tokens in a buffer of {view.nbytes} bytes.")
        new: list[bytes] = []
        key = self.keys[-1] if first else self._root
        start, append = sha256().copy, new.append  # copying a fresh state beats making one
        for (ids,) in struct.iter_unpack(f"{self._block_bytes}s", view[begin:end]):
            state = start()
            state.update(key)
            state.update(ids)
            if extras:
                state.update(extras.get(first + len(new), b""))
            key = state.digest()
            append(key)
        self.keys += new
        return new

    def truncate(self, blocks: int) -> None:
        """Forget the keys from block `blocks` on: its tokens are no longer those that were read."""
        del self.keys[blocks:]

    def copy(self) -> BlockKeys:
        """Keys of a sequence that continues from the same tokens (a fork)."""
        twin = BlockKeys(self._root, self._block_bytes // _TOKEN_BYTES)
        twin.keys = self.keys.copy()
        return twin
