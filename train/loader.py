"""Batches on their way to the device: aligned documents, a thread that stays ahead, random data.

Documents must begin at multiples of 8 in a row, so that ratio-2 groups and candidate blocks lie as
the product has them. `Stream` converts batches in a thread while the device computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from train.data import Batch

ALIGNMENT = 8


def aligned(batch: Batch, pad_id: int) -> Batch:
    """The batch with every document moved right to a multiple of 8; what leaves a row is cut.

    Gaps are documents of padding without loss.
    """
    starts_everywhere = batch.positions == 0
    places = np.flatnonzero(starts_everywhere.any(axis=0))
    if not (places % ALIGNMENT).any():
        return batch
    rows, length = batch.tokens.shape
    tokens = np.full_like(batch.tokens, pad_id)
    weights, families = np.zeros_like(batch.weights), np.zeros_like(batch.families)
    positions = np.zeros_like(batch.positions)
    for row in range(rows):
        starts = np.flatnonzero(starts_everywhere[row])
        sizes = np.diff(np.append(starts, length))
        room = -(-sizes // ALIGNMENT) * ALIGNMENT
        begins = np.cumsum(room) - room
        for start, size, begin in zip(starts, sizes, begins, strict=True):
            kept = min(size, length - begin)
            if kept <= 0:
                break
            source, target = slice(start, start + kept), slice(begin, begin + kept)
            for new, old in (
                (tokens, batch.tokens),
                (weights, batch.weights),
                (positions, batch.positions),
                (families, batch.families),
            ):
                new[row, target] = old[row, source]
    return Batch(tokens, weights, positions, families)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Rows and length of one kind of batch."""

    rows: int
    length: int


def random_batches(shape: Shapes, vocabulary: int, seed: int, start: int) -> Iterator[Batch]:
    """Batches of repeated random text, to try the loop out without data."""
    number = start
    while True:
        rng = np.random.default_rng([seed, number])
        half = rng.integers(3, vocabulary, (shape.rows, shape.length // 2))
        tokens = np.concatenate((half, half), axis=1).astype(np.uint16)
        weights = np.full(tokens.shape, 16, np.uint8)
        weights[:, 0] = 0
        positions = np.broadcast_to(np.arange(shape.length, dtype=np.uint16), tokens.shape)
        families = (np.arange(shape.length) >= shape.length // 2).astype(np.uint8)
        yield Batch(tokens, weights, positions.copy(), np.broadcast_to(families, tokens.shape))
        number += 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch on the device, int64 / fp32 [rows, length]; number: its place in the stream."""

    number: int
    ids: Tensor
    weights: Tensor
    positions: Tensor
    families: Tensor


class Stream:
    """Takes batches from an iterator in a thread, at most `ahead` of the consumer."""

    def __init__(
        self,
        batches: Iterator[Batch],
        start: int,
        device: torch.device,
        pad_id: int = 2,
        ahead: int = 4,
    ) -> None:
        self._source = batches
        self._device = device
        self._pad = pad_id
        self._number = start
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(ahead)
        self._thread = threading.Thread(target=self._fill, daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for batch in self._source:
                self._queue.put(aligned(batch, self._pad))
        except BaseException as error:
            self._queue.put(error)

    def next(self) -> Loaded:
        """The next batch; waits for it."""
        batch = self._queue.get()
        if isinstance(batch, BaseException):
            raise batch
        number, self._number = self._number, self._number + 1

        def put(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            host = torch.from_numpy(np.ascontiguousarray(array).astype(np.int32))
            return host.to(self._device, non_blocking=True).to(dtype)

        return Loaded(
            number,
            put(batch.tokens, torch.int64),
            put(batch.weights, torch.float32) / 16.0,
            put(batch.positions, torch.int64),
            put(batch.families, torch.int64),
        )
