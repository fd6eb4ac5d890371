"""Cache memory: where rows lie (layout), who holds them (pool, prefix, manager), the bytes (cache).

Only what needs no torch is exported here, so that policies and the simulator can import it;
`headrace.kv.cache` is imported by name.
"""

from headrace.kv.layout import BLOCK_TOKENS, BlockLayout, SlotLayout
from headrace.kv.manager import KVManager, KVStats
from headrace.kv.pool import BlockPool, PoolStats, Shortage, slots_for
from headrace.kv.prefix import BlocksRemoved, BlocksStored, PrefixIndex, PrefixStats

__all__ = [
    "BLOCK_TOKENS",
    "BlockLayout",
    "BlockPool",
    "BlocksRemoved",
    "BlocksStored",
    "KVManager",
    "KVStats",
    "PoolStats",
    "PrefixIndex",
    "PrefixStats",
    "Shortage",
    "SlotLayout",
    "slots_for",
]
