"""Engram: the gated n-gram memory of one layer. Table rows are read from the mapped file.

Token ids, their hashes and the tables stay on the host, whatever the model's device: what is sent
there is the rows that were read, before the first layer runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.batch import NO_TOKEN
from headrace.model.deepseek.parameters import Linear, Parameters
from headrace.model.engram_tables import EngramTables
from headrace.model.spec import ModelSpec
from headrace.model.weights import EngramTable
from headrace.ops.signatures import OpTable


def compress_ngrams(ngrams: Tensor, token_map: Tensor, pad: int) -> Tensor:
    """Raw ids [T, G] (newest first) -> compressed ids; `pad` where there is no token.

    Everything behind a missing token is missing too: look-back never crosses the start.
    """
    alive = torch.cumprod((ngrams != NO_TOKEN).to(torch.int64), dim=-1) > 0
    return torch.where(alive, token_map[ngrams.clamp_min(0)], pad)


@dataclass(frozen=True, slots=True)
class Engram:
    """multipliers int64 [G]; primes, offsets int64 [G-1, heads]; weight [hc, D] = q * k weight.

    The integers lie on the host.
    """

    table: EngramTable
    wkv: Linear
    weight: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @classmethod
    def load(cls, p: Parameters, tables: EngramTables, layer: int, number: int) -> Engram:
        """Weights below the "engram." scope of `layer`, the `number`-th Engram layer."""
        return cls(
            table=p.checkpoint.engram_rows(layer),
            wkv=p.linear("wkv.weight"),
            weight=p.wide("q_weight") * p.wide("k_weight"),
            multipliers=torch.from_numpy(tables.multipliers[number]),
            primes=torch.from_numpy(tables.primes[number]),
            offsets=torch.from_numpy(tables.offsets[number]),
        )

    def rows(self, compressed: Tensor, ops: OpTable) -> Tensor:
        """Table rows int64 [T, columns] of compressed n-grams [T, G], both on the host."""
        return ops.ngram_rows(compressed, self.multipliers, self.primes, self.offsets)

    def gather(self, rows: Tensor, dtype: torch.dtype, device: str) -> Tensor:
        """Table rows [T, columns], on the host -> what `forward` takes, still on the host.

        Numbers [T, columns * head_dim] in `dtype` for a CPU; others get [T, columns, ..] as it is
        stored, so that fewer bytes travel.
        """
        if device == "cpu":
            return self.table.gather(rows, dtype).flatten(-2)
        return self.table.gather_stored(rows)

    def forward(
        self, streams: Tensor, gathered: Tensor, spec: ModelSpec, ops: OpTable
    ) -> tuple[Tensor, Tensor]:
        """streams [T, hc, D], gathered: what `gather` gave, on the device of the streams ->
        (streams + gated value, gate [T, hc])."""
        if gathered.dim() == 3:
            gathered = self.table.numbers(gathered, streams.dtype).flatten(-2)
        kv = self.wkv(gathered, ops)
        hc, hidden = streams.shape[-2:]
        key = kv[:, : hc * hidden].unflatten(-1, (hc, hidden))
        gate = ops.engram_gate(streams, key, self.weight, spec.rms_eps)
        return ops.engram_add(streams, gate, kv[:, hc * hidden :]), gate
