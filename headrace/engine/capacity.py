"""How much an engine can hold: blocks, slots and the context limit, from model, config and machine.

Contract: `plan_capacity` is pure; it either returns numbers that fit together (one request of
`max_model_len` tokens always fits into the blocks) or raises a ConfigError that names the setting
and what would work. Called by `engine/engine.py`; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.core.kv import KVGroupSpec
from headrace.errors import ConfigError
from headrace.kv.layout import BLOCK_TOKENS, BlockLayout, SlotLayout
from headrace.kv.pool import slots_for

# Without a setting the cache takes this share of the free memory at most: the rest is for
# activations and for other programs.
DEFAULT_MEMORY_SHARE = 0.5
# As much of a card, which nobody shares, once the weights are there.
DEVICE_MEMORY_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Capacity:
    """num_blocks and num_slots include the reserved number 0. Sizes are in bytes per unit."""

    num_blocks: int
    num_slots: int
    max_model_len: int
    block_bytes: int
    slot_bytes: int

    @property
    def max_blocks(self) -> int:
        """Blocks of one request at most."""
        return -(-self.max_model_len // BLOCK_TOKENS)


def plan_capacity(
    config: EngineConfig,
    groups: Sequence[KVGroupSpec],
    *,
    max_position: int,
    number_bytes: int,
    available_bytes: int,
    memory_share: float = DEFAULT_MEMORY_SHARE,
) -> Capacity:
    """Blocks, slots and context limit of an engine.

    max_position: context limit of the model in tokens. number_bytes: of a plain cache number.
    available_bytes: free memory of the device. memory_share: of it, what the cache may take.
    """
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, the model's limit is "
            f"{max_position} tokens.",
            param="engine.max_model_len",
        )
    block_bytes = BlockLayout.build(groups, number_bytes=number_bytes).stride_bytes
    slot_bytes = SlotLayout.build(
        groups, number_bytes=number_bytes, state_bytes=max(4, number_bytes)
    ).stride_bytes
    num_slots = slots_for(config.max_num_seqs)
    wanted_len = config.max_model_len or max_position
    num_blocks = config.num_blocks
    if num_blocks is None:
        budget_bytes = config.kv_memory_bytes or int(available_bytes * memory_share)
        fitting = _blocks_within(budget_bytes - num_slots * slot_bytes, block_bytes)
        # More than all requests at full length could never be used.
        useful = 1 + config.max_num_seqs * -(-wanted_len // BLOCK_TOKENS)
        num_blocks = min(fitting, useful)
        if num_blocks < 2:
            raise ConfigError(
                f"The KV cache may take {budget_bytes} bytes, but {num_slots} slots of "
                f"{slot_bytes} bytes and 2 blocks of {block_bytes} bytes are the least. Raise "
                "engine.kv_memory_bytes or lower engine.max_num_seqs.",
                param="engine.kv_memory_bytes",
            )
    held_tokens = (num_blocks - 1) * BLOCK_TOKENS
    if config.max_model_len is not None and config.max_model_len > held_tokens:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but the KV cache holds "
            f"{held_tokens} tokens ({num_blocks} blocks). Lower it, or raise engine.num_blocks or "
            "engine.kv_memory_bytes.",
            param="engine.max_model_len",
        )
    return Capacity(num_blocks, num_slots, min(wanted_len, held_tokens), block_bytes, slot_bytes)


def _blocks_within(budget_bytes: int, block_bytes: int) -> int:
    # A model without paged rows (window only) still counts tokens in blocks, they cost nothing.
    return max(0, budget_bytes) // max(1, block_bytes)
