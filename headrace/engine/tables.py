"""The numbers of all running requests, one table row each, as arrays over the rows.

Contract: a row (1 .. num_rows - 1) is one running request everywhere: here, as its block table and
as its ring and state slot. `RequestTable` is plain storage that the scheduler writes and the input
builder reads; `DecodeSet` is what the scheduler keeps of the decoding rows between steps, so that a
step in which nobody comes or goes gathers nothing. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.engine.outputs import Codes
from headrace.engine.plan import NO_TOKEN_DRAWN, Flags, Ints, StepPlan, Tokens
from headrace.engine.sequence import NOT_AGED, Sequence
from headrace.errors import InternalError

FREE, PREFILL, DECODE = range(3)
_FAR = 2**62  # steps until something that does not happen
# Row 0 is the padding sequence of a step: it must have enough zeros to fill one up.
LEAST_TOKENS = 128
# An int64 column each, int64 [num_rows].
_COLUMNS = (
    "number",
    "priority",
    "prompt_length",
    "length",
    "computed",
    "limit",
    "stop_from",
    "window_floor",
    "write_from",
    "keep_from",
    "bound",
    "last_step",
    "wanted",
    "forced",
    "due",
    "planned",
    "most",
    "flying",
    "verified_drafts",
    "accepted_drafts",
)


class RequestTable:
    """Columns over rows.

    tokens: int32 [num_rows, max_tokens], known ids; memory is touched as far as requests reach.
    number: of the sequence. length: known tokens. computed: tokens that have cache rows. limit:
    length at which the answer ends. stop_from: length from which on stop tokens count.
    window_floor, write_from, keep_from: see `model.batch.BatchRow`. bound: full blocks that have
    been offered to the prefix cache. last_step: in which the row ran last. wanted: drafts to verify
    a step, as in `NewRequest`. drafted: bool, drafts are made for its next share. forced: tokens
    behind the newest one that its grammar forces; due: those of them that are still to come once
    all that is in flight has run, below 0: none (`look_ahead` sets it). planned: prompt
    tokens that have cache rows once all that is in flight has run. most, flying: how long it can
    be then, and how many shares that draw are in flight (`look_ahead` sets them). age_rank,
    verified_drafts, accepted_drafts: as in `Sequence`. epoch: grows with every release of the row,
    so the result of an older plan is recognised. stops: int32 [K, num_rows], tokens that end the
    answer; line 0 and unused places hold NO_TOKEN_DRAWN.
    """

    number: Ints
    priority: Ints
    prompt_length: Ints
    length: Ints
    computed: Ints
    limit: Ints
    stop_from: Ints
    window_floor: Ints
    write_from: Ints
    keep_from: Ints
    bound: Ints
    last_step: Ints
    wanted: Ints
    forced: Ints
    due: Ints
    planned: Ints
    most: Ints
    flying: Ints
    verified_drafts: Ints
    accepted_drafts: Ints

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self.num_rows = num_rows
        self.tokens: Tokens = np.zeros((num_rows, max(max_tokens, LEAST_TOKENS)), dtype=np.int32)
        for name in _COLUMNS:
            setattr(self, name, np.zeros(num_rows, dtype=np.int64))
        self.epoch: Ints = np.zeros(num_rows, dtype=np.int64)
        self.state: Codes = np.zeros(num_rows, dtype=np.int8)
        self.age_rank: Ints = np.full(num_rows, NOT_AGED, dtype=np.int64)
        self.all_logits: Flags = np.zeros(num_rows, dtype=np.bool_)
        self.drafted: Flags = np.zeros(num_rows, dtype=np.bool_)
        self.stops: Tokens = np.full((2, num_rows), NO_TOKEN_DRAWN, dtype=np.int32)
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.names = [("", 0)] * num_rows  # of the sequences; that of a free row means nothing
        # A stack: rows that were used last come back first, their memory is warm.
        self._free = list(range(num_rows - 1, 0, -1))

    @property
    def free_rows(self) -> int:
        """Rows that `open` could give."""
        return len(self._free)

    @property
    def running(self) -> int:
        """Rows in use."""
        return self.num_rows - 1 - len(self._free)

    def next_row(self) -> int:
        """The row that the next `open` gives; there must be one."""
        return self._free[-1]

    def open(self, sequence: Sequence, state: int, step: int) -> int:
        """Give `sequence` a row with its tokens; the caller sets what depends on the cache."""
        row = self._free.pop()
        request = sequence.request
        length = sequence.tokens.size
        self.tokens[row, :length] = sequence.tokens
        self.number[row] = sequence.number
        self.priority[row] = request.priority
        self.prompt_length[row] = sequence.prompt_length
        self.length[row] = self.most[row] = length
        self.flying[row] = 0
        self.wanted[row] = request.drafts
        self.drafted[row] = False
        self.verified_drafts[row] = sequence.verified_drafts
        self.accepted_drafts[row] = sequence.accepted_drafts
        self.forced[row] = 0
        self.limit[row] = request.length_limit
        self.stop_from[row] = sequence.prompt_length + request.min_tokens
        self.start(row, 0)
        self.window_floor[row] = self.write_from[row] = self.keep_from[row] = 0
        self.bound[row] = 0
        self.last_step[row] = step
        self.age_rank[row] = sequence.age_rank
        self.all_logits[row] = request.all_logits
        self.state[row] = state
        self._set_stops(row, request.stop_ids)
        self.sequences[row] = sequence
        self.names[row] = sequence.name
        sequence.row = row
        return row

    def close(self, row: int) -> Sequence:
        """Take the row from its sequence, which gets its tokens back."""
        sequence = self.sequence(row)
        sequence.tokens = self.tokens[row, : self.length[row]].copy()
        sequence.age_rank = int(self.age_rank[row])
        sequence.verified_drafts = int(self.verified_drafts[row])
        sequence.accepted_drafts = int(self.accepted_drafts[row])
        sequence.row = 0
        self.sequences[row] = None
        self.state[row] = FREE
        self.forced[row] = 0
        self.epoch[row] += 1
        self._free.append(row)
        return sequence

    def start(self, row: int, computed: int) -> None:
        """The first `computed` tokens of a row have their cache rows already."""
        self.computed[row] = self.planned[row] = computed

    def sequence(self, row: int) -> Sequence:
        """Who has a row. Raises InternalError for a free one."""
        sequence = self.sequences[row]
        if sequence is None:
            raise InternalError(f"Table row {row} is free.")
        return sequence

    def rows_in(self, state: int) -> Ints:
        """Rows in a state, by arrival."""
        rows = np.flatnonzero(self.state == state)
        return rows[self.number[rows].argsort()]

    def room(self, rows: Ints) -> Ints:
        """Tokens that rows may draw beyond those known and those in flight, int64 [n]."""
        room: Ints = self.limit[rows] - self.length[rows] - self.flying[rows]
        return room

    def look_ahead(self, plans: Iterable[StepPlan]) -> None:
        """Set what depends on plans in flight; shares whose row changed hands count for nothing."""
        np.copyto(self.planned, self.computed)
        np.copyto(self.most, self.length)
        np.copyto(self.due, self.forced)
        self.flying[:] = 0
        for plan in plans:
            live = self.epoch[plan.rows] == plan.epochs
            chunks = live.copy()
            chunks[: plan.decodes] = False
            self.planned[plan.rows[chunks]] = (plan.q_start + plan.q_len)[chunks]
            draws = live & plan.samples
            grown, least = np.ones((2, plan.rows.size), dtype=np.int64)
            if plan.drafts is not None:
                grown[: plan.decodes] += plan.drafts.most
                least[: plan.decodes] += plan.drafts.forced
            self.most[plan.rows[draws]] += grown[draws]
            self.due[plan.rows[draws]] -= least[draws]
            self.flying[plan.rows[draws]] += 1
        np.minimum(self.most, self.limit, out=self.most)

    def _set_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
        lines = len(stop_ids) + 1
        if lines > len(self.stops):
            more = max(lines, 2 * len(self.stops)) - len(self.stops)
            grown = np.full((more, self.num_rows), NO_TOKEN_DRAWN, dtype=np.int32)
            self.stops = np.concatenate((self.stops, grown))
        self.stops[1:, row] = NO_TOKEN_DRAWN
        self.stops[1:lines, row] = stop_ids

    def __deepcopy__(self, memo: dict[int, Any]) -> RequestTable:
        """Copies the tokens of rows in use only: the array may span untouched gigabytes."""
        twin = RequestTable.__new__(RequestTable)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            if name != "tokens":
                setattr(twin, name, deepcopy(value, memo))
        twin.tokens = np.zeros_like(self.tokens)
        for row in np.flatnonzero(self.state).tolist():
            length = int(self.length[row])
            twin.tokens[row, :length] = self.tokens[row, :length]
        return twin


@dataclass(slots=True, eq=False)
class DecodeSet:
    """Decoding rows by arrival, with what a step needs of them, dense: entry i is rows[i].

    Arrays are replaced, never written: plans and outputs share them. length, computed: of now.
    stops: int32 [K, n]. growth_in: steps until the first of them needs a block. limit_in: tokens
    until the first of them is full. started: all of them have drawn a token before.
    """

    rows: Ints
    epochs: Ints
    numbers: Ints
    names: list[tuple[str, int]]
    prompt_length: Ints
    length: Ints
    computed: Ints
    stops: Tokens
    window_floor: Ints
    write_from: Ints
    keep_from: Ints
    ones: Ints
    all: Flags
    running: Codes
    growth_in: int
    limit_in: int
    started: bool

    @classmethod
    def of(cls, table: RequestTable, num_blocks: Tokens, block_tokens: int) -> DecodeSet:
        """All decoding rows of `table`; num_blocks: int32 [num_rows], of the block tables."""
        rows = table.rows_in(DECODE)
        length = table.length[rows]
        prompt_length = table.prompt_length[rows]
        stops = table.stops[:, rows]
        lines = int(np.flatnonzero((stops >= 0).any(axis=1)).max(initial=0)) + 1
        room = num_blocks[rows] * block_tokens - length
        return cls(
            rows=rows,
            epochs=table.epoch[rows],
            numbers=table.number[rows],
            names=list(map(table.names.__getitem__, rows.tolist())),
            prompt_length=prompt_length,
            length=length,
            computed=table.computed[rows],
            stops=np.ascontiguousarray(stops[:lines]),
            window_floor=table.window_floor[rows],
            write_from=table.write_from[rows],
            keep_from=table.keep_from[rows],
            ones=np.ones(rows.size, dtype=np.int64),
            all=np.ones(rows.size, dtype=np.bool_),
            running=np.zeros(rows.size, dtype=np.int8),
            growth_in=int(room.min(initial=_FAR)),
            limit_in=int((table.limit[rows] - length).min(initial=_FAR)),
            started=bool((length > prompt_length).all()),
        )

    def regrown(self, num_blocks: Tokens, block_tokens: int) -> None:
        """Note that the block tables have grown."""
        room = num_blocks[self.rows] * block_tokens - self.length
        self.growth_in = int(room.min(initial=_FAR))
