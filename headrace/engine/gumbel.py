"""Draws of the `gumbel` coupling: the id with the highest log p(id) + Gumbel noise, by lowest id.

Contract: `draw` (every id may be drawn) and `draw_among` (listed ids) give, for each row, the first
id with the highest fp64 value of (logit / temperature - highest / temperature) + noise, where the
noise is `rng.gumbel(seed, position, id)`. That is an exact draw from the softmax (Gumbel-max trick,
Gumbel 1954), it depends on its own row only, bit for bit, and the log normaliser is not needed.
Runs on the host with NumPy. Used by `engine/sampler.py` and `engine/speculation/draft_picker.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.rng import KEY_INCREMENT
from headrace.engine.uniforms import mixed, words

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
Numbers = NDArray[np.float64]
Values = NDArray[np.floating[Any]]

# Numbers handled at once: several arrays of that many stay in a processor's second-level cache.
_BLOCK = 32768
# Single-precision noise is at most 0.3 too low and 0.9 too high below _HUGE (`_rough_loss`).
_MARGIN = 1.2
_HUGE = 35.0


def draw(logits: Tensor, temperatures: Numbers, seeds: Words, positions: Ids) -> Ids:
    """One id for each row of logits [R, vocab], whose maxima are finite; -inf is never drawn."""
    values = logits.cpu().numpy()
    count, vocab = values.shape
    if not count:
        return np.zeros(0, dtype=np.int64)
    highest = values.max(axis=-1)
    streams = words(seeds, positions)
    places = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(KEY_INCREMENT)
    at_once = max(1, _BLOCK // vocab)
    parts = []
    for start in range(0, count, at_once):
        rows = slice(start, start + at_once)
        kept = _may_win(values[rows], highest[rows], temperatures[rows], streams[rows], places)
        owners, ids = np.divmod(np.flatnonzero(kept), vocab)
        parts.append((owners + start, ids))
    owners, ids = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _best(values, highest, temperatures, streams, owners, ids)


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
    return _best(values, values.max(axis=-1), temperatures, streams, owners, ids)


def noise(streams: Words, ids: Ids) -> Numbers:
    """`rng.gumbel` of `ids` in the streams (`uniforms.words`) of their rows; equal shapes."""
    bits = mixed(streams + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(KEY_INCREMENT))
    v = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    numbers: Numbers = -np.log(-np.log1p(-v))
    return numbers


def _best(
    values: Values, highest: Values, temperatures: Numbers, streams: Words, owners: Ids, ids: Ids
) -> Ids:
    """Id of the first of the highest totals of each row; `owners` holds every row, ascending."""
    rows = np.arange(len(values))
    tops = highest.astype(np.float64) / temperatures
    totals = values[owners, ids].astype(np.float64) / temperatures[owners] - tops[owners]
    totals += noise(streams[owners], ids)
    best = np.maximum.reduceat(totals, np.searchsorted(owners, rows))
    won = np.flatnonzero(totals == best[owners])
    first: Ids = ids[won[np.searchsorted(owners[won], rows)]]
    return first


def _may_win(
    values: Values, highest: Values, temperatures: Numbers, streams: Words, places: Words
) -> NDArray[np.bool_]:
    """Which ids can have the highest total, bool [r, vocab]; places: see `_rough_loss`."""
    totals = np.empty(values.shape, dtype=np.float32)
    scale = (1.0 / temperatures).astype(np.float32)[:, None]
    with np.errstate(over="ignore", divide="ignore"):  # infinite totals are meant
        for start in range(0, len(places), _BLOCK):
            columns = slice(start, start + _BLOCK)
            part = totals[:, columns]
            np.subtract(values[:, columns], highest[:, None], out=part, casting="same_kind")
            part *= scale
            loss = _rough_loss(streams, places[columns])
            if loss.min() < -_HUGE:  # once in 10^15 ids
                return np.ones(values.shape, dtype=np.bool_)
            part -= loss
    kept: NDArray[np.bool_] = totals >= totals.max(axis=-1, keepdims=True) - np.float32(_MARGIN)
    return kept


def _rough_loss(streams: Words, places: Words) -> NDArray[np.float32]:
    """Minus `noise` [r, c] of consecutive ids, in single precision.

    places: what the ids add to the stream. v is taken from all 64 bits. Large noise, which wins,
    comes from a small v, whose relative precision is kept: up to _HUGE it is off by 0.2 at most.
    Near 1 the distance to 1 is only known to 2^-23: -log(1 - v) is at most 16.7 instead of 36.8.
    """
    z = streams[:, None] + places
    shifted = np.empty_like(z)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(z, np.uint64(shift), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        np.multiply(z, np.uint64(factor), out=z)
    np.right_shift(z, np.uint64(31), out=shifted)
    np.bitwise_xor(z, shifted, out=z)
    v = z.astype(np.float32)
    v *= np.float32(2.0**-88 - 2.0**-64)  # -2^-64, a little less: v stays below 1
    np.log1p(v, out=v)
    np.negative(v, out=v)
    return np.log(v, out=v)
