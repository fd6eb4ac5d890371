"""Compiling grammars beside the engine loop: threads, memory cache, time limit.

Contract: `open(kind, text)` never waits: it gives a ticket, ready at once where the grammar is in
memory. `settle(now)` ends the tickets of compilations that are done or have taken too long; it is
called between steps. A compilation cannot be interrupted: after its time its thread is given up,
another one takes its place, and no new work is taken while MAX_GIVEN_UP are stuck. The vocabulary
is prepared in the background from the start. All methods are called by one thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

from headrace.core.grammar import GrammarKind
from headrace.engine.grammar.backend import GrammarBackend, MatcherFailed, TokenTable
from headrace.engine.grammar.disk import GrammarDirectory
from headrace.engine.grammar.states import StateGraph
from headrace.errors import HeadraceError, InternalError, InvalidGrammar, Overloaded

MAX_GIVEN_UP = 4
MAX_CACHED_GRAMMARS = 1024
_MAX_CACHED_ERRORS = 256
# Of the memory for masks, what one grammar may use; then it forgets and starts again.
_GRAPH_SHARE = 4
# Measured for llguidance, whose grammars cannot be asked for their size: of any, and by its text.
_COMPILED_BYTES = 200_000
_BYTES_PER_CHARACTER = 40


class GrammarTicket:
    """One request's claim on a compiled grammar: `graph` or `error` once it is `done`."""

    __slots__ = ("error", "graph")

    def __init__(self) -> None:
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
    """One compilation."""

    def __init__(self, kind: GrammarKind, text: str) -> None:
        self.kind = kind
        self.text = text
        self.tickets: list[GrammarTicket] = []
        self.started_s = 0.0
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

        cache_bytes: of compiled grammars and their masks. timeout_s: of one compilation. threads:
        compilations at once.
        """
        self._make_table, self._make_backend = table, make_backend
        self._clock = clock
        self._cache_bytes = cache_bytes
        self._timeout_s = timeout_s
        self._threads = threads
        self._directory = directory
        # By digest: a text may have a million characters.
        self._graphs: OrderedDict[bytes, tuple[StateGraph, int]] = OrderedDict()  # with fixed bytes
        self._errors: OrderedDict[bytes, HeadraceError] = OrderedDict()
        self._jobs: dict[bytes, _Job] = {}
        self._queued: deque[_Job] = deque()
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
        error = self._errors.get(key)
        if error is not None:
            self._errors.move_to_end(key)
            raise type(error)(error.message, param=error.param)

    def open(self, kind: GrammarKind, text: str) -> GrammarTicket:
        """A ticket for a grammar. Raises what is known to be wrong with it, or Overloaded."""
        self.check(kind, text)
        key, ticket = _key(kind, text), GrammarTicket()
        if key in self._graphs:
            self._graphs.move_to_end(key)
            ticket.graph, _ = self._graphs[key]
            return ticket
        job = self._jobs.get(key)
        if job is None:
            if self._given_up >= MAX_GIVEN_UP:
                raise Overloaded(
                    f"{MAX_GIVEN_UP} grammars take longer than {self._timeout_s:g} s to compile; "
                    "no new grammar is taken until one of them is done.",
                    retry_after_s=self._timeout_s,
                )
            job = self._jobs[key] = _Job(kind, text)
            self._queued.append(job)
        job.tickets.append(ticket)
        self._start_queued()
        return ticket

    def settle(self) -> None:
        """Give their results to the tickets of all compilations that have ended."""
        if not self._running:
            return
        now = self._clock()
        for job in list(self._running):
            with self._changed:
                if not job.finished:
                    if now - job.started_s <= self._timeout_s:
                        continue
                    self._given_up += 1
                    job.finished = True
                    job.error = InvalidGrammar(
                        f"The {job.kind} grammar took longer than {self._timeout_s:g} s to "
                        "compile; make it smaller.",
                        param="grammar",
                    )
            self._running.remove(job)
            self._keep(job)
        self._start_queued()

    def wait(self, timeout_s: float) -> None:
        """Wait until a compilation ends, at most so long; returns at once if none runs."""
        with self._changed:
            if self._running and not any(job.finished for job in self._running):
                self._changed.wait(timeout_s)

    # --- inside ------------------------------------------------------------------------------

    def _keep(self, job: _Job) -> None:
        key = _key(job.kind, job.text)
        del self._jobs[key]
        for ticket in job.tickets:
            ticket.graph, ticket.error = job.graph, job.error
        if isinstance(job.error, InvalidGrammar):
            self._errors[key] = job.error
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

    def _start_queued(self) -> None:
        while self._queued and len(self._running) < self._threads:
            job = self._queued.popleft()
            job.started_s = self._clock()
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
