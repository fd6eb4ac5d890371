"""Draws of the `gumbel` coupling: the id with the highest log p(id) + Gumbel noise, by lowest id.

Contract: `draw` (every id may be drawn) and `draw_among` (listed ids) give, for each row, the first
id with the highest fp64 value of (logit / temperature - highest / temperature) + noise, where the
noise is `rng.gumbel(seed, position, id)`. That is an exact draw from the softmax (Gumbel-max trick,
Gumbel 1954), it depends on its own row only, bit for bit, and the log normaliser is not needed.
The host decides, with NumPy. Logits of a device are searched there (`ops/noisy_best.py`), and a
few candidates of each row come back, in one copy; a row that these do not decide comes as a whole,
so the tokens are the same everywhere. Used by `engine/sampler.py` and
`engine/speculation/draft_picker.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.rng import KEY_INCREMENT
from headrace.engine.transfers import sent
from headrace.engine.uniforms import mixed, words
from headrace.ops.noisy_best import ERROR, noisy_best

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
Numbers = NDArray[np.float64]
Values = NDArray[np.floating[Any]]

# Numbers handled at once: several arrays of that many stay in a processor's second-level cache.
_BLOCK = 32768
# Single-precision noise is at most 0.3 too low and 0.9 too high below _HUGE (`_Search`).
_MARGIN = 1.2
_HUGE = 35.0
# The same of the search on a device. Twice its error would do; one row in some thousands has a
# second candidate.
_DEVICE_MARGIN = 4 * ERROR


def draw(logits: Tensor, temperatures: Numbers, seeds: Words, positions: Ids) -> Ids:
    """One id for each row of logits [R, vocab], whose maxima are finite; -inf is never drawn.

    temperatures: [R], 1e-30 to 1e30.
    """
    if not len(logits):
        return np.zeros(0, dtype=np.int64)
    streams = words(seeds, positions)
    if logits.device.type == "cpu":
        return _drawn_on_host(logits.numpy(), temperatures, streams)
    return _drawn_on_device(logits, temperatures, streams)


def draw_among(
    logits: Tensor, temperatures: Numbers, seeds: Words, positions: Ids, owners: Ids, ids: Ids
) -> Ids:
    """The same among listed (row, id) pairs, int64 [n] each, ordered by row and then by id.

    Every row is listed with its best id at least.
    """
    values = logits.cpu().numpy()
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    streams = words(seeds, positions)
    return _best(values[owners, ids], values.max(axis=-1), temperatures, streams, owners, ids)


def noise(streams: Words, ids: Ids) -> Numbers:
    """`rng.gumbel` of `ids` in the streams (`uniforms.words`) of their rows; equal shapes."""
    bits = mixed(streams + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(KEY_INCREMENT))
    v = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    numbers: Numbers = -np.log(-np.log1p(-v))
    return numbers


def _drawn_on_host(values: Values, temperatures: Numbers, streams: Words) -> Ids:
    """`draw` of some rows, at least one."""
    count, vocab = values.shape
    highest = values.max(axis=-1)
    scales = (1.0 / temperatures).astype(np.float32)
    at_once = max(1, _BLOCK // vocab)
    search = _Search(min(count, at_once), min(vocab, _BLOCK))
    found = [
        search.run(values[rows], highest[rows], scales[rows], streams[rows], start)
        for start in range(0, count, at_once)
        for rows in [slice(start, start + at_once)]
    ]
    owners, ids = (np.concatenate(column) for column in zip(*found, strict=True))
    return _best(values[owners, ids], highest, temperatures, streams, owners, ids)


def _drawn_on_device(logits: Tensor, temperatures: Numbers, streams: Words) -> Ids:
    """`draw` of some rows, at least one, where they lie; waits for the device once."""
    highest = logits.amax(dim=-1)
    found = noisy_best(
        logits,
        highest,
        sent(temperatures, logits),
        sent(streams.view(np.int64), logits),
    )
    listed = (found.totals, logits.gather(-1, found.ids), found.ids)
    alone = (found.rest[:, None], highest[:, None])
    # All of them are exact in fp64, so that one copy does.
    numbers = torch.cat([part.double() for part in (*listed, *alone)], dim=-1).cpu().numpy()
    totals, values, ids = np.split(numbers[:, :-2], 3, axis=-1)
    limit = totals.max(axis=-1) - _DEVICE_MARGIN
    # Not so where `rest` is near, and where something overflowed.
    decided = np.isfinite(limit) & (numbers[:, -2] < limit)
    tokens = np.empty(len(limit), dtype=np.int64)
    index = np.flatnonzero(~decided)
    if len(index):
        whole = logits[sent(index, logits)].cpu().numpy()
        tokens[index] = _drawn_on_host(whole, temperatures[index], streams[index])
    index = np.flatnonzero(decided)
    if len(index):
        owners, places = np.nonzero(totals[index] >= limit[index, None])
        chosen = ids[index][owners, places].astype(np.int64)
        order = np.lexsort((chosen, owners))
        owners, places, chosen = owners[order], places[order], chosen[order]
        near = values[index][owners, places]
        top, scale = numbers[index, -1], temperatures[index]
        tokens[index] = _best(near, top, scale, streams[index], owners, chosen)
    return tokens


def _best(
    values: Values, highest: Values, temperatures: Numbers, streams: Words, owners: Ids, ids: Ids
) -> Ids:
    """Id of the first of the highest totals of each row, by lowest id.

    values: [n], logits of the listed (row, id) pairs, ordered by row and then by id; every row is
    listed. highest: [R].
    """
    rows = np.arange(len(highest))
    tops = highest.astype(np.float64) / temperatures
    totals = values.astype(np.float64) / temperatures[owners] - tops[owners]
    totals += noise(streams[owners], ids)
    best = np.maximum.reduceat(totals, np.searchsorted(owners, rows))
    won = np.flatnonzero(totals == best[owners])
    first: Ids = ids[won[np.searchsorted(owners[won], rows)]]
    return first


class _Search:
    """Finds the ids that can have the highest total, with noise in single precision.

    Works in arrays that are used again: fresh large ones cost more than the arithmetic.
    """

    def __init__(self, rows: int, columns: int) -> None:
        """Numbers handled at once: some rows of the whole vocabulary, or a part of one row."""
        self._places = np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(KEY_INCREMENT)
        self._words = np.empty((2, rows, columns), dtype=np.uint64)
        self._numbers = np.empty((2, rows, columns), dtype=np.float32)

    def run(
        self,
        values: Values,
        highest: Values,
        scales: NDArray[np.float32],
        streams: Words,
        first_row: int,
    ) -> tuple[Ids, Ids]:
        """(row, id) pairs by row and then by id; rows are numbered from `first_row` on.

        values [r, vocab], highest [r]; scales [r]: 1 / temperature.
        """
        count, vocab = values.shape
        best = np.full((count, 1), -np.inf, dtype=np.float32)
        found: list[tuple[Ids, Ids]] = []
        with np.errstate(over="ignore", divide="ignore"):  # infinite totals are meant
            for start in range(0, vocab, len(self._places)):
                part = values[:, start : start + len(self._places)]
                totals = self._numbers[0, :count, : part.shape[1]]
                np.subtract(part, highest[:, None], out=totals, casting="same_kind")
                totals *= scales[:, None]
                loss = self._loss(streams + np.uint64(start * KEY_INCREMENT % 2**64), part.shape[1])
                if loss.min() < -_HUGE:  # once in 10^15 ids
                    owners, ids = np.divmod(np.arange(count * vocab), vocab)
                    return owners + first_row, ids
                totals -= loss
                best = np.maximum(best, totals.max(axis=-1, keepdims=True))
                near = np.flatnonzero(totals >= best - np.float32(_MARGIN))
                owners, ids = np.divmod(near, part.shape[1])
                found.append((owners + first_row, ids + start))
        owners, ids = (np.concatenate(column) for column in zip(*found, strict=True))
        return owners, ids

    def _loss(self, streams: Words, columns: int) -> NDArray[np.float32]:
        """Minus `noise` [r, columns] of consecutive ids, in single precision.

        v is taken from all 64 bits. Large noise, which wins, comes from a small v, whose relative
        precision is kept: up to _HUGE it is off by 0.2 at most. Near 1 the distance to 1 is only
        known to 2^-23: -log(1 - v) is at most 16.7 instead of 36.8.
        """
        z, shifted = self._words[:, : len(streams), :columns]
        np.add(streams[:, None], self._places[:columns], out=z)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            np.right_shift(z, np.uint64(shift), out=shifted)
            np.bitwise_xor(z, shifted, out=z)
            np.multiply(z, np.uint64(factor), out=z)
        np.right_shift(z, np.uint64(31), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        v = self._numbers[1, : len(streams), :columns]
        v[...] = z
        v *= np.float32(2.0**-88 - 2.0**-64)  # -2^-64, a little less: v stays below 1
        np.log1p(v, out=v)
        np.negative(v, out=v)
        return np.log(v, out=v)
