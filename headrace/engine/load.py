"""From a checkpoint directory to an engine that is ready for requests.

Contract: everything that can be refused is refused before the weights are read where possible; the
errors are those of the checkpoint, the model config and the engine config. Called by `LLM` and by
the engine process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from headrace.config import EngineConfig
from headrace.core.protocols import Tokenizer
from headrace.engine.engine import (
    SMALL_HIDDEN,
    Engine,
    default_threads,
    speculation_policy,
    wants_graphs,
)
from headrace.engine.speculation.drafts import ModelDrafter
from headrace.engine.step_cost import measure_cost
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.spec import DraftSpec, ModelSpec
from headrace.ops import triton
from headrace.ops.numerics import Numerics
from headrace.platforms import Platform, choose_platform

# Enough to complete compressed entries of every ratio but 128.
_WARM_UP_TOKENS = 8

ProgressCallback = Callable[[int, int], None]


def numerics_of(config: EngineConfig) -> Numerics:
    """The numeric mode that a config asks for, on a CPU where it names no dtype."""
    return Numerics(
        dtype=config.dtype or "float32",
        kv_quant=config.kv_quant,
        act_quant=config.act_quant,
        batch_invariant=config.invariant_operators,
    )


def keeps_stored(config: EngineConfig, platform: Platform) -> bool:
    """Whether quantised matrices stay as the checkpoint has them.

    In fp32 and fp64 a device multiplies with libraries, on a CPU with operators that take numbers,
    and without Triton a weight would be decoded as a whole whenever it is used.
    """
    if config.weights is None:
        on_card = platform.device != "cpu" and triton.missing() is None
        return on_card and config.dtype == "bfloat16"
    return config.weights == "stored"


def load_engine(
    checkpoint: Path,
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None = None,
    progress: ProgressCallback | None = None,
) -> Engine:
    """Load the model of `checkpoint` and build its engine.

    tokenizer: for stop strings; without it requests that have some are refused. progress: called
    with (done_bytes, total_bytes) while weights are read. Raises CheckpointError, ModelConfigError,
    UnsupportedError, ConfigError.
    """
    spec = ModelSpec.from_directory(checkpoint)
    draft = spec.draft
    length = draft_length(config, draft)
    # Measured: a step of the embedded model takes 6 ms on a CPU core and 89 ms on an H200, nearly
    # all of it launches.
    small = spec.hidden < SMALL_HIDDEN
    platform = choose_platform(config.device, rather_cpu=small)
    if config.dtype is None:
        config = replace(config, dtype="float32" if platform.device == "cpu" else "bfloat16")
    with loading_threads(checkpoint, config, platform):
        model = load_model(
            checkpoint,
            numerics_of(config),
            progress=progress,
            with_draft=length > 0,
            platform=platform,
            keep_stored=keeps_stored(config, platform),
        )
        warm_up(model)
        cost = None
        if length and speculation_policy(config, length).adaptive:
            sizes = config.max_num_seqs, config.max_num_batched_tokens
            recorded = wants_graphs(config, model, platform)
            cost = measure_cost(model, length, *sizes, platform, recorded=recorded)
    drafter = ModelDrafter(model, length) if length else None
    return Engine(
        config,
        model,
        tokenizer=tokenizer,
        drafter=drafter,
        cost=cost,
        platform=platform,
        temperatures=draft.confidence_temperatures[:length] if draft and length else 1.0,
    )


def draft_length(config: EngineConfig, draft: DraftSpec | None) -> int:
    """Drafts of a block, 0: none are made.

    draft: the checkpoint's draft module. Raises ConfigError if the config asks for more than its
    block size, or for drafts where it has none: a longer block than it was trained with would
    spoil all of its drafts.
    """
    most = 0 if draft is None else draft.block_size
    policy = speculation_policy(config, most)
    if policy.drafts == 0 and config.draft_length is None:
        return 0
    length = config.draft_length or (most if policy.adaptive else policy.drafts)
    if length > most:
        raise ConfigError(
            f"engine.draft_length is {length}, but this checkpoint's draft module was trained with "
            f"blocks of {most}."
            if most
            else f"engine.draft_length is {length}, but this checkpoint has no draft module.",
            param="engine.draft_length",
        )
    policy.require_length(length)
    return length


def loading_threads(
    checkpoint: Path, config: EngineConfig, platform: Platform
) -> AbstractContextManager[None]:
    """As many threads while the weights are read as the engine will use.

    Tensors of a small model cost microseconds on one thread and, on a busy machine, a thousand
    times as much on several.
    """
    spec = ModelSpec.from_directory(checkpoint)
    return platform.threads(config.threads or default_threads(spec, platform))


def warm_up(model: Model) -> None:
    """Run a short prompt and one more token, so that no request waits for operators to be compiled.

    That takes some ten seconds in the first start after an installation, else under one.
    """
    dtype, device = model.numerics.torch_dtype, model.device
    cache = KVCache(model.kv_groups(), num_blocks=2, num_slots=2, dtype=dtype, device=device)
    ids = np.zeros(_WARM_UP_TOKENS + 1, np.int64)
    with torch.inference_mode():
        for start, length in ((0, _WARM_UP_TOKENS), (_WARM_UP_TOKENS, 1)):
            row = BatchRow(ids, start, length, block_table=[1], slot=1)
            model.forward(Batch.build([row], model.max_ngram), cache)
        # So short a prompt selects everything it sees.
        model.ops.select_top_k(torch.zeros((1, 2), dtype=dtype, device=device), 1)
