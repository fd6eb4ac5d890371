"""Compiling grammars beside the engine loop: threads, a fair queue, memory cache, time limit.

Contract: `open(kind, text)` never waits: it gives a ticket, ready at once where the grammar is in
memory. `settle()` ends the tickets of compilations that are done, and those that have waited too
long, counted from `open`; `close` takes a ticket back. Both are called between steps. Small texts
are compiled first, and a compilation that turns out to be slow leaves its place to others, so that
slow grammars hold up each other only. A compilation cannot be interrupted: after its time its
thread is given up, its grammar is refused for a while, and no new work is taken while MAX_SLOW are
stuck. The vocabulary is prepared in the background from the start. All methods are called by one
thread.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from headrace.core.grammar import GrammarKind
from headrace.engine.grammar.backend import GrammarBackend, MatcherFailed, TokenTable
from headrace.engine.grammar.disk import GrammarDirectory
from headrace.engine.grammar.states import StateGraph
from headrace.errors import HeadraceError, InternalError, InvalidGrammar, Overloaded

MAX_QUEUED = 64  # grammars that wait for a place
# Compilations that have left their place, given up or not; each of them holds a thread.
MAX_SLOW = 4
SLOW_AFTER_S = 1.0
# Characters of a text that is compiled before longer ones.
SMALL_CHARACTERS = 16_384
# How long a grammar that took too long is refused: the machine may have been busy.
REFUSED_S = 600.0
MAX_CACHED_GRAMMARS = 1024
_MAX_CACHED_ERRORS = 256
# Of the memory for masks, what one grammar may use; then it forgets and starts again.
_GRAPH_SHARE = 4
# Measured for llguidance, whose grammars cannot be asked for their size: of any, and by its text.
_COMPILED_BYTES = 200_000
_BYTES_PER_CHARACTER = 40


class GrammarTicket:
    """One request's claim on a compiled grammar: `graph` or `error` once it is `done`.

    deadline_s: on the compiler's clock; then it ends with an error.
    """

    __slots__ = ("deadline_s", "error", "graph")

    def __init__(self, deadline_s: float = math.inf) -> None:
        self.deadline_s = deadline_s
        self.graph: StateGraph | None = None
        self.error: HeadraceError | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self.graph is not None or self.error is not None

    def __deepcopy__(self, memo: object) -> GrammarTicket:
        # Part of a scheduler's snapshot; matchers of a library cannot be copied.
        return self


class _Job:
    """One compilation. slow: it has left its place to others."""

    def __init__(self, kind: GrammarKind, text: str) -> None:
        self.kind = kind
        self.text = text
        self.tickets: list[GrammarTicket] = []
        self.started_s = 0.0
        self.slow = False
        self.graph: StateGraph | None = None
        self.error: HeadraceError | None = None
        self.finished = False


class GrammarCompiler:
    """Compiled grammars of one engine."""

    def __init__(
        self,
        table: Callable[[], TokenTable],
        make_backend: Callable[[TokenTable], GrammarBackend],
        *,
        clock: Callable[[], float],
        cache_bytes: int,
        timeout_s: float,
        threads: int,
        directory: GrammarDirectory | None = None,
    ) -> None:
        """table, make_backend: called once, in a thread of this object.

        cache_bytes: of compiled grammars and their masks. timeout_s: of a ticket, with the wait for
        a place. threads: compilations at once, besides MAX_SLOW slow ones.
        """
        self._make_table, self._make_backend = table, make_backend
        self._clock = clock
        self._cache_bytes = cache_bytes
        self._timeout_s = timeout_s
        self._threads = threads
        self._directory = directory
        # By digest: a text may have a million characters.
        self._graphs: OrderedDict[bytes, tuple[StateGraph, int]] = OrderedDict()  # with fixed bytes
        # With the time until which they hold.
        self._errors: OrderedDict[bytes, tuple[HeadraceError, float]] = OrderedDict()
        self._jobs: dict[bytes, _Job] = {}
        self._queued: list[_Job] = []
        self._running: list[_Job] = []
        # Guards what threads change: `finished` of jobs, `_given_up`.
        self._changed = threading.Condition()
        self._given_up = 0
        self._prepared = threading.Event()
        self._backend: GrammarBackend | None = None
        self._table: TokenTable | None = None
        self._failure: Exception | None = None
        _start(self._prepare, "grammar-vocabulary")

    def check(self, kind: GrammarKind, text: str) -> None:
        """Raise what is known to be wrong with a grammar; nothing is compiled."""
        key = _key(kind, text)
        if key not in self._errors:
            return
        error, until_s = self._errors[key]
        if self._clock() >= until_s:
            del self._errors[key]
            return
        self._errors.move_to_end(key)
        raise type(error)(error.message, param=error.param)

    def open(self, kind: GrammarKind, text: str) -> GrammarTicket:
        """A ticket for a grammar. Raises what is known to be wrong with it, or Overloaded."""
        self.check(kind, text)
        now = self._clock()
        key, ticket = _key(kind, text), GrammarTicket(now + self._timeout_s)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            ticket.graph, _ = self._graphs[key]
            return ticket
        job = self._jobs.get(key)
        if job is None:
            self._check_room()
            job = self._jobs[key] = _Job(kind, text)
            self._queued.append(job)
        job.tickets.append(ticket)
        self._start_queued(now)
        return ticket

    def close(self, ticket: GrammarTicket) -> None:
        """Nobody waits for the ticket any more; what no ticket wants is not compiled."""
        for job in self._jobs.values():
            if ticket in job.tickets:
                job.tickets.remove(ticket)
                break
        self._drop_unwanted()

    def settle(self) -> None:
        """Give tickets their results where compilations have ended or time is over."""
        now = self._clock()
        for job in list(self._running):
            with self._changed:
                age_s = now - job.started_s
                if not job.finished and age_s > self._timeout_s:
                    self._given_up += 1
                    job.finished = True
                    job.error = self._took_too_long(job)
                finished = job.finished
            if finished:
                self._running.remove(job)
                self._keep(job)
            elif age_s > SLOW_AFTER_S and not job.slow:
                job.slow = self._slow() < MAX_SLOW
        for job in self._jobs.values():
            self._end_tickets(job, now)
        self._drop_unwanted()
        self._start_queued(now)

    def wait(self, timeout_s: float) -> None:
        """Wait until a compilation ends, at most so long; returns at once if none runs."""
        with self._changed:
            if self._running and not any(job.finished for job in self._running):
                self._changed.wait(timeout_s)

    # --- inside ------------------------------------------------------------------------------

    def _check_room(self) -> None:
        if self._given_up >= MAX_SLOW:
            raise Overloaded(
                f"{MAX_SLOW} grammars take longer than {self._timeout_s:g} s to compile; no new "
                "grammar is taken until one of them is done.",
                retry_after_s=self._timeout_s,
            )
        if len(self._queued) >= MAX_QUEUED:
            raise Overloaded(
                f"{MAX_QUEUED} grammars wait to be compiled, which is the limit; try again later.",
                retry_after_s=self._timeout_s,
            )

    def _slow(self) -> int:
        """Threads that work for compilations without a place."""
        return self._given_up + sum(job.slow for job in self._running)

    def _took_too_long(self, job: _Job) -> InvalidGrammar:
        return InvalidGrammar(
            f"The {job.kind} grammar took longer than {self._timeout_s:g} s to compile; make it "
            "smaller.",
            param="grammar",
        )

    def _end_tickets(self, job: _Job, now: float) -> None:
        """End the tickets of an unfinished compilation whose time is over."""
        late = [ticket for ticket in job.tickets if now > ticket.deadline_s]
        for ticket in late:
            # Not the grammar's fault, as far as is known: it may be asked for again.
            ticket.error = Overloaded(
                f"The {job.kind} grammar was not compiled within {self._timeout_s:g} s, because "
                "others were before it; try again.",
                retry_after_s=self._timeout_s,
            )
            job.tickets.remove(ticket)

    def _drop_unwanted(self) -> None:
        """Forget what waits for a place and belongs to nobody; what runs cannot be interrupted."""
        for job in [job for job in self._queued if not job.tickets]:
            self._queued.remove(job)
            del self._jobs[_key(job.kind, job.text)]

    def _keep(self, job: _Job) -> None:
        key = _key(job.kind, job.text)
        del self._jobs[key]
        for ticket in job.tickets:
            ticket.graph, ticket.error = job.graph, job.error
        if isinstance(job.error, InvalidGrammar):
            slow = self._clock() - job.started_s > self._timeout_s
            until_s = self._clock() + REFUSED_S if slow else math.inf
            self._errors[key] = job.error, until_s
            if len(self._errors) > _MAX_CACHED_ERRORS:
                self._errors.popitem(last=False)
        if job.graph is not None:
            fixed_bytes = _COMPILED_BYTES + _BYTES_PER_CHARACTER * len(job.text)
            self._graphs[key] = job.graph, fixed_bytes
        graphs = self._graphs
        size = sum(fixed + graph.size_bytes for graph, fixed in graphs.values())
        while graphs and (size > self._cache_bytes or len(graphs) > MAX_CACHED_GRAMMARS):
            _, (oldest, fixed) = graphs.popitem(last=False)
            size -= fixed + oldest.size_bytes

    def _start_queued(self, now: float) -> None:
        while self._queued and sum(not job.slow for job in self._running) < self._threads:
            small = (job for job in self._queued if len(job.text) <= SMALL_CHARACTERS)
            job = next(small, self._queued[0])
            self._queued.remove(job)
            job.started_s = now
            self._running.append(job)
            _start(partial(self._run, job), "grammar-compiler")

    def _prepare(self) -> None:
        try:
            self._table = self._make_table()
            self._backend = self._make_backend(self._table)
        except Exception as error:  # told to every request with a grammar
            self._failure = error
        self._prepared.set()

    def _run(self, job: _Job) -> None:
        """Compile, in a thread."""
        graph: StateGraph | None = None
        error: HeadraceError | None = None
        try:
            graph = self._compile(job.kind, job.text)
        except HeadraceError as caught:
            error = caught
        except MatcherFailed as caught:
            error = InvalidGrammar(
                f"The {job.kind} grammar allows no answer: {caught}.", param="grammar"
            )
        except Exception as caught:  # a bug in a library must not end the engine
            error = InternalError(f"The grammar library failed: {caught}.")
        with self._changed:
            if job.finished:
                self._given_up -= 1  # too late
                return
            job.graph, job.error, job.finished = graph, error, True
            self._changed.notify_all()

    def _compile(self, kind: GrammarKind, text: str) -> StateGraph:
        self._prepared.wait()
        backend, table, directory = self._backend, self._table, self._directory
        if backend is None or table is None:
            raise InternalError(f"The grammar library cannot be used: {self._failure}.")
        grammar = None
        if directory is not None:
            grammar = directory.load(backend, table, kind, text)
        if grammar is None:
            grammar = backend.compile(kind, text)
            if directory is not None:
                directory.store(backend, table, kind, text, grammar)
        graph = StateGraph(grammar, table, self._cache_bytes // _GRAPH_SHARE)
        if not graph.root.mask.any():
            raise InvalidGrammar(
                f"The {kind} grammar allows no answer: no token can begin one.", param="grammar"
            )
        return graph


def _key(kind: GrammarKind, text: str) -> bytes:
    return hashlib.sha256(f"{kind} {text}".encode()).digest()


def _start(target: Callable[[], None], name: str) -> None:
    # Daemons: a compilation that never ends must not keep the process.
    threading.Thread(target=target, name=name, daemon=True).start()
