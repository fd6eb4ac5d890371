"""A checkpoint seen from one prefix ("layers.3.attn."), in the dtypes that the model computes with.

Linear weights are dequantised to the compute dtype or, with `keep_stored`, kept in the checkpoint's
own format; parameters that the released path keeps in fp32 come as fp32 (fp64 in the fp64 mode).
`act_group` says whether a layer's inputs are rounded. All tensors lie on the checkpoint's device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.errors import InternalError
from headrace.model.weights import WeightSource
from headrace.ops.numerics import Numerics
from headrace.ops.signatures import OpTable
from headrace.ops.stored_weights import StoredWeight, Weight


@dataclass(frozen=True, slots=True)
class Parameters:
    """Tensors below `prefix`; `act_group` > 0 where FP8 inputs are wanted (see Numerics)."""

    checkpoint: WeightSource
    numerics: Numerics
    act_group: int
    keep_stored: bool = False
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
        return Linear(self.weight(name), self.act_group)

    def weight(self, name: str) -> Weight:
        """A matrix for an operator that takes either kind."""
        found = self.checkpoint.stored_weight(self.prefix + name) if self.keep_stored else None
        return self.plain(name) if found is None else found

    def above(self, upper: str, lower: str) -> Weight:
        """Two matrices [n, k] and [m, k] as one, [n + m, k]."""
        one, other = self.weight(upper), self.weight(lower)
        if not isinstance(one, StoredWeight) or not isinstance(other, StoredWeight):
            return torch.cat((self.plain(upper), self.plain(lower)))
        if one.shape[0] % one.block[0]:  # a block of scales would lie across the border
            return torch.cat((self.plain(upper), self.plain(lower)))
        codes = torch.cat((one.codes, other.codes))
        return replace(one, codes=codes, scales=torch.cat((one.scales, other.scales)))

    def plain(self, name: str) -> Tensor:
        """A tensor in the compute dtype."""
        return self.checkpoint.dequantised(self.prefix + name, self.numerics.torch_dtype)

    def wide(self, name: str) -> Tensor:
        """A tensor in fp32 (fp64 in the fp64 mode)."""
        return self.checkpoint.dequantised(self.prefix + name, self.numerics.accumulate_dtype)

    def stored(self, name: str) -> Tensor:
        """A tensor as it lies in the file; on the host it is mapped and not copied."""
        return self.checkpoint.mapped(self.prefix + name)

    def head(self, name: str) -> Tensor:
        """The output head: as it is stored, or else in fp32 (fp64)."""
        return self.stored(name) if self.keep_stored else self.wide(name)

    def stack(self, names: list[list[str]]) -> Weight:
        """Matrices of equal shape [n, m], filled one at a time.

        Those of an inner list lie above each other: [len(names), len(names[0]) * n, m].
        """
        first = self.prefix + names[0][0]
        shape = self.checkpoint.shape(first)
        stored = self.checkpoint.stored_weight(first) if self.keep_stored else None
        if stored is not None and (len(names[0]) == 1 or shape[0] % stored.block[0] == 0):
            return self._stack_stored(names, stored)
        dtype = self.numerics.torch_dtype
        size = (len(names), len(names[0]), *shape)
        out = torch.empty(size, dtype=dtype, device=self.device)
        for places, row in zip(out, names, strict=True):
            for place, name in zip(places, row, strict=True):
                self.checkpoint.dequantised(self.prefix + name, dtype, out=place)
        return out.flatten(1, 2)

    def _stack_stored(self, names: list[list[str]], like: StoredWeight) -> StoredWeight:
        """The same in the format of `like`, the first of them."""
        size = (len(names), len(names[0]))
        codes = torch.empty((*size, *like.codes.shape), dtype=torch.uint8, device=self.device)
        scales = torch.empty((*size, *like.scales.shape), dtype=torch.uint8, device=self.device)
        for number, row in enumerate(names):
            for place, name in enumerate(row):
                found = self.checkpoint.stored_weight(self.prefix + name)
                if found is None:
                    raise InternalError(f"{name} is not stored as the tensors beside it are.")
                codes[number, place], scales[number, place] = found.codes, found.scales
        return replace(like, codes=codes.flatten(1, 2), scales=scales.flatten(1, 2))


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [N, K]; act_group > 0: inputs are rounded to FP8 per group before the product."""

    weight: Weight
    act_group: int

    def __call__(self, x: Tensor, ops: OpTable) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self.act_group:
            x = ops.fake_fp8(x, self.act_group)
        return ops.linear(x, self.weight)
