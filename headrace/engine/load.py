"""From a checkpoint directory to an engine that is ready for requests.

Contract: everything that can be refused is refused before the weights are read where possible; the
errors are those of the checkpoint, the model config and the engine config. Called by `LLM` and by
the engine process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.protocols import Tokenizer
from headrace.engine.engine import Engine
from headrace.model.loader import load_model
from headrace.ops.numerics import Numerics

ProgressCallback = Callable[[int, int], None]


def numerics_of(config: EngineConfig) -> Numerics:
    """The numeric mode that a config asks for."""
    return Numerics(
        dtype=config.dtype,
        kv_quant=config.kv_quant,
        act_quant=config.act_quant,
        batch_invariant=config.batch_invariant,
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
    model = load_model(checkpoint, numerics_of(config), progress=progress)
    return Engine(config, model, tokenizer=tokenizer)
