"""From a checkpoint directory to a `Model`: spec, operator table, weights.

Everything that can be refused is refused before weights are read. Called by the engine, by the
engine's process and by `headrace check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from headrace.errors import ConfigError
from headrace.model.deepseek.model import Model
from headrace.model.deepseek.parameters import Parameters
from headrace.model.engram_tables import engram_tables
from headrace.model.memory import weight_memory
from headrace.model.spec import ModelSpec
from headrace.model.weights import Checkpoint
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.numerics import Numerics
from headrace.ops.registry import explain, table
from headrace.platforms import CpuPlatform, Platform

# (bytes read, bytes in all)
Progress = Callable[[int, int], None]


def load_model(
    directory: Path,
    numerics: Numerics,
    *,
    progress: Progress | None = None,
    op_overrides: Mapping[str, str] | None = None,
    with_draft: bool = False,
    platform: Platform | None = None,
) -> Model:
    """Load the checkpoint in `directory` to the device of a platform, by default the CPU's.

    Raises ModelConfigError (config.json), CheckpointError (files), ConfigError / UnsupportedError
    (operators), ConfigError where the device's memory does not hold the weights.
    """
    directory = Path(directory)
    platform = CpuPlatform() if platform is None else platform
    spec = ModelSpec.from_directory(directory)
    resolutions = explain(IMPLEMENTATIONS, platform.name, numerics, op_overrides)
    waiting = tuple(r.op for r in resolutions if r.chosen.waits)
    checkpoint = Checkpoint.open(directory, spec, progress=progress, device=platform.device)
    platform.prepare()
    if platform.device != "cpu":  # a CPU has swap, and maps what it does not convert
        _check_room(spec, numerics, platform, with_draft=with_draft)
    tables = engram_tables(spec, directory / "tokenizer.json")
    # Only quantised checkpoints have layers whose inputs the released path rounds.
    act_group = spec.quant.act_group if numerics.act_quant and spec.quant is not None else 0
    parameters = Parameters(checkpoint, numerics, act_group)
    try:
        model = Model(
            spec,
            numerics,
            table(resolutions),
            parameters,
            tables,
            with_draft=with_draft,
            waiting=waiting,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{platform.device} has too little free memory for the weights; does another program "
            "use it? Take another card (engine.device), or engine.dtype bfloat16.",
            param="engine.device",
        ) from error
    if progress is not None:
        # What is left out on purpose (a draft module nobody asked for) is done too.
        progress(checkpoint.total_bytes, checkpoint.total_bytes)
    return model


def _check_room(
    spec: ModelSpec, numerics: Numerics, platform: Platform, *, with_draft: bool
) -> None:
    """Raise ConfigError where the weights alone are more than what the device has free."""
    needed = weight_memory(spec, numerics.dtype, with_draft=with_draft).device_bytes
    available = platform.memory(platform.device).available_bytes
    if needed <= available:
        return
    narrower = numerics.dtype != "bfloat16" and (
        weight_memory(spec, "bfloat16", with_draft=with_draft).device_bytes <= available
    )
    advice = "set engine.dtype to bfloat16" if narrower else "take a card that has as much"
    raise ConfigError(
        f"The weights need {needed / 2**30:.1f} GiB in {numerics.dtype}, {platform.device} has "
        f"{available / 2**30:.1f} GiB free: {advice}, or set engine.device to cpu.",
        param="engine.device",
    )
