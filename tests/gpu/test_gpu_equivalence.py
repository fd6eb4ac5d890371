"""The equivalence suite of the CPU on a card: alone = batched = chunked = preempted, bit for bit.

Its fp64 mode is held to 1e-10, its batch-invariant fp32 modes to equal bits.
"""

from __future__ import annotations

from tests.equivalence.conftest import serve, tiny_dir
from tests.equivalence.test_engine_equivalence import (
    alone,
    mode,
    test_arriving_while_others_run,
    test_chunked_prefill,
    test_inside_batches,
    test_preempted,
)

__all__ = [
    "alone",
    "mode",
    "serve",
    "test_arriving_while_others_run",
    "test_chunked_prefill",
    "test_inside_batches",
    "test_preempted",
    "tiny_dir",
]
