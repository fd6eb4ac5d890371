"""Who waits, for what, and who comes next.

Contract: a waiting sequence is in one place: with its siblings (the prompt is being computed), with
those that wait for an external event, or ready for admission. Ready ones are grouped by the blocks
they need, so one that is too large holds up nobody who needs less. Within `ageing_steps` steps in
these queues (time spent waiting for an event does not count) a sequence becomes *aged*: from then
on it comes before all that have not, in the order in which they aged, and nobody passes it. Pure
data; called by the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from headrace.engine.sequence import Sequence

# (priority, number, ticket): a heap entry is alive while the ticket is the sequence's newest.
_Entry = tuple[int, int, int]


class WaitQueues:
    """All waiting sequences of one scheduler."""

    def __init__(self, ageing_steps: int) -> None:
        self._ageing_steps = ageing_steps
        self._tickets = 0
        self._ticket_of: dict[int, int] = {}  # number -> ticket, ready ones only
        self._need_of: dict[int, int] = {}
        self._sequences: dict[int, Sequence] = {}  # ready ones
        self._by_need: dict[int, list[_Entry]] = {}  # heaps
        self._needs: list[int] = []  # keys of _by_need, sorted
        self._aged: list[_Entry] = []  # heap: (age rank, number, ticket)
        self._age_ranks = 0
        self._deadlines: list[_Entry] = []  # heap: (step at which it ages, number, ticket)
        self._external: dict[int, Sequence] = {}
        self._siblings: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences) + len(self._external) + len(self._siblings)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._sequences.values()
        yield from self._external.values()
        yield from self._siblings.values()

    @property
    def has_ready(self) -> bool:
        """Whether anybody could be admitted if there were room."""
        return bool(self._sequences)

    @property
    def has_aged(self) -> bool:
        """Whether somebody waits whom nobody may pass."""
        return self.aged_head() is not None

    # --- in and out --------------------------------------------------------------------------

    def push(self, sequence: Sequence, need_blocks: int, step: int) -> None:
        """Make a sequence ready for admission; its waiting time goes on from `waited`."""
        sequence.queued_step = step
        self._enter(sequence, need_blocks)
        if not sequence.aged:
            deadline = step + self._ageing_steps - sequence.waited
            heappush(self._deadlines, (deadline, *self._key(sequence)))

    def hold_external(self, sequence: Sequence) -> None:
        """Keep a sequence out until `take_external`."""
        self._external[sequence.number] = sequence

    def take_external(self, sequence: Sequence) -> bool:
        """Whether it was held for an event; it is not any longer."""
        return self._external.pop(sequence.number, None) is not None

    def hold_sibling(self, sequence: Sequence) -> None:
        """Keep a choice out until the prompt of its request is computed."""
        self._siblings[sequence.number] = sequence

    def take_sibling(self, sequence: Sequence) -> None:
        """The choice is forked, or goes its own way."""
        self._siblings.pop(sequence.number, None)

    def remove(self, sequence: Sequence, step: int) -> None:
        """Take a sequence out, wherever it waits; adds what it waited here."""
        number = sequence.number
        if self._sequences.pop(number, None) is not None:
            del self._ticket_of[number]  # heap entries die with their ticket
            del self._need_of[number]
            sequence.waited += step - sequence.queued_step
            self._sweep()
        self._external.pop(number, None)
        self._siblings.pop(number, None)

    def change_need(self, sequence: Sequence, need_blocks: int) -> None:
        """Note that a ready sequence needs another number of blocks."""
        if need_blocks != self._need_of[sequence.number]:
            heappush(self._heap(need_blocks), (sequence.request.priority, *self._key(sequence)))
            self._need_of[sequence.number] = need_blocks

    # --- order -------------------------------------------------------------------------------

    def age(self, step: int) -> None:
        """Let those age whose time is over. O(1) while there are none."""
        while self._deadlines and self._deadlines[0][0] <= step:
            _, number, ticket = heappop(self._deadlines)
            if self._ticket_of.get(number) == ticket:
                sequence = self._sequences[number]
                sequence.age_rank = self.next_age_rank()
                heappush(self._aged, (sequence.age_rank, number, ticket))

    def next_age_rank(self) -> int:
        """The place of somebody who ages now."""
        self._age_ranks += 1
        return self._age_ranks

    def aged_head(self) -> Sequence | None:
        """The waiting sequence that aged first."""
        while self._aged:
            _, number, ticket = self._aged[0]
            if self._ticket_of.get(number) == ticket:
                return self._sequences[number]
            heappop(self._aged)
        return None

    def best(self, room_blocks: int, most_blocks: int | None = None) -> Sequence | None:
        """Who is admitted next: the aged head or nobody; without one the first that fits.

        most_blocks: those that have not aged may not need more; None: no limit but the room.
        """
        aged = self.aged_head()
        if aged is not None:
            return aged if self._need_of[aged.number] <= room_blocks else None
        if most_blocks is not None:
            room_blocks = min(room_blocks, most_blocks)
        best: _Entry | None = None
        empty = []
        for need in self._needs[: bisect_left(self._needs, room_blocks + 1)]:
            head = self._head(need)
            if head is None:
                empty.append(need)
            elif best is None or head < best:
                best = head
        for need in empty:
            del self._by_need[need]
            self._needs.remove(need)
        return None if best is None else self._sequences[best[1]]

    def first(self) -> Sequence | None:
        """The first in order, whether it fits or not."""
        return self.aged_head() or (self.best(self._needs[-1]) if self._needs else None)

    def count(self, room_blocks: int) -> tuple[int, int, int, int]:
        """How many wait for (admission, blocks, an event, their prompt) with this much room."""
        fitting = sum(need <= room_blocks for need in self._need_of.values())
        return (
            fitting,
            len(self._need_of) - fitting,
            len(self._external),
            len(self._siblings),
        )

    # --- inside ------------------------------------------------------------------------------

    def _enter(self, sequence: Sequence, need_blocks: int) -> None:
        number = sequence.number
        self._tickets += 1
        self._ticket_of[number] = self._tickets
        self._sequences[number] = sequence
        self._need_of[number] = need_blocks
        heappush(self._heap(need_blocks), (sequence.request.priority, *self._key(sequence)))
        if sequence.aged:
            heappush(self._aged, (sequence.age_rank, *self._key(sequence)))

    def _key(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.number, self._ticket_of[sequence.number]

    def _heap(self, need: int) -> list[_Entry]:
        heap = self._by_need.get(need)
        if heap is None:
            heap = self._by_need[need] = []
            insort(self._needs, need)
        return heap

    def _sweep(self) -> None:
        """Rebuild the heaps when most of their entries are dead: they must not grow for ever."""
        entries = len(self._deadlines) + len(self._aged) + sum(map(len, self._by_need.values()))
        if entries <= 4 * len(self._sequences) + 64:
            return
        tickets = self._ticket_of
        self._deadlines = [e for e in self._deadlines if tickets.get(e[1]) == e[2]]
        self._aged = [e for e in self._aged if tickets.get(e[1]) == e[2]]
        heapify(self._deadlines)
        heapify(self._aged)
        needs, self._by_need, self._needs = self._need_of, {}, []
        for number, sequence in self._sequences.items():
            heap = self._heap(needs[number])
            heappush(heap, (sequence.request.priority, *self._key(sequence)))

    def _head(self, need: int) -> _Entry | None:
        """The live head of a group, or None."""
        heap = self._by_need[need]
        while heap:
            _, number, ticket = heap[0]
            if self._ticket_of.get(number) == ticket and self._need_of[number] == need:
                return heap[0]
            heappop(heap)
        return None
