"""The transforms of the sampler, one row at a time, with loops instead of tensor tricks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from headrace.core.rng import uniform
from headrace.core.sampling import SamplingParams


def edited(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: int,
) -> np.ndarray:
    """Logits after penalties, bias and masks, in their own precision."""
    number = logits.dtype.type
    logits = logits.copy()
    for token in set(prompt) | set(output):
        if logits[token] > 0:
            logits[token] = logits[token] / number(params.repetition_penalty)
        else:
            logits[token] = logits[token] * number(params.repetition_penalty)
    for token, count in Counter(output).items():
        logits[token] -= number(params.frequency_penalty) * number(count)
        logits[token] -= number(params.presence_penalty)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += number(bias)
    banned = set(params.banned_token_ids)
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids) | (set() if params.ignore_eos else {eos})
    for token in range(len(logits)):
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if token in banned or not allowed:
            logits[token] = -np.inf
    return logits


def weights(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """exp weights [vocab] in fp64 after temperature, top_k, top_p and min_p; 0 is dropped."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    all_weights = np.exp(scaled - scaled.max())
    total = 0.0
    for weight in all_weights:
        total += weight
    if params.top_k != -1 and params.top_k < len(order):
        order = order[: params.top_k]
        total = 0.0
        for token in order:
            total += all_weights[token]
    kept = np.zeros(len(logits))
    mass = 0.0
    for rank, token in enumerate(order):
        weight = all_weights[token]
        too_far = params.top_p < 1.0 and mass > params.top_p * total
        if rank and (too_far or weight < params.min_p * all_weights[order[0]]):
            break
        kept[token] = weight
        mass += weight
    return kept


def drawn(kept: np.ndarray, seed: int, position: int) -> int:
    """First id whose cumulative weight exceeds u * total."""
    target, mass = uniform(seed, position) * np.cumsum(kept)[-1], 0.0
    for token, weight in enumerate(kept):
        mass += weight
        if mass > target:
            return token
    raise AssertionError("no token reached the target")
