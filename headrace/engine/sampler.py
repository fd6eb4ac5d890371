"""Logits to token ids.

Contract: `sample(logits, state, rows, positions)` draws one token for each row of logits. A row's
token and log probabilities depend on its own logits, parameters, seed, position and known tokens
only; whatever runs beside it changes no bit. Order: edits (`engine/edits.py`), temperature, top_k,
top_p, min_p (`engine/weights.py`), draw. The draw is the first surviving id, in id order, whose
inclusive fp64 cumulative mass exceeds u * total, with u = `rng.uniform(seed, position)`. Rows that
are all plainly greedy take one maximum. Called by `engine/engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.edits import edited
from headrace.engine.grammar.rows import Masks
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.logprobs import joined, processed_logprobs, raw_logprobs
from headrace.engine.plan import NO_TOKEN_DRAWN
from headrace.engine.sampling_state import DRAWS, LOGPROBS, SHAPED, SamplerState
from headrace.engine.uniforms import uniforms
from headrace.engine.weights import ROWS_AT_ONCE, drop_unlikely, exp_weights

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """tokens: int64 [S]; NO_TOKEN_DRAWN where the highest logit is NaN or infinite, or no id is
    left. logprobs: of the rows that asked for them (`index` counts rows of the call), or None.
    """

    tokens: Ids
    logprobs: LogprobRows | None = None


def sample(
    logits: Tensor, state: SamplerState, rows: Ids, positions: Ids, masks: Masks | None = None
) -> SampledTokens:
    """Draw for logits [S, vocab] (fp32 or fp64; -inf bans an id); they are not changed.

    rows: int64 [S], table row of each; one request may stand for several positions. positions:
    int64 [S], absolute position of the token to draw (= number of known tokens, prompt included).
    masks: what the grammars of some of the rows allow.
    """
    highest, greedy = logits.max(dim=-1)  # NaN wins; of equals the first
    tokens = _with_undrawable(greedy, highest)
    flags = state.flags[rows]
    if not flags.any():
        return SampledTokens(tokens)
    drawable = tokens >= 0
    changed = edited(logits, state, rows, positions, masks)
    if changed is not logits:
        highest, greedy = changed.max(dim=-1)
        tokens = np.where(drawable, _with_undrawable(greedy, highest), NO_TOKEN_DRAWN)
        drawable = tokens >= 0
    wants_logprobs = (flags & LOGPROBS) != 0
    processed = wants_logprobs & state.processed[rows]
    parts: list[LogprobRows] = []
    # Greedy rows go along only for the distribution that they report.
    weighted = np.flatnonzero(drawable & (((flags & DRAWS) != 0) | processed))
    for start in range(0, len(weighted), ROWS_AT_ONCE):
        index = weighted[start : start + ROWS_AT_ONCE]
        block = _Block(changed, state, rows, positions, index)
        tokens[index] = np.where((flags[index] & DRAWS) != 0, block.draw(), tokens[index])
        if processed[index].any():
            parts.append(block.logprobs(tokens, processed))
    raw = np.flatnonzero(drawable & wants_logprobs & ~processed)
    if len(raw):
        counts = state.top_logprobs[rows[raw]]
        chosen = logits[torch.from_numpy(raw).to(logits.device)]
        parts.append(raw_logprobs(chosen, tokens[raw], counts, raw))
    return SampledTokens(tokens, joined(parts) if parts else None)


class _Block:
    """Weights of at most ROWS_AT_ONCE rows."""

    def __init__(
        self, logits: Tensor, state: SamplerState, rows: Ids, positions: Ids, index: Ids
    ) -> None:
        """index: int64, which rows of `logits`."""
        table = rows[index]
        whole = len(index) == len(logits)
        self._logits = logits if whole else logits[torch.from_numpy(index).to(logits.device)]
        self._index = index
        self._numbers = uniforms(state.seeds[table], positions[index])
        self._temperatures = state.temperatures[table]
        self._top_counts = state.top_logprobs[table]
        self._weights = exp_weights(self._logits, self._temperatures)
        shaped = np.flatnonzero(state.flags[table] & SHAPED)
        if len(shaped) == len(index):
            self._shape(self._logits, self._weights, state, table)
        elif len(shaped):
            places = torch.from_numpy(shaped).to(logits.device)
            weights = self._weights[places]
            self._shape(self._logits[places], weights, state, table[shaped])
            self._weights[places] = weights

    def draw(self) -> Ids:
        """One token per row."""
        cumulative = self._weights.cumsum(dim=-1)
        numbers = torch.from_numpy(self._numbers).to(cumulative.device)
        targets = numbers[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, targets, right=True)[:, 0]
        result: Ids = drawn.cpu().numpy()
        return result

    def logprobs(self, tokens: Ids, wanted: NDArray[np.bool_]) -> LogprobRows:
        """Processed log probabilities of the rows of this block that are `wanted` [S]."""
        places = np.flatnonzero(wanted[self._index])
        chosen = torch.from_numpy(places).to(self._logits.device)
        index = self._index[places]
        return processed_logprobs(
            self._logits[chosen],
            self._temperatures[places],
            self._weights[chosen],
            tokens[index],
            self._top_counts[places],
            index,
        )

    @staticmethod
    def _shape(logits: Tensor, weights: Tensor, state: SamplerState, table: Ids) -> None:
        drop_unlikely(logits, weights, state.top_k[table], state.top_p[table], state.min_p[table])


def _with_undrawable(ids: Tensor, highest: Tensor) -> Ids:
    """`ids` as NumPy, with NO_TOKEN_DRAWN where the highest logit is not finite."""
    return torch.where(torch.isfinite(highest), ids, NO_TOKEN_DRAWN).cpu().numpy()
