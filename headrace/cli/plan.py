"""`headrace plan`: what a model needs, before there is a machine for it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headrace.cli.integer import Integer

if TYPE_CHECKING:
    from headrace.engine.memory_plan import MemoryPlan

DEFAULT_CONTEXT = 8192
# Exit code of the command line when nothing fits.
NOTHING_FITS = 1


def memory(
    *,
    model: Path,
    gpus: Annotated[str, Parameter(allow_leading_hyphen=True)],
    weights: Literal["stored", "bfloat16", "float32"] = "stored",
    context: Integer | None = None,
    draft: Annotated[bool, Parameter(negative="--no-draft")] = True,
    json_lines: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Say what fits on 1, 2, 4 ... GPUs: weights, KV cache, tokens of context, requests.

    Routed experts are split over the GPUs, the other weights are on each of them; Engram tables are
    in the memory of the host. Today an engine is on one GPU, with weights as they are stored or
    (engine.weights) converted: `--weights float32` or `bfloat16` counts them so. Exits 1 where no
    number of GPUs will do.

    Example: headrace plan memory --model config.json --gpus 8xH200

    Parameters
    ----------
    model: Path
        A config.json, or a directory that has one.
    gpus: str
        Number and kind, 8xH200, or number and memory, 2x80GB (GiB).
    weights: str
        stored: in the checkpoint's own formats; else all converted to that dtype.
    context: int
        Tokens of each request, prompt and answer together (default: 8192, or the model's limit
        where that is less).
    draft: bool
        Count the draft module, if the model has one.
    json_lines: bool
        Print one JSON object instead of text.
    """
    from headrace.engine.memory_plan import parse_gpus, plan_memory
    from headrace.model.spec import ModelSpec
    from headrace.model.spec_parse import read_config, read_config_file

    count, size = parse_gpus(gpus)
    config = read_config(model) if model.is_dir() else read_config_file(model)
    spec = ModelSpec.from_config(config)
    plan = plan_memory(
        spec,
        gpus=count,
        gpu_bytes=size,
        weights=weights,
        with_draft=draft,
        context=min(DEFAULT_CONTEXT, spec.max_position) if context is None else context,
    )
    if json_lines:
        print(json.dumps(asdict(plan)))
    else:
        _print(plan)
    return NOTHING_FITS if all(row.short_bytes for row in plan.rows) else 0


def _print(plan: MemoryPlan) -> None:
    print(
        f"Each GPU has {_gib(plan.gpu_bytes)} GiB. A block of 128 tokens takes {plan.block_bytes} "
        f"bytes, a request {plan.request_bytes} more."
    )
    if plan.engram_bytes:
        print(f"Engram tables: {_gib(plan.engram_bytes)} GiB of host memory or its page cache.")
    print(
        f"{'GPUS':>4} {'EXPERTS':>8} {'DENSE':>8} {'KV CACHE':>9} {'BLOCKS':>9} {'TOKENS':>12} "
        f"{'REQUESTS':>9}  SHORT OF"
    )
    for row in plan.rows:
        short = f"{_gib(row.short_bytes)} GiB a GPU" if row.short_bytes else "-"
        print(
            f"{row.gpus:>4} {_gib(row.experts_bytes):>8} {_gib(row.dense_bytes):>8} "
            f"{_gib(row.kv_bytes):>9} {row.blocks:>9} {row.tokens:>12} {row.requests:>9}  {short}"
        )
    print(
        "Experts, dense and KV cache in GiB, blocks and tokens: of each GPU. "
        f"Requests: of {plan.context} tokens, all GPUs together."
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
