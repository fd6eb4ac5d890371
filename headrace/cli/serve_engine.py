"""The engine of `headrace serve`, built inside the engine process.

Contract: an `EngineFactory` (engine/host.py) that gives the engine the checkpoint's tokenizer, so
that stop strings end an answer in the step that completes them. It is named by its import path:
the engine never imports `recipe`. Called in the engine process only.
"""

from __future__ import annotations

from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine import host
from headrace.engine.wire import EngineInfo
from headrace.recipe.tokenizer import Tokenizer


def load_engine(
    checkpoint: Path, config: EngineConfig, progress: host.ProgressCallback
) -> tuple[host.EngineLike, EngineInfo]:
    """The checkpoint's model and tokenizer in an engine; raises what `host.load_engine` raises."""
    tokenizer = Tokenizer.from_directory(checkpoint)
    return host.load_engine(checkpoint, config, progress, tokenizer)
