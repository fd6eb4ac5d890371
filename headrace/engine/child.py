"""The server's side of the engine process: spawn it, exchange frames with it, end it.

Contract: one `ChildProcess` is one life of the engine process. The channel is a socket pair that
only the two processes hold: no port, no file, no authentication needed, and its end of file is the
death notice. The child runs in a session of its own, so Ctrl-C in the terminal reaches only the
server, which decides what happens to running requests. Used by `engine/process.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import headrace
from headrace.engine import wire

# The parent's own copy of headrace is loaded, whatever else the search path holds; the folder is
# then taken out again, so that nothing in it can shadow other modules.
_BOOT: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); import headrace; del sys.path[0]; "
    "from headrace.engine.host import main; main(sys.argv[2:])"
)
_REAP_TIMEOUT_S: Final = 30.0


class ChildProcess:
    """One engine process and its channel; made by `spawn`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        lifeline: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._lifeline = lifeline
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls) -> ChildProcess:
        """Start the process; it waits for `wire.Start`. Raises OSError when it cannot start."""
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        try:
            # Only the main thread lives as long as the process: the kernel sends the parent-death
            # signal when the starting *thread* ends.
            in_main_thread = threading.current_thread() is threading.main_thread()
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _BOOT,
                    str(Path(headrace.__file__).resolve().parent.parent),
                    str(theirs.fileno()),
                    str(lifeline_read),
                    "1" if in_main_thread else "0",
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout belongs to the server's caller; whatever prints there is a log
                pass_fds=(theirs.fileno(), lifeline_read),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(lifeline_write)
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, lifeline_write, reader, writer)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, command: wire.Command) -> None:
        """Queue a command. Raises InvalidRequest when it is too large for a frame."""
        frame = wire.encode_frame(command)
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def flushed(self) -> None:
        """Wait until the engine has read most of what was sent; returns also when it is gone."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return  # `receive` says so to the one who can act on it

    async def receive(self) -> wire.Event:
        """The next event. Raises BrokenChannel when the engine is gone."""
        try:
            header = await self._reader.readexactly(wire.HEADER_BYTES)
            return wire.decode_event(await self._reader.readexactly(wire.body_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise wire.BrokenChannel("the engine has closed the channel") from error

    async def reap(self, grace_s: float) -> str:
        """Wait `grace_s` for the process to end, then kill it; says how it ended."""
        code = await asyncio.to_thread(self._wait, grace_s)
        self._writer.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return exit_text(code)

    def kill(self) -> None:
        """SIGKILL; `reap` must follow."""
        self._process.kill()

    def _wait(self, grace_s: float) -> int | None:
        try:
            return self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        try:
            return self._process.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None  # stuck in the kernel (a dead network mount): nothing more can be done


def exit_text(code: int | None) -> str:
    """How a process ended, for logs and errors."""
    if code is None:
        return "could not be killed"
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
