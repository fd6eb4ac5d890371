"""CPU operators for steps of few rows: decode. One module per module of `ops/reference`.

In such a step the numbers are few and the calls many, so that the time of an operator is the number
of calls it makes: about 3 us per torch call and 1 us per NumPy call, whatever they compute. These
implementations make fewer calls, work in NumPy between two tensors that share its memory, and leave
matrix products to torch. Above `arrays.FEW` numbers they hand over to the reference, whose calls
run on several threads, or to `prefill`. Measurements: docs/perf-log.md.
"""

from headrace.ops.cpu.decode import (
    attention,
    engram,
    head,
    hyper_connections,
    indexer,
    moe,
    norm,
    quant,
)

MODULES = (norm, quant, hyper_connections, indexer, attention, moe, engram, head)
