"""`headrace eval tiny`: ask the embedded model (or any checkpoint) tasks with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.integer import Integer


def command(
    *,
    model: Path | None = None,
    family: Annotated[list[str] | None, Parameter(negative="")] = None,
    seed: Integer = 1_000_000_000,
    n: Integer = 200,
    json_lines: Annotated[bool, Parameter(name="--json", negative="")] = False,
    replay: Literal["bounded", "exact", "off"] = "bounded",
    truncate: Literal["on", "off"] | None = None,
    ablation: Literal["none", "random-top-k", "no-engram", "half-candidates"] = "none",
    failures: Integer = 0,
    jobs: Integer | None = None,
    dtype: Literal["float64", "float32", "bfloat16"] = "float32",
    kv_quant: Annotated[bool, Parameter(negative="--no-kv-quant")] = True,
) -> int:
    """Ask the embedded model tasks with known answers, greedily, and print the table.

    Exits 1 if a gate is missed. Tasks are drawn from seeds: training used seeds below 1000000000,
    so all others are new to the model.

    Examples:

        headrace eval tiny
        headrace eval tiny --family arithmetic --seed 1234567890 --n 1000 --failures 5
        headrace eval tiny --family recall --ablation random-top-k
        headrace eval tiny --model bf16-export --no-kv-quant --json

    Parameters
    ----------
    model: Path
        Checkpoint directory (default: `tiny`, the embedded model).
    family: str
        tools, json, arithmetic, sorting, counting, copying, recall, followups, definitions,
        small_talk or english; may be given several times (default: all).
    seed: int
        The first seed.
    n: int
        Items of each family.
    json_lines
        Print one JSON object instead of the table.
    replay: str
        How windows are rebuilt after a hit in the prefix cache.
    truncate: str
        Whether the last layers run on the end of a prompt only (default: where the model allows).
    ablation: str
        A part of the model to take out first, to see what it is good for.
    failures: int
        Show up to this many wrong answers of each family.
    jobs: int
        Processes (default: one per two CPU threads, at least two).
    dtype: str
        Arithmetic of the model.
    kv_quant: bool
        Store the KV cache in the released FP8 and FP4 formats, also for weights in bf16; else as
        it is computed.
    """
    from headrace.cli.eval_run import EvalCommand, run

    return run(
        EvalCommand(
            model=model,
            families=tuple(family or ()),
            seed=seed,
            count=n,
            as_json=json_lines,
            replay=replay,
            truncate=truncate,
            ablation=ablation,
            failures=failures,
            jobs=jobs,
            dtype=dtype,
            kv_quant=kv_quant,
        )
    )
