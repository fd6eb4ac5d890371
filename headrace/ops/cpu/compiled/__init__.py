"""CPU operators compiled by Numba: what `ops/cpu/decode` does in many calls is one kernel here.

Chosen where Numba can be imported (extra `compiled`); large products stay with BLAS. The first
start after an installation compiles, which takes some ten seconds; the machine code is kept on
disk. For many rows they hand over to `ops/cpu/decode`. Measurements: docs/perf-log.md.
"""

from headrace.ops.cpu.compiled import attention, hyper_connections, indexer, moe, norm

MODULES = (norm, hyper_connections, indexer, attention, moe)
