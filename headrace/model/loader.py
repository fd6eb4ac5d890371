"""From a checkpoint directory to a `Model`: spec, operator table, weights.

Everything that can be refused is refused before weights are read. Called by the engine, by the
engine's process and by `headrace check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.model.deepseek.model import Model
from headrace.model.deepseek.parameters import Parameters
from headrace.model.engram_tables import engram_tables
from headrace.model.spec import ModelSpec
from headrace.model.weights import Checkpoint
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.numerics import Numerics
from headrace.ops.registry import resolve

# (bytes read, bytes in all)
Progress = Callable[[int, int], None]


def load_model(
    directory: Path,
    numerics: Numerics,
    *,
    progress: Progress | None = None,
    op_overrides: Mapping[str, str] | None = None,
    with_draft: bool = False,
) -> Model:
    """Load the checkpoint in `directory` on the CPU.

    Raises ModelConfigError (config.json), CheckpointError (files), ConfigError / UnsupportedError
    (operators).
    """
    directory = Path(directory)
    spec = ModelSpec.from_directory(directory)
    ops = resolve(IMPLEMENTATIONS, "cpu", numerics, op_overrides)
    checkpoint = Checkpoint.open(directory, spec, progress=progress)
    tables = engram_tables(spec, directory / "tokenizer.json")
    # Only quantised checkpoints have layers whose inputs the released path rounds.
    act_group = spec.quant.act_group if numerics.act_quant and spec.quant is not None else 0
    parameters = Parameters(checkpoint, numerics, act_group)
    model = Model(spec, numerics, ops, parameters, tables, with_draft=with_draft)
    if progress is not None:
        # What is left out on purpose (a draft module nobody asked for) is done too.
        progress(checkpoint.total_bytes, checkpoint.total_bytes)
    return model
