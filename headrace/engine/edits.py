"""Changes of the logits before the draw: penalties, bias, masks.

Contract: `edited` gives changed logits of the rows that ask for it, in the order of the spec:
repetition penalty, frequency and presence penalty, logit_bias, then the grammar's mask, banned and
allowed ids and what min_tokens forbids; where a grammar leaves nothing else, min_tokens yields. A
row behind drafts is changed as if they had been drawn (`Prefixes`); what is kept about the request
does not change. All rows at once by flat indices; every number is computed from its own row by
exactly rounded operations, so other rows change no bit. Used by `engine/sampler.py` and
`engine/speculation/draft_picker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.grammar.backend import MaskWords
from headrace.engine.grammar.rows import Masks
from headrace.engine.penalties import TokenCounts
from headrace.engine.sampling_state import EDITED, RowEdits, SamplerState
from headrace.engine.transfers import sent
from headrace.engine.weights import rows_at_once

Ids = NDArray[np.int64]
_Entry = tuple[int, RowEdits]  # row of the logits, its edits


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Drafts that stand before each row: those of row i are ids[begin[i] : end[i]], all int64."""

    ids: Ids
    begin: Ids
    end: Ids

    def of(self, row: int) -> Ids:
        """Drafts before one row, oldest first."""
        return self.ids[self.begin[row] : self.end[row]]


def edited(
    logits: Tensor,
    state: SamplerState,
    rows: Ids,
    positions: Ids,
    *,
    prefixes: Prefixes | None = None,
    masks: Masks | None = None,
) -> Tensor:
    """`logits` [S, vocab] itself when no row is edited, else a changed copy.

    rows, positions: int64 [S], table row and absolute position of each. masks: what the grammars of
    some of the rows allow.
    """
    entries: list[_Entry] = [
        (index, state.edits[int(rows[index])])
        for index in np.flatnonzero(state.flags[rows] & EDITED).tolist()
    ]
    if not entries and masks is None:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    _penalise(logits, entries, prefixes)
    _add_bias(logits, [entry for entry in entries if entry[1].bias_ids is not None])
    drawn = positions - state.prompt_lengths[rows]
    if masks is not None:
        _mask(logits, masks)
    _ban(logits, entries, lambda index, edits: edits.banned_ids)
    masked = frozenset(() if masks is None else masks.index.tolist())
    early = [(index, edits) for index, edits in entries if drawn[index] < edits.min_tokens]
    _ban(logits, [e for e in early if e[0] not in masked], lambda index, edits: edits.stop_ids)
    _ban_if_any_is_left(logits, [entry for entry in early if entry[0] in masked])
    _keep_allowed(logits, [entry for entry in entries if entry[1].allowed_ids is not None])
    return logits


def list_leaving_nothing(words: MaskWords, edits: RowEdits, drawn: int) -> str | None:
    """The list of a request that excludes all of a mask that has something; None: none does.

    words: int32 [ceil(vocab / 32)]. drawn: tokens of the answer so far.
    """
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    if not bits.any():
        return None
    if edits.banned_ids is not None:
        bits[edits.banned_ids] = 0
        if not bits.any():
            return "banned_token_ids"
    if drawn < edits.min_tokens:
        others = bits.copy()
        others[edits.stop_ids] = 0
        bits = others if others.any() else bits
    if edits.allowed_ids is not None and not bits[edits.allowed_ids].any():
        return "allowed_token_ids"
    return None


def _penalise(logits: Tensor, entries: Sequence[_Entry], prefixes: Prefixes | None) -> None:
    known = [(index, edits, edits.counts) for index, edits in entries if edits.counts is not None]
    if not known:
        return
    listed = [_counted(counts, index, prefixes) for index, _, counts in known]
    flat, where = _flat(
        logits, [(index, ids) for (index, _, _), (ids, _) in zip(known, listed, strict=True)]
    )
    lengths = [len(ids) for ids, _ in listed]

    def spread(values: list[float]) -> Tensor:
        return _like(logits, np.repeat(np.array(values, dtype=np.float64), lengths))

    counts = _like(logits, np.concatenate([counts for _, counts in listed]))
    repetition = spread([edits.repetition for _, edits, _ in known])
    values = flat[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([edits.frequency for _, edits, _ in known]) * counts
    values -= spread([edits.presence for _, edits, _ in known]) * (counts > 0)
    flat[where] = values


def _counted(counts: TokenCounts, row: int, prefixes: Prefixes | None) -> tuple[Ids, Ids]:
    """Ids that occurred before a row and how often each was drawn."""
    drafts = None if prefixes is None else prefixes.of(row)
    if drafts is None or not len(drafts):
        return counts.ids, counts.counts
    return counts.with_drafts(drafts)


def _add_bias(logits: Tensor, entries: Sequence[_Entry]) -> None:
    known = [
        (index, edits.bias_ids, edits.bias)
        for index, edits in entries
        if edits.bias_ids is not None and edits.bias is not None
    ]
    if known:
        flat, where = _flat(logits, [(index, ids) for index, ids, _ in known])
        flat[where] = flat[where] + _like(logits, np.concatenate([bias for _, _, bias in known]))


def _ban(
    logits: Tensor, entries: Sequence[_Entry], ids_of: Callable[[int, RowEdits], Ids | None]
) -> None:
    listed = [(index, ids) for index, edits in entries if (ids := ids_of(index, edits)) is not None]
    if listed:
        flat, where = _flat(logits, listed)
        flat[where] = -torch.inf


def _mask(logits: Tensor, masks: Masks) -> None:
    """-inf where a mask has no bit; a bounded number of masks is expanded at once."""
    vocab = logits.shape[1]
    if logits.device.type != "cpu":
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        at_once = rows_at_once(logits)
        for start in range(0, len(masks.index), at_once):
            part = slice(start, start + at_once)
            where, words_ = sent(masks.index[part], logits), sent(masks.words[part], logits)
            forbidden = (words_[..., None] >> bits & 1 == 0).flatten(1)[:, :vocab]
            logits[where] = logits[where].masked_fill_(forbidden, -torch.inf)
        return
    for index, words in zip(masks.index.tolist(), masks.words, strict=True):
        allowed = np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little")
        forbidden = torch.from_numpy(allowed) == 0
        logits[index].masked_fill_(forbidden, -torch.inf)


def _ban_if_any_is_left(logits: Tensor, entries: Sequence[_Entry]) -> None:
    """Ban the stop ids of rows with a grammar, but for those where nothing else is left."""
    if not entries:
        return
    listed = [(index, edits.stop_ids) for index, edits in entries]
    flat, where = _flat(logits, listed)
    rows = np.repeat([index for index, _ in listed], [len(ids) for _, ids in listed])
    kept = flat[where]
    flat[where] = -torch.inf
    left = torch.isfinite(logits.amax(dim=-1))[sent(rows.astype(np.int64), logits)]
    flat[where] = kept.masked_fill_(left, -torch.inf)


def _keep_allowed(logits: Tensor, entries: Sequence[_Entry]) -> None:
    listed = [(index, edits.allowed_ids) for index, edits in entries]
    known = [(index, ids) for index, ids in listed if ids is not None]
    if known:
        flat, where = _flat(logits, known)
        kept = flat[where]
        rows = np.array([index for index, _ in known], dtype=np.int64)
        logits.index_fill_(0, sent(rows, logits), -torch.inf)
        flat[where] = kept


def _flat(logits: Tensor, listed: Sequence[tuple[int, Ids]]) -> tuple[Tensor, Tensor]:
    """A flat view of contiguous `logits`, and the places in it of (row, distinct ids)."""
    vocab = logits.shape[1]
    places = np.concatenate([ids + index * vocab for index, ids in listed])
    return logits.view(-1), sent(places, logits)


def _like(logits: Tensor, values: NDArray[np.float64] | Ids) -> Tensor:
    return sent(values, logits, logits.dtype)
