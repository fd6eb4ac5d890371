"""Decode steps as graphs: one launch instead of thousands.

Contract: `DecodeGraphs.run` gives the logits of a batch that fits one of its shapes, and None for
another (prompts, rows that are replayed, many forced tokens, rows of which nobody wants logits),
which `Model.forward` runs. A shape is (sequences, rows of each, blocks of a table), each rounded up
along a ladder; the graph of a shape is recorded when it is first needed and kept. Inputs go to the
device in one piece from pinned memory, so that a step never waits for the device. Called by
`engine/runner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from headrace.engine.plan import Ints
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch
from headrace.model.deepseek.decode_step import DecodeInputs
from headrace.model.spec import ModelSpec
from headrace.platforms import Graph, Platform

# Sequences of a step, doubled from 8 on: padding costs at most what the ladder saves in graphs.
SEQUENCES = (1, 2, 4, 8)
# Blocks of a table, times 4: 1,024 tokens first. Index scores are computed for all places.
BLOCKS = 8
# Shapes kept: each takes about as many bytes on the device as it has kernels, times 300.
MAX_GRAPHS = 64

Shape = tuple[int, int, int]


@runtime_checkable
class DecodingModel(Protocol):
    """A model that can run decode steps of fixed shapes; `model.deepseek.model.Model` is one."""

    spec: ModelSpec

    @property
    def waiting(self) -> tuple[str, ...]:
        """Operators in which the host waits for the device: no graph can hold them."""
        ...

    def decode(self, inputs: DecodeInputs, cache: KVCache, /) -> Tensor:
        """See there."""
        ...

    def gather_engram(self, batch: Batch, /) -> list[Tensor]:
        """See there."""
        ...


def ladder(first: Sequence[int], most: int, factor: int) -> tuple[int, ...]:
    """`first`, then by `factor`, up to the first step that is at least `most` (and cut to it)."""
    steps = [step for step in first if step < most]
    while not steps or steps[-1] < most:
        following = steps[-1] * factor if len(steps) >= len(first) else first[len(steps)]
        steps.append(min(following, most))
    return tuple(steps)


class DecodeGraphs:
    """Graphs of a model on its cache."""

    def __init__(
        self,
        model: DecodingModel,
        cache: KVCache,
        platform: Platform,
        *,
        max_sequences: int,
        max_rows: int,
        max_blocks: int,
        guarded: bool = False,
    ) -> None:
        """max_sequences: of a step. max_rows: of a sequence in a decode step: 1 and its drafts.
        max_blocks: of a request's table. guarded: a wait for the device in a replay is an error;
        for tests and measurements, since it holds for whatever the process does meanwhile."""
        self._model, self._cache, self._platform = model, cache, platform
        self._ladders = (
            ladder(SEQUENCES, max_sequences, 2),
            ladder((1,), max_rows, max_rows),
            ladder((BLOCKS,), max_blocks, 4),
        )
        self._guarded = guarded
        self._recorder = platform.recorder()
        self._recorded: dict[Shape, tuple[_Inputs, Graph]] = {}
        self._too_large: set[Shape] = set()

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [S, V] of `batch.logit_rows`, or None where no shape fits.

        They hold until the next call, before which the caller has to have looked at them: what is
        sent then lies where the device reads the inputs of this call.
        """
        shape = self._shape(batch)
        if shape is None or shape in self._too_large:
            return None
        if shape not in self._recorded and len(self._recorded) >= MAX_GRAPHS:
            return None
        found = self._recorded.get(shape)
        if found is not None:
            inputs, graph = found
            with self._platform.forbid_waits() if self._guarded else nullcontext():
                inputs.fill(batch, self._model.gather_engram(batch))
                return inputs.wanted(batch, graph.replay())
        tables = self._model.gather_engram(batch)
        try:
            inputs, graph = self._record(shape, tables)
        except torch.OutOfMemoryError:
            self._too_large.add(shape)  # the step runs without one, in pieces that are given back
            return None
        self._recorded[shape] = inputs, graph
        inputs.fill(batch, tables)
        return inputs.wanted(batch, graph.replay())

    def _record(self, shape: Shape, tables: Sequence[Tensor]) -> tuple[_Inputs, Graph]:
        """A shape's inputs and graph; tables: Engram rows, of which dtype and width count."""
        inputs = _Inputs(self._platform, shape, tables)
        # Recorded with sequences that have no rows: it runs once on the way, and a second run of
        # the same rows may find what the first one wrote where it reads.
        graph = self._recorder.record(lambda: self._model.decode(inputs.on_device, self._cache))
        return inputs, graph

    def _shape(self, batch: Batch) -> Shape | None:
        """The smallest shape that the batch fits into."""
        if not len(batch.logit_rows):
            return None  # nobody will look at a result, so the next inputs might come too early
        if (batch.write_from > batch.q_start).any():
            return None
        # A prompt's rows just behind `keep_from`: the windows of consumer layers end there.
        lowest = np.maximum(batch.window_floor, batch.q_start - self._model.spec.window + 1)
        if (batch.keep_from > np.maximum(lowest, 0)).any():
            return None
        sizes = len(batch.q_len), int(batch.q_len.max()), batch.block_tables.shape[1]
        fitting = [
            next((step for step in steps if step >= size), 0)
            for size, steps in zip(sizes, self._ladders, strict=True)
        ]
        sequences, rows, blocks = fitting
        return (sequences, rows, blocks) if all(fitting) else None


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the inputs: on the host and on the device."""

    host: Ints
    device: Tensor


class _Inputs:
    """Inputs of a shape, where its graph reads them."""

    def __init__(self, platform: Platform, shape: Shape, embedded: Sequence[Tensor]) -> None:
        sequences, rows, blocks = shape
        self._rows = rows
        sizes = {
            "token_ids": sequences * rows,
            **dict.fromkeys(("q_start", "q_len", "slots", "window_floor"), sequences),
            "block_tables": sequences * blocks,
            "places": sequences * rows,
        }
        self._host = platform.host_buffer((sum(sizes.values()),), torch.int64)
        self._device = torch.zeros_like(self._host, device=platform.device)
        self._parts, first = {}, 0
        for name, size in sizes.items():
            piece = slice(first, first + size)
            self._parts[name] = _Part(self._host[piece].numpy(), self._device[piece])
            first += size
        self._tables = [
            platform.host_buffer((sequences * rows, *table.shape[1:]), table.dtype)
            for table in embedded
        ]
        where = {name: part.device for name, part in self._parts.items() if name != "places"}
        where["block_tables"] = where["block_tables"].view(sequences, blocks)
        self.on_device = DecodeInputs(
            **where,
            embedded=tuple(torch.zeros_like(t, device=platform.device) for t in self._tables),
        )

    def fill(self, batch: Batch, embedded: Sequence[Tensor]) -> None:
        """Send a batch of at most this shape. The device has read what was sent before."""
        flat = self._places(batch)
        self._host.zero_()
        put = {name: part.host for name, part in self._parts.items()}
        put["token_ids"][flat] = batch.token_ids.numpy()
        count = len(batch.q_len)
        for name in ("q_start", "q_len", "window_floor"):
            put[name][:count] = getattr(batch, name)
        put["slots"][:count] = batch.slots.numpy()
        tables = put["block_tables"].reshape(self.on_device.block_tables.shape)
        tables[:count, : batch.block_tables.shape[1]] = batch.block_tables.numpy()
        wanted = flat[batch.logit_rows.numpy()]
        put["places"][: wanted.size] = wanted
        self._device.copy_(self._host, non_blocking=True)
        for table, host, device in zip(
            embedded, self._tables, self.on_device.embedded, strict=True
        ):
            host[torch.from_numpy(flat)] = table
            device.copy_(host, non_blocking=True)

    def _places(self, batch: Batch) -> Ints:
        """Row in the shape of each row of the batch, int64 [T]."""
        sequence = batch.sequence.numpy()
        flat: Ints = sequence * self._rows + batch.positions.numpy() - batch.q_start[sequence]
        return flat

    def wanted(self, batch: Batch, logits: Tensor) -> Tensor:
        """Those of the rows that want some, of logits of all rows of the shape."""
        count = len(batch.logit_rows)
        if count == len(logits):
            return logits
        return logits.index_select(0, self._parts["places"].device[:count])
