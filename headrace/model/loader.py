"""From a checkpoint directory to a `Model`: spec, operator table, weights.

Everything that can be refused is refused before weights are read. Called by the engine, by the
engine's process and by `headrace check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from headrace.errors import ConfigError
from headrace.model.deepseek.model import Model
from headrace.model.deepseek.parameters import Parameters
from headrace.model.engram_tables import EngramTables, engram_tables, tables_of
from headrace.model.memory import STORED, weight_memory
from headrace.model.random_weights import RandomWeights
from headrace.model.spec import ModelSpec
from headrace.model.weights import Checkpoint, WeightSource
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
    keep_stored: bool = False,
) -> Model:
    """Load the checkpoint in `directory` to the device of a platform, by default the CPU's.

    keep_stored: quantised matrices stay in the checkpoint's own format and are decoded while they
    multiply, instead of being converted to the compute dtype.

    Raises ModelConfigError (config.json), CheckpointError (files), ConfigError / UnsupportedError
    (operators), ConfigError where the device's memory does not hold the weights.
    """
    directory = Path(directory)
    platform = CpuPlatform() if platform is None else platform
    spec = ModelSpec.from_directory(directory)
    checkpoint = Checkpoint.open(directory, spec, progress=progress, device=platform.device)
    platform.prepare()
    if platform.device != "cpu":  # a CPU has swap, and maps what it does not convert
        _check_room(spec, numerics, platform, with_draft=with_draft, keep_stored=keep_stored)
    tables = engram_tables(spec, directory / "tokenizer.json")
    model = _build(
        spec, numerics, checkpoint, tables, platform, op_overrides, with_draft, keep_stored
    )
    if progress is not None:
        # What is left out on purpose (a draft module nobody asked for) is done too.
        progress(checkpoint.total_bytes, checkpoint.total_bytes)
    return model


def random_model(
    spec: ModelSpec,
    numerics: Numerics,
    platform: Platform,
    *,
    seed: int = 0,
    op_overrides: Mapping[str, str] | None = None,
    with_draft: bool = False,
    keep_stored: bool = False,
) -> Model:
    """A model of `spec` with random weights, drawn on the device: for measurements.

    Raises as `load_model`, but for files.
    """
    platform.prepare()
    if platform.device != "cpu":
        _check_room(spec, numerics, platform, with_draft=with_draft, keep_stored=keep_stored)
    tables = None
    if spec.engram is not None:
        compressed = np.arange(spec.vocab_size, dtype=np.int32) % spec.engram.compressed_vocab
        tables = tables_of(spec.engram, compressed)
    source = RandomWeights(spec, platform.device, seed)
    return _build(spec, numerics, source, tables, platform, op_overrides, with_draft, keep_stored)


def _build(
    spec: ModelSpec,
    numerics: Numerics,
    source: WeightSource,
    tables: EngramTables | None,
    platform: Platform,
    op_overrides: Mapping[str, str] | None,
    with_draft: bool,
    keep_stored: bool,
) -> Model:
    stored = keep_stored and spec.quant is not None
    resolutions = explain(IMPLEMENTATIONS, platform.name, numerics, op_overrides, stored=stored)
    waiting = tuple(r.op for r in resolutions if r.chosen.waits)
    # Only quantised checkpoints have layers whose inputs the released path rounds.
    act_group = spec.quant.act_group if numerics.act_quant and spec.quant is not None else 0
    parameters = Parameters(source, numerics, act_group, keep_stored)
    try:
        return Model(
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


def _check_room(
    spec: ModelSpec, numerics: Numerics, platform: Platform, *, with_draft: bool, keep_stored: bool
) -> None:
    """Raise ConfigError where the weights alone are more than what the device has free."""

    def needs(dtype: str, stored: bool) -> int:
        weights = STORED if stored else dtype
        return weight_memory(spec, weights, with_draft=with_draft, dtype=dtype).device_bytes

    needed = needs(numerics.dtype, keep_stored)
    available = platform.memory(platform.device).available_bytes
    if needed <= available:
        return
    narrower = {
        "set engine.dtype to bfloat16": ("bfloat16", keep_stored),
        "set engine.weights to stored": (numerics.dtype, True),
        "set engine.dtype to bfloat16 and engine.weights to stored": ("bfloat16", True),
    }
    fitting = [advice for advice, way in narrower.items() if needs(*way) <= available]
    advice = fitting[0] if fitting else "take a card that has as much"
    form = "as stored" if keep_stored and spec.quant is not None else f"in {numerics.dtype}"
    raise ConfigError(
        f"The weights need {needed / 2**30:.1f} GiB {form}, {platform.device} has "
        f"{available / 2**30:.1f} GiB free: {advice}, or set engine.device to cpu.",
        param="engine.device",
    )
