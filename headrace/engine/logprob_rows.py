"""Log probabilities as arrays: what the sampler gives and what chunks carry.

Contract: plain NumPy, no torch. `LogprobRows` holds those of the rows of one step that asked for
them; `PromptLogprobs` collects those of one prompt over its chunks. Filled by `engine/logprobs.py`,
read by whoever makes `TokenChunk`s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.output import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log probabilities of R tokens.

    index: int64 [R], ascending: which sampling row (or prompt row) each belongs to. logprobs:
    float64 [R], of the tokens themselves. top_ids, top_logprobs: [R, widest]; the first top_counts
    [R] of each row count.
    """

    index: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]
    top_counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.index)

    def at(self, places: NDArray[np.int64]) -> LogprobRows:
        """Those whose index is one of `places` (ascending), renumbered by their place there."""
        mine = np.isin(self.index, places)
        return LogprobRows(
            np.searchsorted(places, self.index[mine]),
            self.logprobs[mine],
            self.top_ids[mine],
            self.top_logprobs[mine],
            self.top_counts[mine],
        )

    def find(self, index: int) -> TokenLogprobs | None:
        """The entry of one sampling row, if it has one."""
        place = int(np.searchsorted(self.index, index))
        return self.record(place) if place < len(self) and self.index[place] == index else None

    def where(self, kept: NDArray[np.bool_]) -> LogprobRows:
        """The entries at which `kept` [R] is true."""
        return LogprobRows(
            self.index[kept],
            self.logprobs[kept],
            self.top_ids[kept],
            self.top_logprobs[kept],
            self.top_counts[kept],
        )

    def record(self, place: int) -> TokenLogprobs:
        """Entry number `place` as an object."""
        count = int(self.top_counts[place])
        return TokenLogprobs(
            float(self.logprobs[place]),
            tuple(self.top_ids[place, :count].tolist()),
            tuple(self.top_logprobs[place, :count].tolist()),
        )


class PromptLogprobs:
    """Those of one prompt; a chunk that is computed again replaces what it gave before."""

    def __init__(self, prompt_length: int, top_count: int) -> None:
        """top_count: best ids per token."""
        self.top_count = top_count
        # The first token has none: nothing comes before it.
        self._records: list[TokenLogprobs | None] = [None] * prompt_length

    def put(self, q_start: int, rows: LogprobRows) -> None:
        """Take the rows of a chunk in: entry i is about the token at position q_start + i + 1.

        The last row of the prompt is about the first drawn token and is left out by the caller or
        here.
        """
        end = min(len(rows), len(self._records) - 1 - q_start)
        for place in range(end):
            self._records[q_start + place + 1] = rows.record(place)

    def records(self) -> tuple[TokenLogprobs | None, ...]:
        """One entry per prompt token."""
        return tuple(self._records)
