"""Compressor pooling and selection of few rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.ops.cpu import prefill
from headrace.ops.cpu.decode.arrays import FEW, array, tensor
from headrace.ops.cpu.decode.quant import read_majors as _read_majors
from headrace.ops.records import RecordView
from headrace.ops.reference import indexer as reference

_NONE = np.iinfo(np.int64).max


def pool_entries(rows: Tensor, tokens: Tensor, ape: Tensor | None, overlap: bool) -> Tensor:
    """`reference.pool_entries`."""
    if tokens.numel() * rows.shape[1] > FEW:
        return reference.pool_entries(rows, tokens, ape, overlap)
    place = array(tokens)
    n = place.shape[1]
    parts = 4 if overlap else 2  # of a row: kv and score, each in two halves or whole
    flat = array(rows).reshape(-1, rows.shape[1] // parts)
    index = place * parts
    if overlap:
        index[:, n // 2 :] += 1
    # mode="clip": -1 reads row 0, which is taken out below.
    kv = flat.take(index, axis=0, mode="clip")
    index += parts // 2
    score = flat.take(index, axis=0, mode="clip")
    if ape is not None:
        a = array(ape)
        score += np.concatenate(np.split(a, 2, axis=1)) if overlap else a
    absent = place < 0
    if absent.any():
        kv[absent] = 0.0
        score[absent] = -np.inf
    score -= np.maximum.reduce(score, axis=1, keepdims=True)
    np.exp(score, out=score)
    kv *= score
    pooled = np.add.reduce(kv, axis=1)
    pooled /= np.add.reduce(score, axis=1)
    return tensor(pooled)


def entry_scores(
    q: Tensor,
    weights: Tensor,
    keys: RecordView,
    blocks: Tensor,
    visible: Tensor,
    count: int | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """`reference.entry_scores`."""
    b, (rows, h, d) = blocks.shape[0], q.shape
    n = rows // b if b else 0
    read = _read_majors(keys, blocks, q.dtype).flatten(1, 2)[:, :count]
    scores = index_scores(q.reshape(b, n, h, d), weights.reshape(b, n, h), read).flatten(0, 1)
    for row, seen in zip(array(scores), array(visible).tolist(), strict=True):
        row[seen:] = -np.inf
    return scores if allowed is None else scores.masked_fill_(~allowed, -torch.inf)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`reference.index_scores`, its sum over the heads as a matrix product."""
    b, n, h, d = q.shape
    if b * n * h * keys.shape[1] > 1 << 20:
        return prefill.index_scores(q, weights, keys)
    dots = torch.bmm(q.reshape(b, n * h, d), keys.transpose(1, 2))
    dots = torch.relu_(dots).view(b * n, h, keys.shape[1])
    return torch.bmm(weights.reshape(b * n, 1, h), dots).view(b, n, keys.shape[1])


def candidate_mask(scores: Tensor, visible: Tensor, block: int, keep: int) -> Tensor:
    """`reference.candidate_mask`."""
    if scores.numel() > FEW:
        return reference.candidate_mask(scores, visible, block, keep)
    s, seen = array(scores), array(visible)
    rows, n = s.shape
    best = np.maximum.reduceat(s, np.arange(0, n, block), axis=1)
    every = np.arange(rows)
    best[every, np.maximum((seen - 1) // block, 0)] = np.inf
    order = np.argsort(-best, axis=1, kind="stable")[:, :keep]
    kept = np.zeros(best.shape, np.bool_)
    kept[every[:, None], order] = True
    kept &= best > -np.inf
    kept &= (seen > 0)[:, None]
    return tensor(np.repeat(kept, block, axis=1)[:, :n])


def select_top_k(scores: Tensor, top_k: int) -> Tensor:
    """`reference.select_top_k`."""
    if not 0 < scores.numel() <= FEW or top_k < 1:
        return prefill.select_top_k(scores, top_k)
    s = array(scores)
    rows, n = s.shape
    places = (-s).argsort(axis=1, kind="stable")[:, :top_k]
    chosen = s.take(places + np.arange(0, rows * n, n)[:, None]) > -np.inf
    if chosen.all():
        places.sort(axis=1)
        return tensor(places)
    places[~chosen] = _NONE
    places.sort(axis=1)
    places[places == _NONE] = -1
    return tensor(places)
