"""From a checkpoint directory to an engine that is ready for requests.

Contract: everything that can be refused is refused before the weights are read where possible; the
errors are those of the checkpoint, the model config and the engine config. Called by `LLM` and by
the engine process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from headrace.config import EngineConfig
from headrace.core.protocols import Tokenizer
from headrace.engine.engine import Engine, default_threads
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.spec import ModelSpec
from headrace.ops.numerics import Numerics
from headrace.platforms.cpu import CpuPlatform

# Enough to complete compressed entries of every ratio but 128.
_WARM_UP_TOKENS = 8

ProgressCallback = Callable[[int, int], None]


def numerics_of(config: EngineConfig) -> Numerics:
    """The numeric mode that a config asks for."""
    return Numerics(
        dtype=config.dtype,
        kv_quant=config.kv_quant,
        act_quant=config.act_quant,
        batch_invariant=config.invariant_operators,
    )


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
    with loading_threads(checkpoint, config):
        model = load_model(checkpoint, numerics_of(config), progress=progress)
        warm_up(model)
    return Engine(config, model, tokenizer=tokenizer)


def loading_threads(checkpoint: Path, config: EngineConfig) -> AbstractContextManager[None]:
    """As many threads while the weights are read as the engine will use.

    Tensors of a small model cost microseconds on one thread and, on a busy machine, a thousand
    times as much on several.
    """
    platform = CpuPlatform()
    spec = ModelSpec.from_directory(checkpoint)
    return platform.threads(config.threads or default_threads(spec, platform))


def warm_up(model: Model) -> None:
    """Run a short prompt and one more token, so that no request waits for operators to be compiled.

    That takes some ten seconds in the first start after an installation, else under one.
    """
    cache = KVCache(model.kv_groups(), num_blocks=2, num_slots=2, dtype=model.numerics.torch_dtype)
    ids = np.zeros(_WARM_UP_TOKENS + 1, np.int64)
    with torch.inference_mode():
        for start, length in ((0, _WARM_UP_TOKENS), (_WARM_UP_TOKENS, 1)):
            row = BatchRow(ids, start, length, block_table=[1], slot=1)
            model.forward(Batch.build([row], model.max_ngram), cache)
        # So short a prompt selects everything it sees.
        model.ops.select_top_k(torch.zeros((1, 2), dtype=model.numerics.torch_dtype), 1)
