"""Triton operators for NVIDIA GPUs from SM80 on.

`MODULES` says where each lies; `function` gives what the catalogue lists. Triton is imported with
the first call, since it takes a second and a CPU never needs it. What kernels share: `records`,
`rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

# operator -> the module of this package that has a function of its name
MODULES = {
    "hc_collapse": "hyper_connections",
    "hc_enter": "hyper_connections",
    "hc_head": "hyper_connections",
    "hc_merge": "hyper_connections",
    "rms_norm": "norm",
    "rope": "norm",
    "norm_rope": "norm",
    "hadamard": "norm",
    "fake_fp8": "quant",
    "fake_fp4_ue8m0": "quant",
    "round_rows": "quant",
    "read_records": "cache_rows",
    "read_majors": "cache_rows",
    "write_records": "cache_rows",
    "pool_entries": "pooling",
    "sparse_attention": "attention",
    "engram_gate": "engram",
    "engram_add": "engram",
    "linear": "products",
    "grouped_projection": "products",
    "logits": "products",
    "moe": "moe",
    "router": "router",
    "entry_scores": "indexer",
    "candidate_mask": "selection",
    "select_top_k": "selection",
}
# What is no operator of a model, and so not in the catalogue: who needs it calls it.
OTHERS = {"noisy_best": "noisy_best"}
# Those that look their tile up by the number of rows, unless `fixed_tile=True` is given.
BY_ROWS = ("linear", "grouped_projection", "logits", "moe", "sparse_attention")


def installed() -> bool:
    """Whether there is a package that compiles or interprets the kernels."""
    return find_spec("triton") is not None


def missing() -> str | None:
    """Why Triton operators cannot run here, or None."""
    if not installed():
        return "needs the package triton, which is not installed"
    return None if torch.version.cuda else "needs a CUDA build of torch"


def function(op: str, **options: bool) -> Callable[..., Any]:
    """The Triton implementation of `op`, of `MODULES` or `OTHERS`; `options` come with calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _loaded(op)(*args, **kwargs, **options)

    call.__name__ = op
    return call


@cache
def _loaded(op: str) -> Callable[..., Any]:
    module = MODULES[op] if op in MODULES else OTHERS[op]
    loaded: Callable[..., Any] = getattr(import_module(f"{__name__}.{module}"), op)
    return loaded
