"""Cache memory: where rows lie (layout), who holds them (pool, manager), and the bytes (cache).

Only what needs no torch is exported here, so that policies and the simulator can import it;
`headrace.kv.cache` is imported by name.
"""

from headrace.kv.layout import BLOCK_TOKENS, BlockLayout, SlotLayout
from headrace.kv.manager import Admission, Fork, KVManager, KVStats
from headrace.kv.pool import BlockPool, PoolStats, Shortage, SlotPool, slots_for

__all__ = [
    "BLOCK_TOKENS",
    "Admission",
    "BlockLayout",
    "BlockPool",
    "Fork",
    "KVManager",
    "KVStats",
    "PoolStats",
    "Shortage",
    "SlotLayout",
    "SlotPool",
    "slots_for",
]
