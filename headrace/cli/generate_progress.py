"""What a person sees of `headrace generate`, and how Ctrl-C stops it.

Contract: standard output gets answers only; progress, notes and reasoning go to standard error, as
bars where that is a terminal and as plain lines now and then where it is not. The first SIGINT or
SIGTERM asks for a stop between two steps, the second stops at once. Used by `generate_run`.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from headrace.errors import OutputError
from headrace.recipe import TextDelta

PLAIN_INTERVAL_S: Final = 10.0
# Each bad line is in the output with its reason; the screen shows the first ones.
MAX_SHOWN_FAILURES: Final = 20


class GenerateScreen:
    """Progress and counts of one command."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._said_s = clock()
        self._started_s = clock()
        self._reasoning_open = False
        self.total = 0
        self.done = 0
        self.failed = 0
        self._before = 0
        self._tokens = 0

    # --- loading -------------------------------------------------------------------------------

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        """Bytes of weights read so far."""
        if self._console.is_terminal:
            if self._bar is None:
                self._open_bar("loading", total_bytes, DownloadColumn())
            self._advance(done_bytes)
        elif self._due():
            self.note(f"loading: {done_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB")

    def loaded(self) -> None:
        """The model is there."""
        self.close()
        self._started_s = self._said_s = self._clock()
        if self.total and self._console.is_terminal:
            self._open_bar("answers", self.total, MofNCompleteColumn())
            self._advance(self.done)

    # --- a file of prompts ---------------------------------------------------------------------

    def begin(self, total: int, finished: int, failed: int, cut_bytes: int) -> None:
        """The files are open; `finished` of `total` lines are there from an earlier run."""
        self.total, self.done, self.failed, self._before = total, finished, failed, finished
        if cut_bytes:
            self.note(f"an incomplete last line of {cut_bytes} bytes was removed from the output")
        if finished == total:
            self.note(f"nothing to do: all {total} lines are answered ({failed} with an error)")
        elif finished:
            self.note(f"resuming: {finished} of {total} lines are already answered")

    def finished(self, tokens: int) -> None:
        """One more answer is written."""
        self.done += 1
        self._tokens += tokens
        self._show_count()

    def line_failed(self, number: int, message: str) -> None:
        """One more line is answered by an error."""
        self.done += 1
        self.failed += 1
        if self.failed <= MAX_SHOWN_FAILURES:
            self.note(f"line {number}: {message}")
        elif self.failed == MAX_SHOWN_FAILURES + 1:
            self.note("further bad lines are reported in the output only")
        self._show_count()

    def count(self) -> str:
        """How far the run is, as a sentence."""
        errors = f" ({self.failed} with an error)" if self.failed else ""
        return f"{self.done} of {self.total} lines are answered{errors}."

    def summary(self) -> None:
        """The run is complete."""
        self.close()
        elapsed_s = max(self._clock() - self._started_s, 1e-9)
        self.note(
            f"{self.count()} {self.done - self._before} now, {self._tokens} tokens in "
            f"{elapsed_s:.1f} s ({self._tokens / elapsed_s:.1f} tokens/s)"
        )

    def stopping(self) -> None:
        """A signal came."""
        self.note("interrupted, finishing the running step (once more: at once)")

    # --- one prompt ----------------------------------------------------------------------------

    def answer(self, delta: TextDelta) -> None:
        """New text of the one answer: content to standard output, reasoning beside it."""
        if delta.reasoning:
            if not self._reasoning_open:
                sys.stderr.write("thinking: ")
            self._reasoning_open = True
            sys.stderr.write(delta.reasoning)
            sys.stderr.flush()
        if delta.content:
            self._end_reasoning()
            self._print(delta.content)

    def answer_ended(self, by_length: bool) -> None:
        """The one answer is complete."""
        self._end_reasoning()
        self._print("\n")
        if by_length:
            self.note("the answer was cut at its token limit (--max-tokens, or the context)")

    # --- inside --------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """One line on standard error."""
        self._console.print(f"headrace: {text}", markup=False)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _end_reasoning(self) -> None:
        if self._reasoning_open:
            sys.stderr.write("\n\n")
            sys.stderr.flush()
            self._reasoning_open = False

    def _print(self, text: str) -> None:
        try:
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output could not be written: {error.strerror}.") from error

    def _show_count(self) -> None:
        if self._bar is not None:
            self._advance(self.done)
        elif not self._console.is_terminal and self._due():
            elapsed_s = max(self._clock() - self._started_s, 1e-9)
            self.note(f"{self.count()} {self._tokens / elapsed_s:.1f} tokens/s")

    def _due(self) -> bool:
        now_s = self._clock()
        if now_s - self._said_s < PLAIN_INTERVAL_S:
            return False
        self._said_s = now_s
        return True

    def _open_bar(self, name: str, total: int, amount: ProgressColumn) -> None:
        columns = (TextColumn(name), BarColumn(), amount, TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(name, total=total)
        self._bar.start()

    def _advance(self, completed: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=completed)


class StopSignals:
    """While entered, SIGINT and SIGTERM set `requested`; a second one raises KeyboardInterrupt."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._previous: dict[int, object] = {}
        self._signal: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self._signal is not None

    @property
    def exit_code(self) -> int | None:
        """128 + signal number (130 after Ctrl-C); None: no signal came."""
        return None if self._signal is None else 128 + self._signal

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # What signal.signal gave is what it takes, None (not from Python) apart.
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number
        self._on_first()
