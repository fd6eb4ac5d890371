"""The engine's side of the engine process: receive commands, step the engine, send outputs.

Contract: `main` is the child process. It never outlives its parent (a lifeline pipe, and on Linux a
parent-death signal), ignores SIGINT and SIGTERM because the parent decides when running requests
have finished, and writes only logs (stderr). Memory stays bounded: commands that are not yet
handled and outputs that the parent has not read stay in the kernel's socket buffers, and a full
buffer makes the writer wait. Started by `engine/child.py`; talks in the messages of `wire.py`.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from headrace.config import EngineConfig
from headrace.core.protocols import Tokenizer
from headrace.core.request import Request
from headrace.engine import wire
from headrace.engine.outputs import StepOutput
from headrace.engine.stats import EngineStats
from headrace.engine.wire import EngineInfo
from headrace.errors import ConfigError, HeadraceError

DEFAULT_FACTORY: Final = "headrace.engine.host:load_engine"
EXIT_CRASHED: Final = 70
EXIT_ORPHANED: Final = 71
# Handled between two steps, so that a flood of requests cannot hold up the running ones.
MAX_COMMANDS_PER_STEP: Final = 64
PROGRESS_INTERVAL_S: Final = 0.1
_RECEIVE_BYTES: Final = 2**18
_PR_SET_PDEATHSIG: Final = 1

ProgressCallback = Callable[[int, int], None]


class EngineLike(Protocol):
    """What the host needs of an engine; `engine.Engine` has it."""

    def add(self, request: Request) -> int:
        """Take a request; its number in outputs. Raises a HeadraceError to refuse it."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; an unknown id is ignored."""
        ...

    def step(self) -> StepOutput:
        """One engine step."""
        ...

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def stats(self) -> EngineStats:
        """Counters."""
        ...


# (checkpoint, config, progress) -> engine and what it says about itself
EngineFactory = Callable[[Path, EngineConfig, ProgressCallback], tuple[EngineLike, EngineInfo]]


class CommandChannel:
    """Frames over the inherited socket, without blocking unless asked to."""

    def __init__(self, connection: socket.socket, send_timeout_s: float = 60.0) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._received = bytearray()
        self.send_timeout_s = send_timeout_s

    def poll(self, timeout_s: float, limit: int = MAX_COMMANDS_PER_STEP) -> list[wire.Command]:
        """Commands that are there, at most `limit`; waits up to `timeout_s` for the first.

        Raises BrokenChannel when the parent has closed its end.
        """
        commands = self._parse(limit)
        if commands:
            return commands
        if timeout_s > 0:
            select.select([self._connection], [], [], timeout_s)
        while len(commands) < limit and self._receive():
            commands += self._parse(limit - len(commands))
        return commands

    def send(self, event: wire.Event) -> None:
        """Write an event; a parent that does not read makes this wait.

        Raises BrokenChannel when the parent is gone or reads nothing for `send_timeout_s`.
        """
        rest = memoryview(wire.encode_frame(event))
        deadline_s = time.monotonic() + self.send_timeout_s
        while rest:
            try:
                sent = self._connection.send(rest)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise wire.BrokenChannel(
                        f"the parent has read nothing for {self.send_timeout_s:g} s"
                    ) from None
                select.select([], [self._connection], [], 1.0)
                continue
            except OSError as error:
                raise wire.BrokenChannel(f"cannot send: {error}") from error
            rest = rest[sent:]
            deadline_s = time.monotonic() + self.send_timeout_s

    def _receive(self) -> bool:
        """Read what is there into the buffer; False: nothing is."""
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise wire.BrokenChannel(f"cannot receive: {error}") from error
        if not data:
            raise wire.BrokenChannel("the parent has closed the channel")
        self._received += data
        return True

    def _parse(self, limit: int) -> list[wire.Command]:
        commands: list[wire.Command] = []
        start = 0
        while len(commands) < limit and len(self._received) - start >= wire.HEADER_BYTES:
            body = start + wire.HEADER_BYTES
            end = body + wire.body_length(bytes(self._received[start:body]))
            if len(self._received) < end:
                break
            commands.append(wire.decode_command(bytes(self._received[body:end])))
            start = end
        if start:
            del self._received[:start]
        return commands


class EngineHost:
    """Runs one loaded engine until the parent says Shutdown."""

    def __init__(
        self,
        engine: EngineLike,
        channel: CommandChannel,
        *,
        heartbeat_s: float,
        step_warning_s: float,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._heartbeat_s = heartbeat_s
        self._step_warning_s = step_warning_s
        self._log = structlog.get_logger("headrace.engine")
        self._stats_due_s = 0.0
        self._was_busy = False

    def run(self) -> None:
        """Loop: commands, step, output. Whatever `step` raises ends the loop."""
        while True:
            busy = self._engine.has_work()
            for command in self._channel.poll(0.0 if busy else self._heartbeat_s):
                if isinstance(command, wire.Shutdown):
                    return
                self._handle(command)
            if self._engine.has_work():
                self._step()
            self._send_stats()

    def _handle(self, command: wire.Command) -> None:
        if isinstance(command, wire.Abort):
            self._engine.abort(command.request_id)
        elif isinstance(command, wire.Submit):
            request_id = command.request.request_id
            try:
                wire.check_answer_fits(command.request)
                number = self._engine.add(command.request)
            except HeadraceError as error:
                self._channel.send(
                    wire.Refused(
                        request_id, error.code, error.message, error.param, error.retry_after_s
                    )
                )
            else:
                self._channel.send(wire.Accepted(request_id, number))

    def _step(self) -> None:
        start_s = time.monotonic()
        output = self._engine.step()
        step_s = time.monotonic() - start_s
        if step_s > self._step_warning_s:
            self._log.warning("slow step", step_s=round(step_s, 3), limit_s=self._step_warning_s)
        if len(output):
            self._channel.send(wire.pack_output(output))

    def _send_stats(self) -> None:
        # Also when the last request has ended, so that an idle engine does not look busy.
        busy = self._engine.has_work()
        now_s = time.monotonic()
        if now_s < self._stats_due_s and busy == self._was_busy:
            return
        self._was_busy = busy
        self._stats_due_s = now_s + self._heartbeat_s
        self._channel.send(wire.StatsReply(self._engine.stats()))


def load_engine(
    checkpoint: Path,
    config: EngineConfig,
    progress: ProgressCallback,
    tokenizer: Tokenizer | None = None,
) -> tuple[EngineLike, EngineInfo]:
    """The default factory: the checkpoint's model in an `Engine`.

    tokenizer: for stop strings; a factory of a higher layer gives it (`cli/serve_engine.py`).
    Raises CheckpointError, ModelConfigError, UnsupportedError, ConfigError.
    """
    # Imported here: torch takes seconds, and engines with their own factory need none.
    from headrace.engine.load import load_engine as load
    from headrace.model.spec import ModelSpec

    start_s = time.monotonic()
    spec = ModelSpec.from_directory(checkpoint)
    engine = load(checkpoint, config, tokenizer=tokenizer, progress=progress)
    info = EngineInfo(
        model_name=config.served_model_name or checkpoint.resolve().name,
        architecture=spec.architecture,
        dtype=engine.config.dtype or "float32",
        vocab_size=spec.vocab_size,
        max_model_len=engine.max_model_len,
        eos_token_id=spec.eos_id,
        load_time_s=time.monotonic() - start_s,
    )
    return engine, info


def resolve_factory(path: str, import_paths: Sequence[str]) -> EngineFactory:
    """The function named by "module:function". Raises ConfigError when there is none."""
    sys.path[:0] = [entry for entry in import_paths if entry not in sys.path]
    module_name, _, function_name = path.partition(":")
    try:
        factory: EngineFactory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine factory {path!r} cannot be imported: {error}.") from error
    return factory


def serve(channel: CommandChannel) -> int:
    """Load the engine that the first command asks for, run it, and return the exit code."""
    start = _first_command(channel)
    channel.send_timeout_s = start.send_timeout_s
    try:
        factory = resolve_factory(start.factory, start.import_paths)
        engine, info = factory(Path(start.checkpoint), start.config, _progress_sender(channel))
        channel.send(wire.Ready(info))
        host = EngineHost(
            engine, channel, heartbeat_s=start.heartbeat_s, step_warning_s=start.step_warning_s
        )
        host.run()
    except wire.BrokenChannel:
        raise
    except HeadraceError as error:
        channel.send(wire.Failed(error.code, error.message, error.param))
        return EXIT_CRASHED
    except Exception as error:
        # A bug: the traceback belongs into the log, the parent gets one line and restarts us.
        traceback.print_exc()
        text = traceback.format_exception_only(error)[-1].strip()
        channel.send(wire.Failed(HeadraceError.code, f"The engine failed: {text}"))
        return EXIT_CRASHED
    return 0


def _first_command(channel: CommandChannel) -> wire.Start:
    commands = channel.poll(timeout_s=60.0, limit=1)
    if not commands or not isinstance(commands[0], wire.Start):
        raise wire.BrokenChannel("no start command")
    return commands[0]


def _progress_sender(channel: CommandChannel) -> ProgressCallback:
    next_s = 0.0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s or done_bytes >= total_bytes:
            next_s = now_s + PROGRESS_INTERVAL_S
            channel.send(wire.Progress(done_bytes, total_bytes))

    return progress


def _die_with_parent(lifeline: int, use_death_signal: bool) -> None:
    """Leave when the parent does, even in the middle of a long step."""
    if use_death_signal and sys.platform == "linux":
        # Covers what the thread below cannot: code that never gives up the interpreter lock.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while True:
            try:
                if not os.read(lifeline, 1):
                    os._exit(EXIT_ORPHANED)
            except OSError as error:
                if error.errno != errno.EINTR:
                    os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """Entry point of the child: channel fd, lifeline fd, "1" to ask for a parent-death signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel_fd, lifeline_fd = int(arguments[0]), int(arguments[1])
    for fd in (channel_fd, lifeline_fd):
        os.set_inheritable(fd, False)  # a grandchild must not keep the channel open
    _die_with_parent(lifeline_fd, arguments[2] == "1")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        code = serve(CommandChannel(socket.socket(fileno=channel_fd)))
    except wire.BrokenChannel as error:
        print(f"headrace engine: {error}", file=sys.stderr)
        code = EXIT_ORPHANED
    sys.stderr.flush()
    # No interpreter shutdown: threads of the operators may still run, and nothing is left to save.
    os._exit(code)
