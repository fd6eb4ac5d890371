"""`headrace tiny`: write a tiny random checkpoint in the official layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.integer import Integer


def command(
    *,
    out: Path,
    preset: str = "tiny-8",
    seed: Integer = 1,
    quantised: Annotated[bool, Parameter(negative="--no-quantised")] = True,
    shards: Integer = 1,
    force: bool = False,
) -> None:
    """Write a tiny random checkpoint in the official layout.

    The weights are random: the model runs every code path, its text is noise. The same preset and
    seed give the same files everywhere.

    Example: headrace tiny --preset tiny-8 --seed 1 --out my-model

    Parameters
    ----------
    out: Path
        Directory to write; it must be empty or absent.
    preset: str
        tiny-8 (V4.1 with Engram and a draft module) or v4-tiny (V4).
    seed: int
        Seed of the weights, 0 or more.
    quantised: bool
        Store weights in the released FP8 and FP4 formats, else in bf16.
    shards: int
        Number of weight files; more than one come with an index.
    force: bool
        Overwrite a directory that is not empty.
    """
    from headrace.model.tiny_presets import check_arguments

    # Before torch is imported, which takes seconds.
    check_arguments(out, preset=preset, seed=seed, shards=shards, force=force)
    from headrace.model.tiny import write_tiny

    summary = write_tiny(
        out, preset=preset, seed=seed, quantised=quantised, shards=shards, force=force
    )
    print(
        f"wrote {summary.directory}: {preset}, {summary.layers} layers, "
        f"{summary.parameters / 1e6:.1f} M parameters, {summary.stored_bytes / 1e6:.1f} MB of "
        f"{'quantised' if quantised else 'bf16'} random weights (seed {seed}) "
        f"in {len(summary.files)} files."
    )
