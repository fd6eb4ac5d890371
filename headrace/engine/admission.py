"""What is rare in scheduling: requests that come, get memory, fork, give way or end.

Contract: `Admission` owns the request table, the queues and the block tables, and changes them one
request at a time; `engine/scheduler.py` chooses the rows of each step over them. `version` grows
whenever a row changes hands or starts to decode, so the scheduler knows when to look again. A
request in a row holds blocks for all its known tokens; in a queue it holds nothing. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.core.hashing import BlockKeys
from headrace.engine.outputs import ERROR, StepOutput
from headrace.engine.plan import NO_COPIES, NO_TOKEN_DRAWN, Ints, Tokens
from headrace.engine.queues import WaitQueues
from headrace.engine.sequence import NOT_AGED, NewRequest, Sequence
from headrace.engine.speculation.controller import Controller
from headrace.engine.stats import Counters, EngineStats
from headrace.engine.tables import DECODE, PREFILL, RequestTable
from headrace.errors import ContextTooLong, InternalError, InvalidRequest, Overloaded
from headrace.kv.manager import KVManager
from headrace.kv.pool import Shortage
from headrace.kv.resume import COLD, Resume, ResumeRules, plan_resume

RETRY_AFTER_S = 1.0
# How often the first in the queue looks for blocks that others have computed meanwhile.
_LOOK_AGAIN_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes of a scheduler.

    max_num_seqs: requests computed at once. max_num_batched_tokens: rows of one step (at least
    max_num_seqs, so that each decoding request advances in every step). max_waiting: choices in
    the queues. max_tokens: prompt and output of one request. ageing_steps: see `engine/queues.py`.
    keep: last prompt rows that run through all layers, 0: all of them do (no truncation).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_tokens: int
    ageing_steps: int = 256
    keep: int = 0


class _Fork(NamedTuple):
    """(source, target) copies that start a forked row."""

    slots: tuple[int, int]
    blocks: tuple[tuple[int, int], ...]


class RowHooks(Protocol):
    """Who keeps state by row beside the scheduler (the sampler)."""

    def admitted(self, row: int, sequence: Sequence, tokens: Tokens) -> None:
        """A free row got a sequence with these known tokens, int32 [length]."""
        ...

    def released(self, row: int) -> None:
        """The row is free again."""
        ...


class Admission:
    """Requests, rows and queues of one scheduler."""

    def __init__(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        resume: ResumeRules | None,
        root_key: bytes | None,
        hooks: RowHooks | None,
        controller: Controller | None = None,
    ) -> None:
        """controller: of drafts, told who gets a row."""
        self.kv = kv
        self.table = RequestTable(len(kv.held), limits.max_tokens)
        self.queues = WaitQueues(limits.ageing_steps)
        self.requests: dict[str, list[Sequence]] = {}  # live choices of live requests
        self.prefilling: list[int] = []  # rows, by admission
        self.version = 0
        self.steps = 0
        self._limits = limits
        self._resume = resume
        self._root_key = root_key
        self._hooks = hooks
        self._controller = controller
        self._numbers = 0
        self._looked_step = 0
        self._forks: list[_Fork | None] = []  # copies not made yet; None: given up
        self._forks_done = 0
        self._forks_launched = 0  # the copies of so many are made or in flight
        self._counters = Counters()

    def state(self) -> dict[str, Any]:
        """All that changes, by attribute name."""
        fixed = ("_limits", "_resume", "_root_key", "_hooks", "_controller")
        return {name: value for name, value in vars(self).items() if name not in fixed}

    # --- requests in and out -----------------------------------------------------------------

    def enqueue(self, request: NewRequest, now: float) -> int:
        """See `Scheduler.enqueue`."""
        self._check(request)
        first = self._numbers
        self._numbers += request.choices
        choices = [
            Sequence(request, first + choice, choice, request.prompt)
            for choice in range(request.choices)
        ]
        self.requests[request.request_id] = choices
        for sequence in choices:
            sequence.arrival_s = sequence.queued_s = now
            if sequence.choice:
                self.queues.hold_sibling(sequence)
        choices[0].siblings = choices[1:]
        choices[0].waits_for = set(request.waits_for)
        if request.waits_for:
            self.queues.hold_external(choices[0])
        else:
            self._queue(choices[0])
        return first

    def _check(self, request: NewRequest) -> None:
        name, prompt_length = request.request_id, len(request.prompt)
        if name in self.requests:
            raise InvalidRequest(f"Request id {name!r} is already in use.")
        total = self.kv.stats().blocks.total
        most = min(total, self.kv.block_tables.shape[1])
        needed = self.kv.blocks_for(request.length_limit)
        if needed > most or request.length_limit > self._limits.max_tokens:
            raise ContextTooLong(
                f"The request needs {request.length_limit} tokens (prompt {prompt_length}, output "
                f"up to {request.length_limit - prompt_length}), that is {needed} blocks of KV "
                f"cache; the limit is {most} blocks and {self._limits.max_tokens} tokens."
            )
        if request.choices > self._limits.max_waiting:
            raise InvalidRequest(
                f"n: {request.choices} choices can never wait at once here, the limit is "
                f"{self._limits.max_waiting}.",
                param="n",
            )
        waiting = len(self.queues)
        if waiting + request.choices > self._limits.max_waiting:
            raise Overloaded(
                f"{waiting} requests are waiting, the limit is {self._limits.max_waiting}. Try "
                "again later.",
                retry_after_s=RETRY_AFTER_S,
            )

    def drop(
        self, request_id: str, code: int, now: float, *, refused: bool = False
    ) -> StepOutput | None:
        """End all choices of a request with `code`; None: the id is unknown. refused: see `end`."""
        choices = self.requests.get(request_id)
        if choices is None:
            return None
        for sequence in choices:
            sequence.siblings = []  # nobody goes on without the others
        dropped = list(choices)
        lengths = [self._known_length(sequence) for sequence in dropped]
        for sequence in dropped:
            self.end(sequence, code, now, refused=refused)
        prompt_length = dropped[0].prompt_length
        return StepOutput(
            numbers=np.array([sequence.number for sequence in dropped], dtype=np.int64),
            names=[sequence.name for sequence in dropped],
            index=np.array(lengths, dtype=np.int64) - prompt_length,
            tokens=np.full(len(dropped), NO_TOKEN_DRAWN, dtype=np.int32),
            finish=np.full(len(dropped), code, dtype=np.int8),
        )

    def ready(self, request_id: str, why: str, now: float) -> None:
        """See `Scheduler.ready`."""
        for sequence in self.requests.get(request_id, ()):
            sequence.waits_for.discard(why)
            if not sequence.waits_for and self.queues.take_external(sequence):
                sequence.queued_s = now
                self._queue(sequence)

    def end(self, sequence: Sequence, code: int, now: float, *, refused: bool = False) -> None:
        """A choice has ended: it holds nothing from now on. refused: the error is its own fault."""
        self._counters.ended(sequence, code, now, refused=refused)
        if sequence.row:
            self._give_back(sequence.row, keep_cached=code != ERROR)
        else:
            self.queues.remove(sequence, self.steps)
        self._release_siblings(sequence)
        choices = self.requests[sequence.request.request_id]
        choices.remove(sequence)
        if not choices:
            del self.requests[sequence.request.request_id]

    # --- admission ---------------------------------------------------------------------------

    def candidate(self, most_blocks: int | None = None) -> Sequence | None:
        """Who could be admitted now, as far as the queues know; one that takes `most_blocks`."""
        if not self.queues.has_ready or not self._has_row():
            return None
        if self.steps >= self._looked_step + _LOOK_AGAIN_STEPS:
            self._looked_step = self.steps
            first = self.queues.first()
            if first is not None:
                self.queues.change_need(first, self._need(first))
        return self.queues.best(self._room(), most_blocks)

    def admit(self, budget: int, now: float) -> None:
        """Admit whoever would get some of `budget` rows for prompts, shortest first."""
        while budget > 0:
            sequence = self.candidate(self._most_blocks(budget))
            if sequence is None:
                break
            self._open(sequence, now)

    def _most_blocks(self, budget: int) -> int | None:
        """Blocks of the longest prompt that would get a row beside those in work; None: any."""
        rows = self.prefilling
        remaining = sorted((self.table.length[rows] - self.table.planned[rows]).tolist())
        for tokens in remaining:
            budget -= tokens
            if budget <= 0:
                return int(tokens - 1) // self.kv.block_tokens
        return None

    def _has_row(self) -> bool:
        return self.table.free_rows > 0 and self.table.running < self._limits.max_num_seqs

    def _room(self) -> int:
        """Blocks for newcomers: one per running request stays free.

        Else the next growth of a running request would preempt the newcomer.
        """
        return self.kv.available_blocks - self.table.running

    def _need(self, sequence: Sequence) -> int:
        hit_blocks = self._find(sequence).hit_tokens // self.kv.block_tokens
        return self.kv.blocks_for(sequence.tokens.size) - hit_blocks

    def _find(self, sequence: Sequence) -> Resume:
        """Where a waiting sequence can be resumed.

        A preempted one resumes where it did at first, or nowhere, if replay is an approximation:
        its stream must go on as if nothing had happened.
        """
        rules = self._resume
        if rules is None or sequence.keys is None:
            return COLD
        length = sequence.tokens.size
        sequence.keys.cover(sequence.tokens.data, length)
        limit = length if self._limits.keep == 0 else min(length, sequence.prompt_length)
        found = plan_resume(rules, limit, self.kv.match(sequence.keys.keys))
        if sequence.resumed_at < 0 or rules.mode == "exact" or found == COLD:
            return found
        if found.hit_tokens < sequence.resumed_at or sequence.resumed_at == 0:
            return COLD
        return Resume(sequence.resumed_at, found.replay_rows)

    def _open(self, sequence: Sequence, now: float) -> int | None:
        """Give a waiting sequence a row and its blocks; None, and nothing changed, without room."""
        found = self._find(sequence)
        length = sequence.tokens.size
        hit_blocks = found.hit_tokens // self.kv.block_tokens
        row, room = self.table.next_row(), self._room()
        keys = sequence.keys.keys if sequence.keys is not None else []
        short = self.kv.admit(row, length, hit_blocks, keys)
        if short is None and self.kv.available_blocks < self.table.running:
            self.kv.release(row)  # hits were cached, not in use: they took room as well
            short = Shortage(room + 1, room)
        if short is not None:
            needed = self.kv.blocks_for(length) - hit_blocks
            self.queues.change_need(sequence, max(needed, room + 1))
            return None
        self.queues.remove(sequence, self.steps)
        self._take_row(sequence, PREFILL)
        table = self.table
        table.start(row, found.start)
        table.window_floor[row] = found.start
        table.write_from[row] = found.hit_tokens
        table.bound[row] = hit_blocks
        if self._hooks is not None:
            self._hooks.admitted(row, sequence, table.tokens[row, :length])
        self.prefilling.append(row)
        self._counters.admitted(sequence, found, now)
        if sequence.resumed_at < 0:
            sequence.resumed_at = found.hit_tokens
        return row

    def _take_row(self, sequence: Sequence, state: int) -> int:
        row = self.table.open(sequence, state, self.steps)
        all_logits = sequence.request.all_logits
        keep = self._limits.keep
        if keep and not all_logits:
            # Of the prompt, not of all known tokens: recomputed output rows must see what they saw.
            self.table.keep_from[row] = max(0, sequence.prompt_length - keep)
        # Once, by the first choice: the others and recomputations have no use for them.
        first = sequence.choice == 0 and sequence.tokens.size == sequence.prompt_length
        self.table.all_logits[row] = all_logits and first
        if self._controller is not None:
            self._controller.clear(np.array([row]))
        self.version += 1
        return row

    # --- while it runs -----------------------------------------------------------------------

    def start_decoding(self, rows: Ints) -> None:
        """The prompts of these rows are computed."""
        if rows.size:
            self.table.state[rows] = DECODE
            self.table.all_logits[rows] = False
            gone = set(rows.tolist())
            self.prefilling = [row for row in self.prefilling if row not in gone]
            self.version += 1

    def note_first_tokens(self, rows: Ints, now: float) -> None:
        """These rows have drawn their first token."""
        for row in rows.tolist():
            self._counters.first_token(self.table.sequence(row), now)

    def count_step(self, computed: int, drawn: int) -> None:
        """Count the rows of a committed step."""
        self._counters.computed_tokens += computed
        self._counters.drawn_tokens += drawn

    def count_drafts(self, rounds: int, verified: int, drafted: int) -> None:
        """Count what a committed step verified and drafted."""
        self._counters.count_drafts(rounds, verified, drafted)

    def count_forced(self, tokens: int) -> None:
        """Count forced tokens that were computed ahead of their turn."""
        self._counters.count_forced(tokens)

    def bind(self, row: int) -> None:
        """Offer the full blocks that a row has computed to the prefix cache."""
        table = self.table
        first, full = int(table.bound[row]), int(table.computed[row]) // self.kv.block_tokens
        keys = table.sequence(row).keys
        if full <= first or keys is None:
            return
        keys.cover(table.tokens[row].data, full * self.kv.block_tokens)
        self.kv.bind(row, first, keys.keys[first:full])
        table.bound[row] = full

    def bind_newest(self, rows: Ints) -> None:
        """`bind` for decoding rows that have just filled their last block."""
        table, block_tokens = self.table, self.kv.block_tokens
        full = table.computed[rows] // block_tokens
        for row in rows[full > table.bound[rows] + 1].tolist():
            self.bind(row)  # blocks for drafts came early, so more than one is complete
        new = full > table.bound[rows]
        rows, full = rows[new], full[new]
        keyed, keys = [], []
        for place, (row, blocks) in enumerate(zip(rows.tolist(), full.tolist(), strict=True)):
            own = table.sequence(row).keys
            if own is not None:
                own.cover(table.tokens[row].data, blocks * block_tokens)
                keys.append(own.keys[blocks - 1])
                keyed.append(place)
        if keyed:
            self.kv.bind_each(rows[keyed], full[keyed] - 1, keys)
            table.bound[rows] = full

    def fork_siblings(self, row: int, now: float) -> None:
        """Start the other choices of a request whose prompt is computed.

        They go on from the prompt without its last token, which they compute again themselves: the
        logits of that row are theirs then. Who finds no row or block queues up like anybody else,
        and so do all while an aged request waits.
        """
        parent = self.table.sequence(row)
        siblings, parent.siblings = parent.siblings, []
        for sequence in siblings:
            self.queues.take_sibling(sequence)
            sequence.queued_s = now
            sequence.resumed_at = parent.resumed_at
            if self.queues.has_aged or not self._has_row() or not self._fork(row, sequence, now):
                self._queue(sequence)

    def _fork(self, parent_row: int, sequence: Sequence, now: float) -> bool:
        table, at_tokens = self.table, sequence.prompt_length - 1
        child = table.next_row()
        copies = self.kv.fork(parent_row, child, at_tokens)
        if isinstance(copies, Shortage):
            return False
        keys = table.sequence(parent_row).keys
        sequence.keys = None if keys is None else keys.copy()
        self._take_row(sequence, DECODE)
        table.start(child, at_tokens)
        table.window_floor[child] = table.window_floor[parent_row]
        table.write_from[child] = table.write_from[parent_row]
        table.bound[child] = at_tokens // self.kv.block_tokens
        if self._hooks is not None:
            self._hooks.admitted(child, sequence, sequence.tokens)
        self._forks.append(_Fork((parent_row, child), copies))
        self._counters.forked(sequence, now)
        return True

    def victim(self) -> int:
        """The row that gives way: of the lowest priority, with most blocks, the latest arrival.

        Aged ones only when there is nobody else, the last to age first; never the one that comes
        first of all, so somebody always gets on.
        """
        table = self.table
        rows = np.flatnonzero(table.state)
        rank = table.age_rank[rows]
        place = np.where(rank == NOT_AGED, table.priority[rows], rank)
        first = np.lexsort((table.number[rows], place, rank == NOT_AGED))[0]
        blocks = self.kv.num_blocks[rows]
        order = np.lexsort((table.number[rows], blocks, place, rank == NOT_AGED))
        if rows.size < 2:
            # Cannot happen while one request alone fits; loud beats an endless loop.
            raise InternalError("A request alone finds no block.")
        return int(rows[order[-1] if order[-1] != first else order[-2]])

    def preempt(self, row: int, now: float) -> None:
        """Take a row from its sequence, which is computed again later, drawn tokens included."""
        sequence = self.table.sequence(row)
        self._counters.preempted(sequence, now)
        self._give_back(row, keep_cached=True)
        self._release_siblings(sequence)
        self._queue(sequence)

    # --- copies ------------------------------------------------------------------------------

    def block_copies_due(self) -> Ints:
        """Block copies that the next step must make first, int64 [n, 2]."""
        if not self._forks:
            return NO_COPIES
        pairs = [pair for fork in self._forks_due() for pair in fork.blocks]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def slot_copies_due(self) -> Ints:
        """Slot copies that the next step must make first, int64 [n, 2]."""
        if not self._forks:
            return NO_COPIES
        pairs = [fork.slots for fork in self._forks_due()]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def _forks_due(self) -> list[_Fork]:
        due = self._forks[self._forks_launched - self._forks_done :]
        return [fork for fork in due if fork is not None]

    @property
    def forks_handed_out(self) -> int:
        """Forks whose copies a plan made now carries, counted from the start."""
        return self._forks_done + len(self._forks)

    def copying(self, forks: int) -> None:
        """The copies of the first `forks` forks, counted from the start, are in flight."""
        self._forks_launched = max(self._forks_launched, forks)

    def copied(self, forks: int) -> None:
        """The copies of the first `forks` forks, counted from the start, are made."""
        if forks > self._forks_done:
            del self._forks[: forks - self._forks_done]
            self._forks_done = forks
            self.copying(forks)

    # --- accounting --------------------------------------------------------------------------

    def stats(self, now: float) -> EngineStats:
        """See `Scheduler.stats`."""
        return self._counters.stats(
            now,
            steps=self.steps,
            running=self.table.running,
            waiting=list(self.queues),
            causes=self.queues.count(self._room() if self._has_row() else -1),
            blocks=self.kv.stats().blocks,
            drafts=None if self._controller is None else self._controller.stats(),
        )

    def release_hooks(self) -> None:
        """Tell the hooks that all rows are free."""
        for row in np.flatnonzero(self.table.state).tolist():
            if self._hooks is not None:
                self._hooks.released(row)

    def admit_hooks(self) -> None:
        """Tell the hooks who has which row."""
        for row in np.flatnonzero(self.table.state).tolist():
            if self._hooks is not None:
                known = self.table.tokens[row, : self.table.length[row]]
                self._hooks.admitted(row, self.table.sequence(row), known)

    # --- inside ------------------------------------------------------------------------------

    def _queue(self, sequence: Sequence) -> None:
        request, root = sequence.request, self._root_key
        cached = request.cache_keys and not request.all_logits
        if root is not None and cached and sequence.keys is None:
            sequence.keys = BlockKeys(root, self.kv.block_tokens)
        self.queues.push(sequence, self._need(sequence), self.steps)

    def _give_back(self, row: int, *, keep_cached: bool) -> None:
        if keep_cached:
            self.bind(row)
        self.kv.release(row, keep_cached)
        if self.table.state[row] == PREFILL:
            self.prefilling.remove(row)
        self.table.close(row)
        # What a row that is gone was to get must not land in the memory of the next one.
        self._forks = [
            None if fork is not None and fork.slots[1] == row else fork for fork in self._forks
        ]
        self.version += 1
        if self._hooks is not None:
            self._hooks.released(row)

    def _release_siblings(self, sequence: Sequence) -> None:
        """Choices that wait for a prompt that is not being computed any longer queue themselves."""
        siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            self.queues.take_sibling(sibling)
            self._queue(sibling)

    def _known_length(self, sequence: Sequence) -> int:
        return int(self.table.length[sequence.row]) if sequence.row else sequence.tokens.size
