"""What a person sees of `headrace chat`, and what its Ctrl-C does.

Contract: on a terminal thoughts are dimmed, calls are shown as indented JSON, and control
characters of a model's text never reach the terminal. Without one, standard output gets the answers
only. White space around thoughts and answers (models write empty lines before their calls) is not
shown. Used by `chat_session`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from rich.console import Console

PROMPT = "> "
# All control characters but tab and newline: a model must not move the cursor or retitle windows.
_SHOWN = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


class ChatScreen:
    """Reads lines and shows answers. interactive: whether both ends are a terminal."""

    def __init__(self, interactive: bool | None = None) -> None:
        if interactive is None:
            interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.interactive = interactive
        self._out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._in_thought = False
        self._spaces = ""  # white space that is shown once something visible follows
        self._line_open = False  # whether the answer has shown anything since its last line ended

    def lines(self) -> Iterator[str]:
        """Lines of the user until the end of input; empty ones are left out."""
        if self.interactive:
            _enable_editing()
        while True:
            try:
                line = input(PROMPT) if self.interactive else next(sys.stdin)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self._out.print("\n(Ctrl-D or /exit leaves)", style="dim")
                continue
            except (EOFError, StopIteration):
                if self.interactive:
                    self._out.print()
                return
            if line.strip():
                yield line.strip()

    def note(self, text: str) -> None:
        """A remark of the program, not of the model."""
        if self.interactive:
            self._out.print(text, style="dim")
        else:
            self._err.print(f"headrace: {text}")

    def thought(self, text: str) -> None:
        """New text of the reasoning."""
        if not text:
            return
        text = self._visible(text, self._in_thought)
        if not text:
            return
        self._in_thought = True
        if self.interactive:
            self._out.print(text.translate(_SHOWN), style="dim", end="")
        else:
            sys.stderr.write(text)
            sys.stderr.flush()

    def content(self, text: str) -> None:
        """New text of the answer."""
        if not text:
            return  # a chunk of the reasoning, whose spaces are still to come
        if text.strip():
            self._end_thought()
        text = self._visible(text, self._line_open)
        if text:
            self._line_open = True
            self._write(text)

    def _visible(self, text: str, begun: bool) -> str:
        """What of `text` is shown now: leading space never, trailing space with what follows it."""
        text = self._spaces + text
        shown = text.rstrip()
        if not shown:
            self._spaces = text if begun else ""
            return ""
        self._spaces = text[len(shown) :]
        return shown if begun else shown.lstrip()

    def _write(self, text: str) -> None:
        if self.interactive:
            self._out.print(text.translate(_SHOWN), end="")
        else:
            sys.stdout.write(text.encode("utf-8", "replace").decode("utf-8"))
            sys.stdout.flush()

    def call(self, name: str, arguments: str) -> None:
        """One tool call: on a terminal over several lines, else as one line of JSON."""
        self._end_thought()
        try:
            value = json.loads(arguments)
        except ValueError:
            value = arguments
        if not self.interactive:
            self._write(json.dumps({"call": name, "arguments": value}, ensure_ascii=False) + "\n")
            return
        self._out.print(f"call {name.translate(_SHOWN)}", style="bold")
        shown = json.dumps(value, indent=2, ensure_ascii=False)
        self._out.print("\n".join(f"  {line}" for line in shown.translate(_SHOWN).split("\n")))

    def answer_ended(self) -> None:
        """The text of the answer is complete; calls follow on lines of their own."""
        self._end_thought()
        self._spaces = ""
        if self._line_open:
            self._line_open = False
            self._write("\n")

    def _end_thought(self) -> None:
        """A thought and what comes after it are an empty line apart."""
        if self._in_thought:
            self._in_thought = False
            self._spaces = ""
            if self.interactive:
                self._out.print("\n")
            else:
                sys.stderr.write("\n")
                sys.stderr.flush()


class AnswerInterrupts:
    """Ctrl-C of a chat: a KeyboardInterrupt at the prompt, a request to stop during an answer.

    The engine is never interrupted inside a step: the answer ends after the running one.
    """

    def __init__(self, active: bool) -> None:
        # SIG_IGN of a background job is not ours to change.
        self._active = active and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        self._answering = False
        self.requested = False

    def __enter__(self) -> AnswerInterrupts:
        if self._active:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous)

    def begin(self) -> None:
        """An answer begins."""
        self._answering, self.requested = True, False

    def end(self) -> None:
        """It has ended."""
        self._answering = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._answering:
            raise KeyboardInterrupt
        self.requested = True


def _enable_editing() -> None:
    """Arrow keys and history at the prompt, where Python has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
