"""Compilation beside the loop: caches, limits, stuck threads, the directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.engine.grammar import service
from headrace.engine.grammar.compiler import (
    MAX_QUEUED,
    MAX_SLOW,
    REFUSED_S,
    SLOW_AFTER_S,
    SMALL_CHARACTERS,
    GrammarCompiler,
    GrammarTicket,
)
from headrace.engine.grammar.disk import GrammarDirectory
from headrace.engine.grammar.service import GrammarService
from headrace.errors import InternalError, InvalidGrammar, Overloaded
from tests.unit.engine.grammar.grammars import EOS, VOCAB, backend, table, tokenizer

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


def slow_library(*texts: str) -> FakeBackend:
    """Compiles these texts only when their gates are opened."""
    library = FakeBackend()
    library.gates = {text: threading.Event() for text in texts}
    return library


def test_a_slow_grammar_leaves_its_place_and_ends_at_its_limit() -> None:
    library, clock = slow_library("slow"), Clock()
    compiler = make(library, clock, threads=1)
    slow, quick = compiler.open(REGEX, "slow"), compiler.open(REGEX, "quick")
    compiler.settle()
    assert not slow.done
    assert not quick.done  # one thread
    clock.now += SLOW_AFTER_S + 0.1
    settle(compiler, quick)
    assert quick.graph is not None
    clock.now += 20.5
    settle(compiler, slow)
    assert isinstance(slow.error, InvalidGrammar)
    assert "longer than 20 s" in str(slow.error)
    # Refused for a while, then tried again.
    with pytest.raises(InvalidGrammar, match="longer than 20 s"):
        compiler.open(REGEX, "slow")
    library.gates["slow"].set()
    clock.now += REFUSED_S
    again = compiler.open(REGEX, "slow")
    settle(compiler, again)
    assert again.graph is not None


def test_the_time_of_a_ticket_counts_from_its_arrival() -> None:
    texts = [f"slow{number}" for number in range(MAX_SLOW + 1)]
    library, clock = slow_library(*texts), Clock()
    compiler = make(library, clock, threads=1)
    for text in texts:  # all places are taken, also those of slow ones
        clock.now += SLOW_AFTER_S + 0.1
        compiler.settle()
        compiler.open(REGEX, text)
    clock.now += 5.0
    late = compiler.open(REGEX, "late")
    compiler.settle()
    assert "late" not in library.compiled
    clock.now += 10.5
    compiler.settle()
    assert not late.done
    library.gates[texts[-1]].set()
    settle(compiler, late)
    assert late.graph is not None


def test_a_grammar_that_never_got_a_place_is_not_blamed() -> None:
    texts = [f"slow{number}" for number in range(MAX_SLOW + 1)]
    library, clock = slow_library(*texts), Clock()
    compiler = make(library, clock, threads=1)
    waiting = compiler.open(REGEX, "other")
    settle(compiler, waiting)
    waiting = compiler.open(REGEX, texts[0])
    for text in texts[1:]:
        clock.now += SLOW_AFTER_S + 0.1
        compiler.settle()
        compiler.open(REGEX, text)
    late = compiler.open(REGEX, "late")
    # The first threads are given up, and yet hold their places.
    clock.now += 20.1
    compiler.settle()
    assert isinstance(waiting.error, InvalidGrammar)
    assert isinstance(late.error, Overloaded)
    assert "because others were before it" in str(late.error)
    assert late.error.retry_after_s == 20.0
    for gate in library.gates.values():
        gate.set()
    for _ in range(500):
        try:
            late = compiler.open(REGEX, "late")  # not remembered as bad
            break
        except Overloaded:
            threading.Event().wait(0.01)
    settle(compiler, late)
    assert late.graph is not None


def test_small_grammars_are_compiled_before_large_ones() -> None:
    library = slow_library("first")
    compiler = make(library, threads=1)
    large = "(a" + "b" * SMALL_CHARACTERS + ")"
    tickets = [compiler.open(REGEX, text) for text in ("first", large, "small", "tiny")]
    library.gates["first"].set()
    settle(compiler, *tickets)
    assert library.compiled == ["first", "small", "tiny", large]


def test_the_queue_is_bounded() -> None:
    library = slow_library("slow")
    compiler = make(library, threads=1)
    compiler.open(REGEX, "slow")
    for number in range(MAX_QUEUED):
        compiler.open(REGEX, f"a{number}")
    with pytest.raises(Overloaded, match=f"{MAX_QUEUED} grammars wait") as caught:
        compiler.open(REGEX, "one more")
    assert caught.value.retry_after_s is not None
    same = compiler.open(REGEX, "a0")  # waits already
    library.gates["slow"].set()
    settle(compiler, same)
    assert same.graph is not None


def test_what_nobody_waits_for_any_more_is_not_compiled() -> None:
    library = slow_library("slow")
    compiler = make(library, threads=1)
    slow = compiler.open(REGEX, "slow")
    one, other = compiler.open(REGEX, "shared"), compiler.open(REGEX, "shared")
    gone, last = compiler.open(REGEX, "gone"), compiler.open(REGEX, "last")
    compiler.close(gone)
    compiler.close(one)
    compiler.close(slow)  # runs, and cannot be interrupted
    library.gates["slow"].set()
    settle(compiler, other, last)
    assert library.compiled == ["slow", "shared", "last"]
    assert not slow.done and not one.done and not gone.done
    assert compiler.open(REGEX, "slow").graph is not None  # its result is kept
    again = compiler.open(REGEX, "gone")
    settle(compiler, again)
    assert again.graph is not None


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
    stuck = [f"stuck{number}" for number in range(MAX_SLOW)]
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


def test_a_request_that_ends_takes_its_grammar_out_of_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = slow_library("slow")
    monkeypatch.setattr(service, "_backend", lambda _: lambda _: library)
    config = EngineConfig(grammar_threads=1)
    grammars = GrammarService(config, tokenizer(), vocab_size=VOCAB, eos_id=EOS, clock=Clock())
    for name in ("slow", "gone", "last"):
        ticket = grammars.open(GrammarSpec(REGEX, name))
        assert ticket is not None
        grammars.hold(name, ticket)
    grammars.drop("gone")
    grammars.drop("unknown")
    library.gates["slow"].set()
    ended: list[str] = []
    for _ in range(500):
        ended += [name for name, _ in grammars.settle(0.01)]
        if len(ended) == 2:
            break
    assert ended == library.compiled == ["slow", "last"]


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
