"""Which survivals are known of each running request: of its newest drafts, and of rounds before.

Contract: arrays over table rows, no torch. A *round* of a request is one draft pass for it: the
engine says when it is launched, when its confidences reach the host (in order; results of void
shares are not passed on), when the step that may verify it was planned, and when the row is given
up. Rounds are counted, so it does not matter how late confidences come: blocking and overlapped
loops ask the same question, and nothing of the newest drafts is in `previous` or `profile`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.engine.speculation.confidence import Survivals, survivals
from headrace.engine.speculation.curve import Floats, Ints
from headrace.errors import InternalError

Flags = NDArray[np.bool_]
KEPT_ROUNDS = 8
# With fewer requests than this, more than one earlier round is looked at: one round of four
# requests is a poor guess of what the next one will be worth.
ENOUGH_REQUESTS = 64
# Requests' rounds after which the profile has mostly forgotten; few, since probes are rare.
PROFILE_MEMORY = 32


class Rounds:
    """num_rows: table rows. draft_length: G, drafts of a round.

    profile: float64 [G], running mean of the survivals of planned rounds, 1 before the first.
    """

    def __init__(self, num_rows: int, draft_length: int) -> None:
        self.profile: Floats = np.ones(draft_length)
        self._launched = np.zeros(num_rows, dtype=np.int64)
        self._arrived = np.zeros(num_rows, dtype=np.int64)
        self._planned = np.zeros(num_rows, dtype=np.int64)
        # One more than is asked for: the newest. [round % rounds, row, place]
        # fp32 sorts faster, and nobody knows a probability better.
        shape = (KEPT_ROUNDS + 1, num_rows, draft_length)
        self._survivals: NDArray[np.float32] = np.ones(shape, dtype=np.float32)

    def launch(self, rows: Ints) -> None:
        """A draft pass for these rows [R] (each at most once) was launched."""
        self._launched[rows] += 1

    def arrive(self, rows: Ints, confidence: Floats) -> None:
        """Confidences [R, G] in [0, 1] of each row's oldest round that has not arrived.

        Raises InternalError if a row has none under way.
        """
        if np.any(self._arrived[rows] >= self._launched[rows]):
            raise InternalError("confidences arrived for a draft pass that was not launched")
        self._arrived[rows] += 1
        number = self._arrived[rows]
        found = survivals(confidence)
        self._survivals[number % (KEPT_ROUNDS + 1), rows] = found
        self._learn(found[number <= self._planned[rows]])

    def plan(self, rows: Ints) -> None:
        """The step that may verify the newest drafts of these rows [R] is planned: from now on the
        profile may know of them."""
        number = self._launched[rows]
        fresh = (number > self._planned[rows]) & (self._arrived[rows] == number)
        self._learn(self._of(number[fresh], rows[fresh]))
        self._planned[rows] = number

    def clear(self, rows: Ints) -> None:
        """These rows [R] are given up or computed again: no drafts, nothing under way."""
        for counts in (self._launched, self._arrived, self._planned):
            counts[rows] = 0

    def previous(self, rows: Ints) -> tuple[Survivals, Flags]:
        """Survivals [M, R, G] of M >= 1 rounds before the newest, latest first, and whether each
        row knows any [R]. A row that knows fewer than M repeats them."""
        latest = self._launched[rows] - 1
        known = (latest >= 1) & (self._arrived[rows] >= latest)
        depth = min(max(ENOUGH_REQUESTS // max(len(rows), 1), 1), KEPT_ROUNDS)
        back = np.arange(depth)[:, None] % np.maximum(latest, 1)
        return self._of(latest - back, rows), known

    def newest(self, rows: Ints) -> Survivals:
        """Survivals [R, G] of the newest round, 1 where they have not arrived."""
        number = self._launched[rows]
        arrived = self._arrived[rows] == number
        found = self._of(number, rows)
        return found if arrived.all() else np.where(arrived[:, None], found, np.float32(1.0))

    def _of(self, number: Ints, rows: Ints) -> Survivals:
        """Survivals [..., R, G] of rounds [..., R] of these rows."""
        rounds, num_rows, length = self._survivals.shape
        place = number % rounds * num_rows + rows
        found: Survivals = self._survivals.reshape(-1, length).take(place, axis=0)
        return found

    def _learn(self, found: Survivals) -> None:
        if len(found):
            weight = len(found) / (len(found) + PROFILE_MEMORY)
            self.profile = self.profile + weight * (found.mean(axis=0) - self.profile)
