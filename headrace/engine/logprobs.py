"""Log probabilities of tokens, raw or of the distribution that was drawn from.

Contract: natural logarithms in fp64, whatever the dtype of the logits; raw means log-softmax of the
unmodified logits. Each row depends on itself alone, bit for bit. Results are the NumPy arrays of
`engine/logprob_rows.py`. Called by `engine/sampler.py` for drawn tokens and by the engine for
prompts.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.transfers import sent
from headrace.engine.weights import exp_weights, rows_at_once, running_sums, top_ids

Ids = NDArray[np.int64]


def raw_logprobs(logits: Tensor, tokens: Ids, top_counts: Ids, index: Ids) -> LogprobRows:
    """Of `tokens` [R] under logits [R, vocab], with the top_counts [R] best ids of each row.

    index: what the entries are numbered by. Row maxima must be finite.
    """
    parts = []
    at_once = rows_at_once(logits)
    for start in range(0, len(tokens), at_once):
        rows = slice(start, start + at_once)
        block = logits[rows]
        weights = exp_weights(block, np.ones(len(block)))
        parts.append(_rows(block, 1.0, weights, tokens[rows], top_counts[rows], index[rows]))
    return joined(parts)


def processed_logprobs(
    logits: Tensor,
    temperatures: NDArray[np.float64],
    weights: Tensor,
    tokens: Ids,
    top_counts: Ids,
    index: Ids,
) -> LogprobRows:
    """The same of edited logits and their `weights` (`engine/weights.py`); dropped ones: -inf."""
    temperature = sent(temperatures, logits)[:, None]
    rows = _rows(logits, temperature, weights, tokens, top_counts, index)
    ids = np.concatenate((tokens[:, None], rows.top_ids), axis=-1)
    dropped = (weights.gather(-1, sent(ids, logits)) == 0).cpu().numpy()
    rows.logprobs[dropped[:, 0]] = -np.inf
    rows.top_logprobs[dropped[:, 1:]] = -np.inf
    return rows


def prompt_logprobs(logits: Tensor, next_tokens: Ids, top_count: int) -> LogprobRows:
    """Of the prompt tokens that follow the rows of a chunk.

    logits: [R, vocab], of the rows at positions q_start ..; next_tokens: int64 [R], the prompt
    tokens at q_start + 1 .. (leave out the row of the last prompt token). Rows that are not finite
    give NaN.
    """
    counts = np.full(len(next_tokens), top_count, dtype=np.int64)
    finite = torch.isfinite(logits.amax(dim=-1))
    safe = torch.where(finite[:, None], logits, torch.zeros_like(logits))
    rows = raw_logprobs(safe, next_tokens, counts, np.arange(len(next_tokens)))
    broken = ~finite.cpu().numpy()
    rows.logprobs[broken] = np.nan
    rows.top_logprobs[broken] = np.nan
    return rows


def joined(parts: list[LogprobRows]) -> LogprobRows:
    """Several as one, ordered by index."""
    widest = max((part.top_ids.shape[1] for part in parts), default=0)
    index = np.concatenate([np.zeros(0, dtype=np.int64), *(part.index for part in parts)])
    order = np.argsort(index, kind="stable")
    ids = np.zeros((len(index), widest), dtype=np.int64)
    values = np.zeros((len(index), widest), dtype=np.float64)
    start = 0
    for part in parts:
        rows, columns = slice(start, start + len(part)), slice(0, part.top_ids.shape[1])
        ids[rows, columns], values[rows, columns] = part.top_ids, part.top_logprobs
        start += len(part)
    logprobs = np.concatenate([np.zeros(0), *(part.logprobs for part in parts)])
    counts = np.concatenate([np.zeros(0, dtype=np.int64), *(part.top_counts for part in parts)])
    return LogprobRows(index[order], logprobs[order], ids[order], values[order], counts[order])


def _rows(
    logits: Tensor,
    temperature: Tensor | float,
    weights: Tensor,
    tokens: Ids,
    top_counts: Ids,
    index: Ids,
) -> LogprobRows:
    """log(weight / total) as scaled logit - log(total): exact also where a weight underflows."""
    highest = logits.amax(dim=-1, keepdim=True).double() / temperature
    totals = running_sums(weights)[:, -1:]
    best = top_ids(logits, int(top_counts.max(initial=0)))
    ids = torch.cat((sent(tokens, logits)[:, None], best), dim=-1)
    values = logits.gather(-1, ids).double() / temperature - highest
    # Ids are exact in fp64, so that one copy does.
    numbers = torch.cat((totals, values, best.double()), dim=-1).cpu().numpy()
    # math.log: its result does not depend on the place in a vector.
    log_totals = np.array([math.log(total) for total in numbers[:, 0].tolist()])
    known = numbers[:, 1 : ids.shape[1] + 1] - log_totals[:, None]
    top = numbers[:, ids.shape[1] + 1 :].astype(np.int64)
    return LogprobRows(index, known[:, 0], top, known[:, 1:], top_counts)
