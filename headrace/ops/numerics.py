"""The numeric mode of an engine: one frozen value that operators are resolved for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.errors import ConfigError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Numerics:
    """dtype: of the residual stream and all linear layers ("float64", "float32", "bfloat16").

    kv_quant: cache rows are stored in the released FP8/FP4 formats (and index queries rounded);
    off = plain rows in the compute dtype. act_quant: inputs of quantised linear layers are rounded
    to FP8 per group, as the released path does. batch_invariant: a row's result is bit-equal in
    every batch and every run; only operators that are batch-invariant and deterministic are chosen.
    """

    dtype: str = "float32"
    kv_quant: bool = True
    act_quant: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is unknown, allowed: {', '.join(DTYPES)}.", param="dtype"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of stream and linear layers."""
        return DTYPES[self.dtype]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Dtype of the steps that are fp32 in the released path: fp64 in the fp64 mode."""
        return torch.float64 if self.dtype == "float64" else torch.float32
