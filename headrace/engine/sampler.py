"""Logits to token ids.

Contract: `sample(logits, state, rows, positions)` draws one token for each row of logits; `draw` is
its core, which `engine/speculation/verify.py` calls with drafts to check. A row's token and log
probabilities depend on its own logits, parameters, seed, position, known tokens and drafts only;
whatever runs beside it changes no bit. Order: edits (`engine/edits.py`), temperature, top_k, top_p,
min_p (`engine/weights.py`), draw. Rows of the `gumbel` coupling take the highest log p + noise
(`engine/gumbel.py`); those of `maximal` the first surviving id, in id order, whose inclusive fp64
cumulative mass exceeds u * total, with u = `rng.uniform(seed, position)`, unless they check a draft
(`engine/speculation/rejection.py`). Rows that are all plainly greedy take one maximum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine import gumbel
from headrace.engine.edits import Prefixes, edited
from headrace.engine.grammar.rows import Masks
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.logprobs import joined, processed_logprobs, raw_logprobs
from headrace.engine.plan import NO_TOKEN_DRAWN
from headrace.engine.sampling_state import DRAWS, GUMBEL, LOGPROBS, SHAPED, SamplerState
from headrace.engine.speculation import rejection
from headrace.engine.transfers import sent
from headrace.engine.weights import drop_unlikely, exp_weights, rows_at_once

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """tokens: int64 [S]; NO_TOKEN_DRAWN where the highest logit is NaN or infinite, or no id is
    left. logprobs: of the rows that asked for them (`index` counts rows of the call), or None.
    """

    tokens: Ids
    logprobs: LogprobRows | None = None


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What rows check. ids: int64 [S], the draft of each row, below 0: none. prefixes: the drafts
    before each row. weights: [S, vocab], not normalised distributions that `maximal` rows' drafts
    were drawn from; a row of zeros, or None: those drafts were not drawn at random.
    """

    ids: Ids
    prefixes: Prefixes
    weights: Tensor | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens: int64 [S], as in `SampledTokens`; a draft was accepted where it is the token.
    agreement: float64 [S], 1 - TV(p, q) of a checked row and its draft's distribution, NaN where
    none is known; None: all rows are plainly greedy. processed: log probabilities of the rows that
    want processed ones.
    """

    tokens: Ids
    agreement: NDArray[np.float64] | None = None
    processed: list[LogprobRows] = field(default_factory=list)


def sample(
    logits: Tensor, state: SamplerState, rows: Ids, positions: Ids, *, masks: Masks | None = None
) -> SampledTokens:
    """Draw for logits [S, vocab] (fp32 or fp64; -inf bans an id); they are not changed.

    rows: int64 [S], table row of each; one request may stand for several positions. positions:
    int64 [S], absolute position of the token to draw (= number of known tokens, prompt included).
    masks: what the grammars of some of the rows allow.
    """
    drawn = draw(logits, state, rows, positions, masks=masks)
    return SampledTokens(drawn.tokens, reported(logits, state, rows, drawn))


def draw(
    logits: Tensor,
    state: SamplerState,
    rows: Ids,
    positions: Ids,
    *,
    drafts: DraftRows | None = None,
    masks: Masks | None = None,
) -> Drawn:
    """The tokens of `sample`; rows with a draft draw given that the drafts before it are right."""
    highest, greedy = logits.max(dim=-1)  # NaN wins; of equals the first
    finite = torch.isfinite(highest)
    flags = state.flags[rows]
    if masks is None and not flags.any():
        return Drawn(_with_undrawable(greedy, finite))
    prefixes = None if drafts is None else drafts.prefixes
    changed = edited(logits, state, rows, positions, prefixes=prefixes, masks=masks)
    if changed is not logits:
        highest, greedy = changed.max(dim=-1)
        finite &= torch.isfinite(highest)
    tokens = _with_undrawable(greedy, finite)
    drawable = tokens >= 0
    draws = drawable & ((flags & DRAWS) != 0)
    processed = drawable & ((flags & LOGPROBS) != 0) & state.processed[rows]
    noisy = draws & ((flags & GUMBEL) != 0)
    index = np.flatnonzero(noisy)
    if len(index):
        tokens[index] = noisy_tokens(taken(changed, index), state, rows[index], positions[index])
    # Greedy and noisy rows go along only for the distribution that they report.
    weighted = np.flatnonzero((draws & ~noisy) | processed)
    agreement = np.full(len(tokens), np.nan)
    parts: list[LogprobRows] = []
    at_once = rows_at_once(logits)
    for start in range(0, len(weighted), at_once):
        index = weighted[start : start + at_once]
        block = _Block(changed, state, rows, positions, index)
        block.draw(tokens, agreement, draws & ~noisy, drafts)
        if processed[index].any():
            parts.append(block.logprobs(tokens, processed))
    return Drawn(tokens, agreement, parts)


def reported(
    logits: Tensor, state: SamplerState, rows: Ids, drawn: Drawn, emitted: Flags | None = None
) -> LogprobRows | None:
    """Log probabilities of the drawn tokens that want them, of the `emitted` rows [S] only."""
    if drawn.agreement is None:  # plainly greedy rows that want nothing else
        return None
    wanted = (state.flags[rows] & LOGPROBS) != 0
    if not wanted.any():
        return None
    raw = wanted & (drawn.tokens >= 0) & ~state.processed[rows]
    if emitted is not None:
        raw &= emitted
    index = np.flatnonzero(raw)
    parts = list(drawn.processed)
    if emitted is not None:
        parts = [part.where(emitted[part.index]) for part in parts]
    if len(index):
        counts = state.top_logprobs[rows[index]]
        parts.append(raw_logprobs(taken(logits, index), drawn.tokens[index], counts, index))
    return joined(parts) if parts else None


def taken(values: Tensor, index: Ids) -> Tensor:
    """Rows `index` (ascending, distinct) of `values`, which is not copied if these are all."""
    if len(index) == len(values):
        return values
    return values[sent(index, values)]


def shaped_weights(logits: Tensor, state: SamplerState, table: Ids) -> Tensor:
    """Weights, fp64 [R, vocab], that rows `table` of the state draw edited `logits` with."""
    weights = exp_weights(logits, state.temperatures[table])
    shaped = np.flatnonzero(state.flags[table] & SHAPED)
    if len(shaped):
        part, chosen = taken(weights, shaped), table[shaped]
        drop_unlikely(
            taken(logits, shaped),
            part,
            state.top_k[chosen],
            state.top_p[chosen],
            state.min_p[chosen],
        )
        if part is not weights:
            weights[sent(shaped, weights)] = part
    return weights


def noisy_tokens(logits: Tensor, state: SamplerState, table: Ids, positions: Ids) -> Ids:
    """Draws of the `gumbel` coupling, int64 [R], from edited logits of rows `table`."""
    tokens = np.empty(len(table), dtype=np.int64)
    shaped = (state.flags[table] & SHAPED) != 0
    index = np.flatnonzero(~shaped)
    if len(index):
        rows = table[index]
        tokens[index] = gumbel.draw(
            taken(logits, index), state.temperatures[rows], state.seeds[rows], positions[index]
        )
    shaped_index = np.flatnonzero(shaped)
    at_once = rows_at_once(logits)
    for start in range(0, len(shaped_index), at_once):
        index = shaped_index[start : start + at_once]
        rows, block = table[index], taken(logits, index)
        weights = shaped_weights(block, state, rows)
        draws = state.temperatures[rows], state.seeds[rows], positions[index]
        if block.device.type != "cpu":  # the best is always among what is kept
            tokens[index] = gumbel.draw(block.masked_fill(weights == 0, -torch.inf), *draws)
            continue
        # Much faster than np.nonzero of two dimensions.
        owners, ids = np.divmod(np.flatnonzero(weights.numpy()), weights.shape[1])
        tokens[index] = gumbel.draw_among(block, *draws, owners, ids)
    return tokens


class _Block:
    """Weights of a bounded number of rows."""

    def __init__(
        self, logits: Tensor, state: SamplerState, rows: Ids, positions: Ids, index: Ids
    ) -> None:
        """index: int64, which rows of `logits`."""
        table = rows[index]
        self._index = index
        self._logits = taken(logits, index)
        self._weights = shaped_weights(self._logits, state, table)
        self._seeds = state.seeds[table]
        self._positions = positions[index]
        self._temperatures = state.temperatures[table]
        self._top_counts = state.top_logprobs[table]

    def draw(
        self,
        tokens: Ids,
        agreement: NDArray[np.float64],
        draws: Flags,
        drafts: DraftRows | None,
    ) -> None:
        """Put what the rows that are in `draws` [S] draw into `tokens` and `agreement` [S]."""
        places = np.flatnonzero(draws[self._index])
        if not len(places):
            return
        index = self._index[places]
        weights, seeds = taken(self._weights, places), self._seeds[places]
        positions = self._positions[places]
        if drafts is None:
            tokens[index] = rejection.fresh(weights, seeds, positions)
            return
        q = None if drafts.weights is None else taken(drafts.weights, index)
        checked = rejection.check(weights, drafts.ids[index], q, seeds, positions)
        tokens[index], agreement[index] = checked

    def logprobs(self, tokens: Ids, wanted: Flags) -> LogprobRows:
        """Processed log probabilities of the rows of this block that are `wanted` [S]."""
        places = np.flatnonzero(wanted[self._index])
        index = self._index[places]
        return processed_logprobs(
            taken(self._logits, places),
            self._temperatures[places],
            taken(self._weights, places),
            tokens[index],
            self._top_counts[places],
            index,
        )


def _with_undrawable(ids: Tensor, finite: Tensor) -> Ids:
    """`ids` as NumPy, with NO_TOKEN_DRAWN where the highest logit is not `finite`."""
    return torch.where(finite, ids, NO_TOKEN_DRAWN).cpu().numpy()
