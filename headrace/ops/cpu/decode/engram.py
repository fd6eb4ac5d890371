"""Engram hashes and gates of few rows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.ops.cpu.decode.arrays import FEW, array, double_sigmoid, inverse_rms, tensor
from headrace.ops.reference import engram as reference

_MIN_DOT = 1e-6


def ngram_rows(compressed: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """`reference.ngram_rows`."""
    if compressed.numel() > FEW:
        return reference.ngram_rows(compressed, multipliers, primes, offsets)
    products = array(compressed) * array(multipliers)
    hashes = np.bitwise_xor.accumulate(products, axis=1)[:, 1:, None]
    columns = hashes % array(primes)
    columns += array(offsets)
    return tensor(columns.reshape(len(columns), primes.numel()))


def engram_gate(streams: Tensor, key: Tensor, query_key_weight: Tensor, eps: float) -> Tensor:
    """`reference.engram_gate`."""
    if streams.numel() > FEW:
        return reference.engram_gate(streams, key, query_key_weight, eps)
    s, k = array(streams), array(key)
    dot = np.add.reduce(s * array(query_key_weight) * k, axis=-1)
    dot *= inverse_rms(s, eps)[..., 0]
    dot *= inverse_rms(k, eps)[..., 0]
    dot *= s.shape[-1] ** -0.5
    root = np.sqrt(np.maximum(np.abs(dot), _MIN_DOT))
    gate = double_sigmoid(np.copysign(root, dot))
    gate *= 0.5
    return tensor(gate)


def engram_add(streams: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """`reference.engram_add`."""
    return streams + gate.unsqueeze(-1) * value.unsqueeze(-2)
