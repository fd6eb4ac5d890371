"""What of a model fits on a number of equal GPUs.

Contract: pure arithmetic on a `ModelSpec`, no torch. Routed experts are split over the GPUs,
everything else is on each of them, and so are the cache rows of the requests that it serves. Called
by `headrace plan memory`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.capacity import DEVICE_MEMORY_SHARE
from headrace.errors import ConfigError
from headrace.kv.layout import BLOCK_TOKENS, BlockLayout, SlotLayout
from headrace.kv.pool import slots_for
from headrace.model.memory import STORED, weight_memory
from headrace.model.spec import ModelSpec

MIB, GIB = 2**20, 2**30
# As nvidia-smi shows them. H200: seen; the others: published figures.
GPU_BYTES = {
    "A100": 81920 * MIB,
    "B200": 183359 * MIB,
    "H100": 81559 * MIB,
    "H20": 97871 * MIB,
    "H200": 143771 * MIB,
    "RTX-PRO-6000": 97887 * MIB,
}
# What CUDA and torch keep on a card before anything is loaded.
CONTEXT_BYTES = 512 * MIB
MAX_GPUS = 1024
_GPUS = re.compile(r"(\d+)x(?:(\d+(?:\.\d+)?)(?:GB|GiB)|([A-Za-z][\w-]*))", re.ASCII)
_NUMBER_BYTES = {STORED: 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """One number of GPUs; bytes are of each GPU.

    kv_bytes: what is left for the cache. blocks, tokens: that it holds on each GPU. requests: of
    `context` tokens, all GPUs together. short_bytes: what each GPU lacks for the weights and one
    request, 0: nothing.
    """

    gpus: int
    experts_bytes: int
    dense_bytes: int
    kv_bytes: int
    blocks: int
    tokens: int
    requests: int
    short_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """gpu_bytes: of one. engram_bytes: of host memory, once per host. context: tokens of a request.
    block_bytes, request_bytes: of 128 tokens, and of a request's windows and states."""

    gpu_bytes: int
    engram_bytes: int
    context: int
    block_bytes: int
    request_bytes: int
    rows: tuple[GpuPlan, ...]


def parse_gpus(text: str) -> tuple[int, int]:
    """("8xH200" or "2x80GB") -> number of GPUs and bytes of each. Raises ConfigError."""
    found = _GPUS.fullmatch(text)
    known = ", ".join(GPU_BYTES)
    if found is None or (found[3] is not None and found[3].upper() not in GPU_BYTES):
        raise ConfigError(
            f"--gpus {text!r} is unknown, allowed: 8xH200 (also {known}) or a size, 2x80GB.",
            param="gpus",
        )
    count = int(found[1])
    size = int(float(found[2]) * GIB) if found[2] else GPU_BYTES[found[3].upper()]
    if not 1 <= count <= MAX_GPUS or not 1 <= size / GIB <= 2**20:
        raise ConfigError(f"--gpus {text!r}: 1 to {MAX_GPUS} GPUs of 1 GB or more.", param="gpus")
    return count, size


def plan_memory(
    spec: ModelSpec,
    *,
    gpus: int,
    gpu_bytes: int,
    weights: str = STORED,
    with_draft: bool = True,
    context: int = 8192,
    kv_quant: bool = True,
) -> MemoryPlan:
    """For 1, 2, 4 ... GPUs up to `gpus`, and `gpus` itself.

    weights: "stored" (the checkpoint's own formats) or a dtype. context: tokens of a request.
    Raises ConfigError for a context that the model does not have.
    """
    if not 1 <= context <= spec.max_position:
        raise ConfigError(
            f"--context must be in [1, {spec.max_position}], the model's limit, got {context}.",
            param="context",
        )
    memory = weight_memory(spec, weights, with_draft=with_draft)
    groups = [g for g in spec.kv_groups(kv_quant) if with_draft or g.name != "window_draft"]
    number = _NUMBER_BYTES[weights]
    block = BlockLayout.build(groups, number_bytes=number).stride_bytes
    slot = SlotLayout.build(groups, number_bytes=number, state_bytes=max(4, number)).stride_bytes
    dense = memory.device_bytes - memory.experts_bytes - memory.draft_experts_bytes
    drafting = 1 if spec.draft is None else spec.draft.num_experts
    rows = []
    for count in _counts(gpus):
        experts = _share(memory.experts_bytes, spec.num_experts, count)
        experts += _share(memory.draft_experts_bytes, drafting, count)
        free = gpu_bytes - CONTEXT_BYTES - experts - dense
        kv = max(0, int(free * DEVICE_MEMORY_SHARE))
        blocks, requests = _fitting(kv, block, slot, context)
        least = _needed(1, block, slot, context)
        short = max(0, int(least / DEVICE_MEMORY_SHARE) - free)
        tokens = max(0, blocks - 1) * BLOCK_TOKENS
        rows.append(GpuPlan(count, experts, dense, kv, blocks, tokens, requests * count, short))
    return MemoryPlan(gpu_bytes, memory.engram_bytes, context, block, slot, tuple(rows))


def _counts(gpus: int) -> Sequence[int]:
    powers = [1 << n for n in range(gpus.bit_length()) if 1 << n < gpus]
    return [*powers, gpus]


def _share(experts_bytes: int, experts: int, gpus: int) -> int:
    """Of the GPU that has the most experts."""
    return experts_bytes * -(-experts // gpus) // experts


def _needed(requests: int, block_bytes: int, slot_bytes: int, context: int) -> int:
    blocks = 1 + requests * -(-context // BLOCK_TOKENS)
    return blocks * block_bytes + slots_for(requests) * slot_bytes


def _fitting(kv_bytes: int, block_bytes: int, slot_bytes: int, context: int) -> tuple[int, int]:
    """(blocks, requests of `context` tokens) in the cache: blocks are what the requests leave."""
    low, high = 0, 2**24
    while low < high:
        middle = (low + high + 1) // 2
        fits = _needed(middle, block_bytes, slot_bytes, context) <= kv_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    if low == 0:
        return 0, 0
    left = kv_bytes - slots_for(low) * slot_bytes
    return left // max(1, block_bytes), low
