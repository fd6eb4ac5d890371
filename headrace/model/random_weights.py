"""Weights drawn at random on the model's device: a model of any config without a checkpoint.

For measurements: shapes, formats and memory are those of a checkpoint of the same config, and the
numbers have its order of magnitude. Engram tables lie on the host, with far fewer rows than the
config asks for (`ENGRAM_ROWS`): a row number finds its remainder. Used by `loader.random_model`.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from headrace.model.spec import ModelSpec
from headrace.model.weight_plan import GROUP, effective_kind, planned_tensors
from headrace.model.weights import EngramTable, weight_form
from headrace.ops.stored_weights import StoredWeight, WeightFormat

# Of each table: 256 MiB of codes at the released width, far more than a cache of the host holds.
ENGRAM_ROWS = 2**20
# Root mean square of random codes: E2M1 of all kinds, and E4M3 of 1 to 1.875 with a sign.
_RMS = {WeightFormat.FP4: 2.81, WeightFormat.FP8: 1.46}


class RandomWeights:
    """Implements `model.weights.WeightSource`; equal seeds give equal numbers on equal devices."""

    def __init__(self, spec: ModelSpec, device: str = "cpu", seed: int = 0) -> None:
        self.spec = spec
        self.device = device
        self._seed = seed
        self._plan = {tensor.name: tensor for tensor in planned_tensors(spec)}

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return name in self._plan

    def shape(self, name: str) -> tuple[int, ...]:
        """Of its numbers."""
        return self._plan[name].shape

    def _generator(self, name: str) -> torch.Generator:
        seed = zlib.crc32(name.encode(), self._seed)
        return torch.Generator(torch.device(self.device)).manual_seed(seed)

    def dequantised(self, name: str, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Numbers of a tensor in `dtype`: norms near 1, biases near 0, matrices of gain one."""
        shape, device = self._plan[name].shape, self.device
        generator = self._generator(name)
        if self._plan[name].kind == "i64":
            chances = torch.rand(
                (shape[0], self.spec.num_experts), generator=generator, device=device
            )
            return chances.argsort(dim=1)[:, : shape[1]].contiguous()
        result = torch.empty(shape, dtype=dtype, device=device) if out is None else out
        result.normal_(generator=generator)
        last = name.rpartition(".")[2]
        if name.endswith("norm.weight") or last in ("q_weight", "k_weight"):
            return result.mul_(0.1).add_(1.0)
        if last.startswith("hc_") or last in ("attn_sink", "bias", "bias_vl", "ape"):
            return result.mul_(0.02)
        return result if name.endswith("embed.weight") else result.div_(math.sqrt(shape[-1]))

    def mapped(self, name: str) -> Tensor:
        """A tensor in the dtype that files hold it in."""
        return self.dequantised(name, torch.bfloat16)

    def stored_weight(self, name: str) -> StoredWeight | None:
        """Random codes, and scales that give the matrix a gain of one."""
        tensor = self._plan[name]
        form = weight_form(tensor, self.spec.quant)
        if form is None:
            return None
        (rows, columns), (weights, block) = tensor.shape, form
        width = columns // 2 if weights is WeightFormat.FP4 else columns
        codes = torch.empty((rows, width), dtype=torch.uint8, device=self.device)
        codes.random_(0, 256, generator=self._generator(name))
        if weights is WeightFormat.FP8:
            codes.bitwise_and_(0x87).bitwise_or_(0x38)
        exponent = round(math.log2(columns**-0.5 / _RMS[weights]))
        blocks = (-(-rows // block[0]), columns // block[1])
        scales = torch.full(blocks, 127 + exponent, dtype=torch.uint8, device=self.device)
        return StoredWeight(codes, scales, weights, block)

    def engram_rows(self, layer: int) -> EngramTable:
        """A table of at most `ENGRAM_ROWS` rows on the host."""
        tensor = self._plan[f"layers.{layer}.engram.embed.weight"]
        rows, width = min(tensor.shape[0], ENGRAM_ROWS), tensor.shape[1]
        generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode(), self._seed))
        codes = torch.empty((rows, width), dtype=torch.uint8).random_(0, 256, generator=generator)
        codes.bitwise_and_(0x87).bitwise_or_(0x38)
        if effective_kind(tensor.kind, self.spec.quant) != "engram":
            return _Remainders(codes.view(torch.float8_e4m3fn).bfloat16(), None)
        scales = torch.full((rows, width // GROUP), 127, dtype=torch.uint8)
        return _Remainders(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))


class _Remainders(EngramTable):
    """A table that stands for a longer one."""

    def gather(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows (int64 [...]) modulo those that there are."""
        return super().gather(rows % self.rows, dtype)

    def gather_stored(self, rows: Tensor) -> Tensor:
        """The same as they are stored."""
        return super().gather_stored(rows % self.rows)
