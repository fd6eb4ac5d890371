"""A checkpoint seen from one prefix ("layers.3.attn."), in the dtypes that the model computes with.

Linear weights are dequantised to the compute dtype; parameters that the released path keeps in
fp32 come as fp32 (fp64 in the fp64 mode). `act_group` says whether a layer's inputs are rounded.
All tensors lie on the checkpoint's device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.model.weights import Checkpoint
from headrace.ops.numerics import Numerics
from headrace.ops.signatures import OpTable


@dataclass(frozen=True, slots=True)
class Parameters:
    """Tensors below `prefix`; `act_group` > 0 where FP8 inputs are wanted (see Numerics)."""

    checkpoint: Checkpoint
    numerics: Numerics
    act_group: int
    prefix: str = ""

    def scope(self, name: str) -> Parameters:
        """The same checkpoint one level down: `name` ends with a dot."""
        return replace(self, prefix=self.prefix + name)

    @property
    def device(self) -> str:
        """Where the tensors lie."""
        return self.checkpoint.device

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return self.checkpoint.has(self.prefix + name)

    def linear(self, name: str) -> Linear:
        """A weight that is FP8 in quantised checkpoints: its input is rounded too if asked."""
        return Linear(self.plain(name), self.act_group)

    def plain(self, name: str) -> Tensor:
        """A tensor in the compute dtype."""
        return self.checkpoint.dequantised(self.prefix + name, self.numerics.torch_dtype)

    def wide(self, name: str) -> Tensor:
        """A tensor in fp32 (fp64 in the fp64 mode)."""
        return self.checkpoint.dequantised(self.prefix + name, self.numerics.accumulate_dtype)

    def stored(self, name: str) -> Tensor:
        """A tensor as it lies in the file; on the host it is mapped and not copied."""
        return self.checkpoint.mapped(self.prefix + name)

    def stack(self, names: list[list[str]]) -> Tensor:
        """Matrices of equal shape [n, m] in the compute dtype, filled one at a time.

        Those of an inner list lie above each other: [len(names), len(names[0]) * n, m].
        """
        dtype = self.numerics.torch_dtype
        shape = self.checkpoint.shape(self.prefix + names[0][0])
        size = (len(names), len(names[0]), *shape)
        out = torch.empty(size, dtype=dtype, device=self.device)
        for places, row in zip(out, names, strict=True):
            for place, name in zip(places, row, strict=True):
                self.checkpoint.dequantised(self.prefix + name, dtype, out=place)
        return out.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [N, K]; act_group > 0: inputs are rounded to FP8 per group before the product."""

    weight: Tensor
    act_group: int

    def __call__(self, x: Tensor, ops: OpTable) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self.act_group:
            x = ops.fake_fp8(x, self.act_group)
        return ops.linear(x, self.weight)
