"""Ids that can have the highest logit / temperature + Gumbel noise, found where the logits lie.

Contract: `noisy_best` computes, for each row, (logit - highest) / temperature + noise(stream, id)
of every id in single precision, the noise being that of `core.rng.gumbel`, and lists the best few
ids. Totals that are less than 45 below a row's highest are off by ERROR at most (derived below);
lower ones stay lower. So what is listed decides a row unless `rest` comes close to the best; the
caller (`engine/gumbel.py`) decides in fp64 and knows what to do then. Rows depend on themselves
only, and nothing waits for the device. No operator of a model: a Triton kernel where there is
Triton, else plain torch; both take the same steps, and their bits may differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.core.rng import KEY_INCREMENT
from headrace.ops import triton

# Bound of the error of a total, for temperatures between 1e-30 and 1e30. Noise is -log(L), where
# L = -log(1 - v) and v = odd / 2^53. The smaller of v and 1 - v is rounded to single precision from
# all of its 53 bits, so that L is known to a few 2^-23 of itself wherever v lies, near 0 and near 1
# too: 1e-6 of noise. The outer log is off by 2^-22 of at most 37, 9e-6 (a card's fastest logarithm
# has that error). The scaled logit: three roundings of at most 45, 8e-6. Their sum: a rounding of
# at most 82, 4e-6. Together 2.3e-5.
ERROR = 5e-5

# Ids that are listed at most, far more than ever come close.
LISTED = 8
# Numbers handled at once by plain torch, which needs some 60 bytes for each.
_NUMBERS_AT_ONCE = 2**22


class NoisyBest(NamedTuple):
    """totals: fp32 [R, C] of the listed ids. ids: int64 [R, C], in no order; places that hold none
    have the total -inf and some id. rest: fp32 [R], no other id of the row has a higher total.
    """

    totals: Tensor
    ids: Tensor
    rest: Tensor


def noisy_best(logits: Tensor, highest: Tensor, temperatures: Tensor, streams: Tensor) -> NoisyBest:
    """List the best of logits [R, vocab] (fp32 or fp64; -inf bans an id), vocab > 0.

    highest: [R], the rows' maxima, which must be finite. temperatures: fp64 [R], 1e-30 to
    1e30. streams: int64 [R], the bits of `rng.word(seed, position)`.
    """
    if logits.device.type == "cuda" and triton.missing() is None:
        found: NoisyBest = triton.function("noisy_best")(logits, highest, temperatures, streams)
        return found
    return plain(logits, highest, temperatures, streams)


def plain(logits: Tensor, highest: Tensor, temperatures: Tensor, streams: Tensor) -> NoisyBest:
    """`noisy_best` in plain torch, whatever the device."""
    rows, vocab = logits.shape
    count = min(LISTED, vocab)
    places = torch.arange(1, vocab + 1, device=logits.device) * _signed(KEY_INCREMENT)
    at_once = max(1, _NUMBERS_AT_ONCE // vocab)
    totals, ids = [], []
    for start in range(0, max(rows, 1), at_once):
        part = slice(start, start + at_once)
        numbers = _scaled(logits[part], highest[part, None], temperatures[part, None])
        numbers -= _loss(streams[part, None] + places)
        best = numbers.topk(count, dim=-1)
        totals.append(best.values)
        ids.append(best.indices)
    listed = torch.cat(totals)
    rest = listed[:, -1] if count < vocab else listed.new_full((rows,), -torch.inf)
    return NoisyBest(listed, torch.cat(ids), rest)


def _scaled(logits: Tensor, highest: Tensor, temperatures: Tensor) -> Tensor:
    """(logit - highest) / temperature, fp32 [r, vocab].

    Of fp64 logits as the caller will compute it: their quotients may be too large for the
    difference of the quotients to be that of the logits.
    """
    if logits.dtype == torch.float64:
        return (logits / temperatures - highest / temperatures).float()
    return (logits - highest) * (1.0 / temperatures).float()


def _loss(words: Tensor) -> Tensor:
    """Minus the noise, fp32, of the bits that `rng.mix64` gets, int64 [r, vocab]."""
    z = words
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    z = z ^ _shifted(z, 31)
    odd = _shifted(z, 11) | 1
    low = odd < 1 << 52
    near = torch.where(low, odd, (1 << 53) - odd).float() * 2.0**-53
    return torch.where(low, -torch.log1p(-near), -torch.log(near)).log()


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits of uint64 numbers, which torch has as int64 only."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of a uint64."""
    return word - (1 << 64) if word >> 63 else word
