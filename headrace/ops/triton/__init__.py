"""Triton operators for NVIDIA GPUs from SM80 on.

`MODULES` says where each lies; `function` gives what the catalogue lists. Triton is imported with
the first call, since it takes a second and a CPU never needs it. What kernels share: `records`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# operator -> the module of this package that has a function of its name
MODULES = {
    "sparse_attention": "attention",
    "entry_scores": "indexer",
    "candidate_mask": "selection",
    "select_top_k": "selection",
}


def missing() -> str | None:
    """Why Triton operators cannot run here, or None."""
    return None if find_spec("triton") else "needs the package triton, which is not installed"


def function(op: str) -> Callable[..., Any]:
    """The Triton implementation of `op`, one of `MODULES`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _loaded(op)(*args, **kwargs)

    call.__name__ = op
    return call


@cache
def _loaded(op: str) -> Callable[..., Any]:
    loaded: Callable[..., Any] = getattr(import_module(f"{__name__}.{MODULES[op]}"), op)
    return loaded
