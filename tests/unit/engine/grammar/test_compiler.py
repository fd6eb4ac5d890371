"""Compilation beside the loop: caches, limits, stuck threads, the directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.grammar import GrammarKind
from headrace.engine.grammar.compiler import MAX_GIVEN_UP, GrammarCompiler, GrammarTicket
from headrace.engine.grammar.disk import GrammarDirectory
from headrace.errors import InternalError, InvalidGrammar, Overloaded
from tests.unit.engine.grammar.grammars import backend, table

REGEX = GrammarKind.REGEX
WAIT_S = 5.0


class FakeBackend:
    """Compiles by llguidance, but waits for `gates[text]` first; can write its grammars."""

    name = "fake 1"

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.compiled: list[str] = []
        self.writes = True

    def compile(self, kind: GrammarKind, text: str) -> Any:
        self.compiled.append(text)
        if text in self.gates:
            assert self.gates[text].wait(WAIT_S)
        if text == "crash":
            raise ZeroDivisionError("a bug")
        return backend().compile(kind, text)

    def serialise(self, grammar: Any) -> bytes | None:
        return self.compiled[-1].encode() if self.writes else None

    def deserialise(self, data: bytes) -> Any:
        if data == b"damaged":
            raise ValueError("not mine")
        return backend().compile(REGEX, data.decode())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(library: Any, clock: Callable[[], float] | None = None, **changes: Any) -> GrammarCompiler:
    settings: dict[str, Any] = {"cache_bytes": 10**9, "timeout_s": 20.0, "threads": 2}
    return GrammarCompiler(table, lambda _: library, clock=clock or Clock(), **(settings | changes))


def settle(compiler: GrammarCompiler, *tickets: GrammarTicket) -> None:
    """Wait until the tickets are done."""
    for _ in range(500):
        compiler.settle()
        if all(ticket.done for ticket in tickets):
            return
        compiler.wait(0.01)
    raise AssertionError("not compiled in time")


def test_a_grammar_is_compiled_once_and_then_ready_at_once() -> None:
    library = FakeBackend()
    compiler = make(library)
    first, second = compiler.open(REGEX, "a+"), compiler.open(REGEX, "a+")
    settle(compiler, first, second)
    assert first.graph is second.graph is compiler.open(REGEX, "a+").graph is not None
    assert library.compiled == ["a+"]


def test_what_cannot_be_compiled_says_so_to_all_that_wait_and_at_once_afterwards() -> None:
    compiler = make(FakeBackend())
    first, second = compiler.open(REGEX, "(a"), compiler.open(REGEX, "(a")
    settle(compiler, first, second)
    for error in (first.error, second.error):
        assert isinstance(error, InvalidGrammar)
        assert "unclosed group" in str(error)
    with pytest.raises(InvalidGrammar, match="unclosed group"):
        compiler.open(REGEX, "(a")


def test_a_slow_grammar_holds_up_nobody_and_ends_at_its_limit() -> None:
    library, clock = FakeBackend(), Clock()
    library.gates["slow"] = threading.Event()
    compiler = make(library, clock, threads=1)
    slow, quick = compiler.open(REGEX, "slow"), compiler.open(REGEX, "quick")
    compiler.settle()
    assert not slow.done
    assert not quick.done  # one thread
    clock.now += 20.5
    settle(compiler, slow, quick)
    assert isinstance(slow.error, InvalidGrammar)
    assert "longer than 20 s" in str(slow.error)
    assert quick.graph is not None
    library.gates["slow"].set()


def test_two_threads_compile_at_once() -> None:
    library = FakeBackend()
    library.gates["slow"] = threading.Event()
    compiler = make(library)
    slow, quick = compiler.open(REGEX, "slow"), compiler.open(REGEX, "quick")
    settle(compiler, quick)
    assert not slow.done
    library.gates["slow"].set()
    settle(compiler, slow)
    assert slow.graph is not None


def test_stuck_threads_are_bounded_and_come_back() -> None:
    library, clock = FakeBackend(), Clock()
    compiler = make(library, clock)
    stuck = [f"stuck{number}" for number in range(MAX_GIVEN_UP)]
    for text in stuck:
        library.gates[text] = threading.Event()
        ticket = compiler.open(REGEX, text)
        clock.now += 30
        compiler.settle()
        assert ticket.done
    with pytest.raises(Overloaded, match="take longer"):
        compiler.open(REGEX, "other")
    for text in stuck:
        library.gates[text].set()
    for _ in range(500):
        try:
            other = compiler.open(REGEX, "other")
            break
        except Overloaded:
            threading.Event().wait(0.01)
    settle(compiler, other)
    assert other.graph is not None


def test_a_bug_of_the_library_is_an_internal_error_of_that_request() -> None:
    compiler = make(FakeBackend())
    bad, good = compiler.open(REGEX, "crash"), compiler.open(REGEX, "a")
    settle(compiler, bad, good)
    assert isinstance(bad.error, InternalError)
    assert good.graph is not None
    again = compiler.open(REGEX, "crash")  # not remembered: it may have been the memory
    settle(compiler, again)


def test_a_library_that_cannot_be_used_is_told_to_each_request() -> None:
    def broken(_: object) -> Any:
        raise OSError("no such library")

    compiler = GrammarCompiler(
        table, broken, clock=Clock(), cache_bytes=0, timeout_s=1.0, threads=1
    )
    ticket = compiler.open(REGEX, "a")
    settle(compiler, ticket)
    assert isinstance(ticket.error, InternalError)
    assert "no such library" in str(ticket.error)


def test_the_oldest_grammars_leave_a_full_cache() -> None:
    library = FakeBackend()
    compiler = make(library, cache_bytes=450_000)  # room for two
    for text in ("a", "b", "a", "c", "a", "b"):
        settle(compiler, compiler.open(REGEX, text))
    assert library.compiled == ["a", "b", "c", "b"]


def test_no_cache_compiles_each_time_and_still_serves() -> None:
    library = FakeBackend()
    compiler = make(library, cache_bytes=0)
    for _ in range(2):
        ticket = compiler.open(REGEX, "a")
        settle(compiler, ticket)
        assert ticket.graph is not None
    assert library.compiled == ["a", "a"]


# --- directory -----------------------------------------------------------------------------------


def in_directory(library: FakeBackend, path: Path, text: str, max_bytes: int = 10**6) -> None:
    compiler = make(library, directory=GrammarDirectory(path, max_bytes))
    ticket = compiler.open(REGEX, text)
    settle(compiler, ticket)
    assert ticket.graph is not None


def test_a_directory_spares_the_next_start_the_work(tmp_path: Path) -> None:
    library = FakeBackend()
    in_directory(library, tmp_path / "cache", "a+")
    in_directory(library, tmp_path / "cache", "a+")
    assert library.compiled == ["a+"]
    library.name = "fake 2"
    in_directory(library, tmp_path / "cache", "a+")
    assert library.compiled == ["a+", "a+"]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_damaged_or_unwritable_directory_costs_time_only(tmp_path: Path) -> None:
    library = FakeBackend()
    in_directory(library, tmp_path, "a+")
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"damaged")
    in_directory(library, tmp_path, "a+")
    assert file.read_bytes() == b"a+"
    in_directory(library, file / "below-a-file", "b")
    assert library.compiled == ["a+", "a+", "b"]


def test_a_directory_stays_within_its_limit(tmp_path: Path) -> None:
    library = FakeBackend()
    for text in ("aaa", "bbb", "ccc"):
        in_directory(library, tmp_path, text, max_bytes=7)
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) in (
        [b"bbb", b"ccc"],
        [b"aaa", b"ccc"],  # files of the same instant
    )


def test_a_library_that_cannot_write_its_grammars_leaves_the_directory_empty(
    tmp_path: Path,
) -> None:
    library = FakeBackend()
    library.writes = False
    in_directory(library, tmp_path, "a+")
    assert list(tmp_path.iterdir()) == []
    assert backend().serialise(None) is None
