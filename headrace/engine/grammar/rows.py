"""Matchers of the running requests, by table row.

Contract, in the order of a step: `masks(rows, drafts)` once the tokens of the step before are in
`commit`ted (it needs no logits, so it may run beside the model), then `commit(rows, counts,
tokens)` with what was drawn. `admit` rebuilds a row from its known output, so preemption and forks
need nothing else. What fails in a matcher fails that row only: its mask allows nothing and `error`
says why. Used by one thread at a time; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.core.grammar import GrammarSpec
from headrace.engine.grammar.backend import MaskWords, MatcherBroken, MatcherFailed
from headrace.engine.grammar.matcher import Matcher
from headrace.engine.grammar.states import NOT_FORCED, StateGraph
from headrace.errors import HeadraceError, InternalError, InvalidGrammar

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Masks of the rows of logits that have one.

    index: int64 [M], ascending, which rows. words: int32 [M, ceil(vocab / 32)], see `MaskWords`.
    """

    index: Ids
    words: npt.NDArray[np.int32]


class GrammarRows:
    """All requests with a grammar that have a row."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = (vocab_size + 31) // 32
        self._matchers: dict[int, Matcher] = {}
        self._errors: dict[int, HeadraceError] = {}

    def __len__(self) -> int:
        return len(self._matchers) + len(self._errors)

    def admit(self, row: int, spec: GrammarSpec, graph: StateGraph, output: Sequence[int]) -> None:
        """Set a free row up after `output`, the tokens drawn so far."""
        matcher = Matcher(spec, graph)
        try:
            for token in output:
                if not matcher.accept(int(token)):
                    raise MatcherBroken(f"token {token} of the answer does not fit it")
        except MatcherFailed as error:
            self._fail(row, error)
        else:
            self._matchers[row] = matcher

    def release(self, row: int) -> None:
        """Forget a row, with or without a grammar."""
        self._matchers.pop(row, None)
        self._errors.pop(row, None)

    def error(self, row: int) -> HeadraceError | None:
        """Why nothing can be drawn for a row; None: nothing is wrong.

        InvalidGrammar at a limit that the grammar exceeds, InternalError for a bug.
        """
        return self._errors.get(row)

    def has(self, row: int) -> bool:
        """Whether a row has a grammar."""
        return row in self._matchers or row in self._errors

    def masks(self, rows: Ids, drafts: Sequence[Sequence[int]] | None = None) -> Masks | None:
        """Masks of the next step; None: everything is allowed everywhere.

        rows: int64 [R], table row of each request. drafts: by request, the tokens that its rows of
        logits after the first one verify; None: there are none. Rows behind a draft that is not
        allowed get no mask: nobody will ask them.
        """
        if not self._matchers and not self._errors:
            return None
        index: list[int] = []
        words: list[MaskWords] = []
        first = 0
        for place, row in enumerate(rows.tolist()):
            if drafts is None or not drafts[place]:
                mask = self._mask(row)
                if mask is not None:
                    index.append(first)
                    words.append(mask)
                first += 1
                continue
            for offset, mask in enumerate(self._masks_of(row, drafts[place])):
                if mask is not None:
                    index.append(first + offset)
                    words.append(mask)
            first += 1 + len(drafts[place])
        if not index:
            return None
        joined = words[0][None] if len(words) == 1 else np.array(words)
        return Masks(np.array(index, dtype=np.int64), joined)

    def commit(self, rows: Ids, counts: Ids | None, tokens: npt.NDArray[np.int64]) -> list[int]:
        """Take drawn tokens in; places in `tokens` [T] of each EOS that ends its grammar.

        counts: int64 [R] of `tokens` by request, None: one each.
        """
        ends: list[int] = []
        if not self._matchers:
            return ends
        drawn = tokens.tolist()
        first = 0
        for place, row in enumerate(rows.tolist()):
            last = first + (1 if counts is None else int(counts[place]))
            matcher = self._matchers.get(row)
            if matcher is not None:
                end = self._take(row, matcher, drawn[first:last])
                if end is not None:
                    ends.append(first + end)
            first = last
        return ends

    def forced(self, row: int, limit: int) -> list[int]:
        """Tokens that are certain to come next for a row, at most `limit`, up to EOS.

        They are drafts that verification accepts whatever the logits are. EOS is not among them:
        nothing follows it, so nothing is gained by knowing it.
        """
        matcher = self._matchers.get(row)
        run: list[int] = []
        if matcher is None:
            return run
        try:
            while len(run) < limit:
                token = matcher.forced()
                if token == NOT_FORCED or not matcher.accept(token):
                    break
                if matcher.ended:
                    matcher.rollback(1)
                    break
                run.append(token)
        except MatcherFailed:
            pass  # it is found again, and told, if the answer gets there
        matcher.rollback(len(run))
        return run

    def _mask(self, row: int) -> MaskWords | None:
        """Mask of the first row of logits of a request."""
        matcher = self._matchers.get(row)
        if matcher is not None:
            return matcher.mask()
        return np.zeros(self._num_words, dtype=np.int32) if row in self._errors else None

    def _masks_of(self, row: int, draft: Sequence[int]) -> list[MaskWords | None]:
        """Masks of the rows of logits of one request, as far as its draft is allowed."""
        masks = [self._mask(row)]
        matcher = self._matchers.get(row)
        if matcher is None:
            return masks
        accepted = 0
        try:
            for token in draft:
                if not matcher.accept(int(token)):
                    break
                accepted += 1
                masks.append(matcher.mask())
        except MatcherFailed:
            # The target may draw something else before; if not, the answer cannot go on.
            masks.append(np.zeros(self._num_words, dtype=np.int32))
        matcher.rollback(accepted)
        return masks

    def _take(self, row: int, matcher: Matcher, tokens: list[int]) -> int | None:
        """Which of `tokens` ends the grammar."""
        try:
            for place, token in enumerate(tokens):
                if token >= 0 and not matcher.accept(token):
                    raise MatcherBroken(f"token {token} was drawn although it was masked")
                if matcher.ended:
                    return place
        except MatcherFailed as error:
            self._fail(row, error)
        return None

    def _fail(self, row: int, error: MatcherFailed) -> None:
        self._matchers.pop(row, None)
        broken = isinstance(error, MatcherBroken)
        self._errors[row] = (InternalError if broken else InvalidGrammar)(
            f"The grammar of the answer cannot be followed any further: {error}.", param="grammar"
        )
