"""Entry point of the `headrace` command.

Contract: registers every command by its import path (nothing is imported before it is used), runs
one, and is the only place where errors become `error: ...` on stderr and an exit code: 0 ok, 1 a
check failed, 2 bad usage, config or request, 3 checkpoint or unsupported, 4 output could not be
written, 130 Ctrl-C, 141 the reader of our output went away. Anything else is a bug and keeps its
traceback. Heavy imports, cyclopts too, happen inside functions, where Ctrl-C is caught. To add a
command, write a function in `cli/<name>.py` and list it here.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
# A full disk or quota is nobody's bug, wherever it is met.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_HELP = """Inference for DeepSeek-V4.1-Flash and the V4 family.

A model is a directory in the official layout: config.json, tokenizer.json, *.safetensors.

Try it without a download, with the small model that comes along:

```
headrace chat
headrace serve
headrace generate tiny "What is 27 + 58?"
```

With a model of your own: `headrace serve my-model`.

Every command explains itself: `headrace serve --help`.
Exit codes: 0 ok, 1 a check failed, 2 bad usage, config or request, 3 bad checkpoint or
unsupported, 4 output could not be written, 130 interrupted.
"""


# No dataclass: this module must be there before anybody can press Ctrl-C.
class _Command(NamedTuple):
    """path: words after `headrace`. target: import path. summary: its line in the overview."""

    path: tuple[str, ...]
    target: str
    summary: str


_COMMANDS = (
    _Command(
        ("serve",),
        "headrace.cli.serve:command",
        "Serve a model over HTTP (Chat Completions, Responses and Messages).",
    ),
    _Command(
        ("generate",),
        "headrace.cli.generate:command",
        "Complete one prompt, or a JSONL file of prompts, without a server.",
    ),
    _Command(
        ("chat",),
        "headrace.cli.chat:command",
        "Talk to a model in the terminal.",
    ),
    _Command(
        ("tiny",),
        "headrace.cli.tiny:command",
        "Write a tiny random checkpoint in the official layout.",
    ),
    _Command(
        ("check", "model"),
        "headrace.cli.check:command",
        "Compare the model's arithmetic with golden cases, number by number.",
    ),
    _Command(
        ("check", "recipe"),
        "headrace.cli.check_recipe:command",
        "Compare the token codec with golden cases, byte by byte.",
    ),
    _Command(
        ("recipe", "render"),
        "headrace.cli.recipe:render",
        "Show the prompt of a request as text.",
    ),
    _Command(
        ("recipe", "encode"),
        "headrace.cli.recipe:encode",
        "Show the token ids of a request's prompt.",
    ),
    _Command(
        ("recipe", "count"),
        "headrace.cli.recipe:count",
        "Count the prompt tokens of a request, images included.",
    ),
    _Command(
        ("recipe", "decode"),
        "headrace.cli.recipe:decode",
        "Turn a model's output (ids, text or chunks) into a response or its events.",
    ),
    _Command(
        ("eval", "tiny"),
        "headrace.cli.eval:command",
        "Ask the embedded model tasks with known answers and print the table.",
    ),
    _Command(
        ("plan", "memory"),
        "headrace.cli.plan:memory",
        "Say what fits on some GPUs: weights, KV cache, tokens, requests.",
    ),
    _Command(
        ("ops",),
        "headrace.cli.ops:command",
        "Show which implementation each operator uses, and why not the others.",
    ),
)

_GROUPS = {
    "check": "Check golden cases.",
    "eval": "Measure what a model can do.",
    "plan": "Plan machines for a model.",
    "recipe": "The token codec alone: requests to prompts and ids, outputs to responses.",
}


def build_app(arguments: Sequence[str]) -> App:
    """The command tree for `arguments`.

    A summary given here replaces the docstring of the command, and asking for the docstring imports
    its module. So only the command that is being called is registered without a summary.
    """
    from cyclopts import App

    from headrace import __version__

    app = App(
        name="headrace",
        help=_HELP,
        version=__version__,
        help_format="markdown",
        suppress_keyboard_interrupt=False,
    )
    groups = {name: App(name=name, help=summary) for name, summary in _GROUPS.items()}
    for group in groups.values():
        app.command(group)
    for entry in _COMMANDS:
        parent = groups[entry.path[0]] if len(entry.path) > 1 else app
        if tuple(arguments[: len(entry.path)]) == entry.path:
            parent.command(entry.target, name=entry.path[-1])
        else:
            parent.command(entry.target, name=entry.path[-1], help=entry.summary)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; raises what the command raises."""
    app = build_app(arguments)
    result = app(
        list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
    )
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: that of the process) and exit with its code."""
    sys.exit(_exit_code(sys.argv[1:] if arguments is None else arguments))


class _Interrupts:
    """While entered: the first Ctrl-C raises KeyboardInterrupt, the next one ends the process.

    After the first one it stays so: the interpreter's own end prints tracebacks when interrupted.
    """

    def __init__(self) -> None:
        self.came = False
        # Another handler, or SIG_IGN of a background job, is not ours to change.
        self._ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> _Interrupts:
        if self._ours:
            try:
                signal.signal(signal.SIGINT, self._first)
            except ValueError:  # not the main thread, which alone has signals
                self._ours = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours and not self.came:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _first(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._next)
        self.came = True
        raise KeyboardInterrupt

    def _next(self, number: int, frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)


def _exit_code(arguments: Sequence[str]) -> int:
    with _Interrupts() as interrupts:
        try:
            return _guarded(arguments)
        except KeyboardInterrupt:
            pass
        except Exception:
            # A library may turn an interrupt of its import into an error of its own.
            if not interrupts.came:
                raise
        _report("interrupted.")
        if interrupts.came:
            # The interpreter's own end takes long after torch, and a signal in it has no handler.
            _settle_output()
            os._exit(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED


def _guarded(arguments: Sequence[str]) -> int:
    """`run`, with errors as text and exit code."""
    from cyclopts import CycloptsError

    from headrace.errors import HeadraceError, OutputError

    try:
        return run(arguments)
    except HeadraceError as error:
        _settle_output()
        _report(error.message)
        return error.exit_code
    except CycloptsError as error:
        words = " ".join(["headrace", *(error.command_chain or ())])
        _report(f"{_usage_text(error, arguments)}\nSee `{words} --help`.")
        return EXIT_USAGE
    except BrokenPipeError:
        _settle_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        _settle_output()
        _report(f"output could not be written: {error.strerror}.")
        return OutputError.exit_code


def _usage_text(error: CycloptsError, arguments: Sequence[str]) -> str:
    """What was wrong with the arguments, without importing all commands to say it."""
    import difflib

    from cyclopts import UnknownCommandError

    if not isinstance(error, UnknownCommandError):
        return str(error).rstrip()
    word = error.unused_tokens[0] if error.unused_tokens else arguments[0]
    # Only what can stand at this place: the commands, or those of the group that was named.
    group = tuple(error.command_chain or ())
    depth = len(group)
    known = sorted(
        {e.path[depth] for e in _COMMANDS if e.path[:depth] == group and e.path != group}
    )
    if not known:
        return str(error).rstrip()
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
    return f"unknown command {word!r}. {hint}"


def _report(message: str) -> None:
    """One error on stderr; rich is not used, so that logs and pipes get plain text."""
    print(f"error: {message}", file=sys.stderr)


def _settle_output() -> None:
    """Write what stdout still holds, or drop it: the interpreter would fail again at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


if __name__ == "__main__":
    main()
