"""An engine in a process of its own, seen from asyncio.

Contract: `EngineClient` starts the engine process, hands requests to it, streams their tokens back
and supervises it. A dead engine process ends all running requests with EngineLost and is restarted
with back-off; after too many deaths in a window the client stays `failed`. Nothing is unbounded:
requests, unread tokens per request (engine/stream.py) and every wait have a limit. One event loop
per client; used by the server. Imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import structlog

from headrace.config import EngineConfig
from headrace.core.output import TokenChunk
from headrace.core.request import Request
from headrace.engine import wire
from headrace.engine.child import ChildProcess
from headrace.engine.host import DEFAULT_FACTORY
from headrace.engine.stats import EngineStats
from headrace.engine.stream import TokenStream
from headrace.engine.wire import EngineInfo
from headrace.errors import (
    ConfigError,
    Draining,
    EngineLost,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    rebuild_error,
)

__all__ = ["EngineClient", "EngineInfo", "EngineState", "SupervisionConfig"]

ProgressCallback = Callable[[int, int], None]

# How long `drain` waits for aborted requests to confirm, after its own timeout.
_ABORT_GRACE_S = 5.0
_RETRY_WHILE_FULL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """Limits of an engine process; all times in seconds.

    load_timeout_s: until the model is loaded. step_warning_s: a longer step is logged.
    heartbeat_s: how often the engine reports its counters, between two steps. hang_timeout_s: an
    engine that reports nothing for this long is killed and restarted; must exceed the longest step.
    buffer_tokens, slow_reader_timeout_s: see engine/stream.py. max_restarts within
    restart_window_s, then the engine stays failed; the n-th restart waits
    restart_backoff_s * 2^(n-1), at most restart_backoff_max_s. send_timeout_s: the engine process
    leaves when the server reads nothing for this long. shutdown_grace_s: between asking the
    process to leave and killing it. factory, import_paths: which engine, see engine/host.py.
    """

    load_timeout_s: float = 3600.0
    heartbeat_s: float = 1.0
    step_warning_s: float = 10.0
    hang_timeout_s: float = 600.0
    buffer_tokens: int = 8192
    slow_reader_timeout_s: float = 30.0
    max_restarts: int = 5
    restart_window_s: float = 600.0
    restart_backoff_s: float = 0.5
    restart_backoff_max_s: float = 30.0
    send_timeout_s: float = 300.0
    shutdown_grace_s: float = 5.0
    factory: str = DEFAULT_FACTORY
    import_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value < 0:
                raise ConfigError(
                    f"supervision.{field.name} must not be negative, got {value}.",
                    param=f"supervision.{field.name}",
                )


class EngineState(StrEnum):
    """Where the engine process is in its life."""

    NEW = "new"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # died too often; stays so
    CLOSED = "closed"


class EngineClient:
    """One engine process with its requests."""

    def __init__(
        self,
        checkpoint: Path,
        config: EngineConfig,
        supervision: SupervisionConfig | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._limits = supervision if supervision is not None else SupervisionConfig()
        # The engine has its own queue limit; this one bounds what is on the way to it.
        self._max_requests = config.max_waiting + config.max_num_seqs
        self._log = structlog.get_logger("headrace.engine")
        self._state = EngineState.NEW
        self._draining = False
        self._last_error = ""
        self._stats = _no_stats()
        self._child: ChildProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, TokenStream] = {}
        self._names: dict[int, tuple[str, int]] = {}  # number in outputs -> request id, choice
        self._live: dict[str, int] = {}  # request id -> choices that the engine has not ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed = asyncio.Event()
        self._losses_s: deque[float] = deque()  # when engines were lost, within the window
        self._restarts = 0
        self._retry_at_s = 0.0
        self._load_time_s = 0.0

    # --- state ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether `submit` takes requests now."""
        return self._state is EngineState.READY and not self._draining

    @property
    def state(self) -> EngineState:
        """Where the engine process is in its life."""
        return self._state

    @property
    def last_error(self) -> str:
        """Why the engine was lost last; empty: it never was."""
        return self._last_error

    @property
    def restarts(self) -> int:
        """How often the engine was started again after it was lost."""
        return self._restarts

    @property
    def num_requests(self) -> int:
        """Requests that the engine still holds, aborted ones it has not confirmed included."""
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        return self._child.pid if self._child is not None else None

    def stats(self) -> EngineStats:
        """The newest counters that the engine has reported; zeros while there are none."""
        return self._stats

    async def wait_failed(self) -> str:
        """Wait until the engine is given up; returns the last reason."""
        await self._failed.wait()
        return self._last_error

    # --- life ----------------------------------------------------------------------------------

    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        """Start the process and wait until its model is loaded.

        progress: called with (done_bytes, total_bytes) of the weights. Raises the HeadraceError by
        which loading failed (CheckpointError, ConfigError, ...) or EngineLost when the process died
        or took longer than `load_timeout_s`. May be called once.
        """
        if self._state is not EngineState.NEW:
            raise ConfigError(f"The engine client is {self._state}; it can be started once.")
        self._state = EngineState.LOADING
        try:
            info = await self._launch(progress)
        except BaseException:
            self._state = EngineState.CLOSED
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        return info

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the running ones; those left at the end are aborted."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._log.warning("drain timed out, aborting", requests=len(self._streams))
            for request_id in list(self._streams):
                self._send_abort(request_id)
            try:
                async with asyncio.timeout(_ABORT_GRACE_S):
                    await self._idle.wait()
            except TimeoutError:
                self._end_streams("The engine did not confirm the abort.")

    async def close(self) -> None:
        """End the process; running requests end with EngineLost. May be called at any time."""
        self._draining = True
        self._state = EngineState.CLOSED
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._child is not None:
            self._child.send(wire.Shutdown())
            await self._reap(self._limits.shutdown_grace_s)
        self._end_streams("The engine was closed.")

    # --- requests ------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        """Run a request and yield its chunks; the last one of each choice has `finish`.

        Closing the iterator (or cancelling its reader) aborts the request. Raises before the first
        chunk: InvalidRequest, ContextTooLong, Overloaded, Draining, EngineLost; after it, an error
        is the last chunk, with finish ERROR. Chunks the reader has not taken are merged.
        """
        stream = self._admit(request)
        try:
            await self._require_child().flushed()
            while not stream.finished:
                yield await stream.take()
        finally:
            if self._streams.get(request.request_id) is stream:
                # The stream stays in the table until the engine confirms: until then it may still
                # send chunks of this id.
                stream.fail(EngineLost("The reader went away."))
                self._send_abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last chunk with finish ABORT. Unknown id: no-op."""
        if request_id in self._streams:
            self._send_abort(request_id)

    def _admit(self, request: Request) -> TokenStream:
        """Send a request to the engine, or raise why it is not taken."""
        self._check_ready()
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequest(f"Request id {request_id!r} is already running.", param="id")
        if len(self._streams) >= self._max_requests:
            raise Overloaded(
                f"{len(self._streams)} requests are queued or running, the limit is "
                f"{self._max_requests}.",
                retry_after_s=_RETRY_WHILE_FULL_S,
            )
        self._require_child().send(wire.Submit(request))
        stream = TokenStream(
            request_id,
            self._limits.buffer_tokens,
            self._limits.slow_reader_timeout_s,
            request.sampling.n,
        )
        self._streams[request_id] = stream
        self._idle.clear()
        return stream

    def _check_ready(self) -> None:
        if self._state is EngineState.FAILED:
            raise EngineLost(
                f"The engine was lost {len(self._losses_s)} times within "
                f"{self._limits.restart_window_s:g} s and is not restarted: {self._last_error}"
            )
        if self._draining or self._state is EngineState.CLOSED:
            raise Draining("The server is shutting down.", retry_after_s=self._load_time_s + 1.0)
        if self._state is EngineState.RESTARTING:
            wait_s = max(1.0, self._retry_at_s - time.monotonic())
            raise EngineLost("The engine is being restarted.", retry_after_s=wait_s)
        if self._state is not EngineState.READY:
            raise Overloaded("The model is not loaded yet.", retry_after_s=_RETRY_WHILE_FULL_S)

    def _require_child(self) -> ChildProcess:
        if self._child is None:
            raise EngineLost("The engine was lost.", retry_after_s=_RETRY_WHILE_FULL_S)
        return self._child

    def _send_abort(self, request_id: str) -> None:
        if self._child is not None:
            self._child.send(wire.Abort(request_id))

    def _end_streams(self, message: str, retry_after_s: float | None = None) -> None:
        for stream in self._streams.values():
            stream.fail(EngineLost(message, retry_after_s=retry_after_s))
        self._streams.clear()
        self._names.clear()
        self._live.clear()
        self._idle.set()

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._live.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    # --- events of the engine ------------------------------------------------------------------

    def _on_accepted(self, accepted: wire.Accepted) -> None:
        stream = self._streams.get(accepted.request_id)
        if stream is not None:
            self._live[accepted.request_id] = stream.num_choices
            for choice in range(stream.num_choices):
                self._names[accepted.number + choice] = (accepted.request_id, choice)

    def _on_outputs(self, message: wire.Outputs) -> None:
        now_s = time.monotonic()
        output = wire.unpack_output(message, self._names)
        special = output.special_entries()
        tokens = output.tokens.tolist()
        for entry, number in enumerate(output.numbers.tolist()):
            if number not in self._names:
                continue  # ended by this side while the output was on its way
            request_id, choice = self._names[number]
            stream = self._streams[request_id]
            if entry not in special:
                keeps_up = stream.put_token(choice, tokens[entry], now_s)
            else:
                keeps_up = stream.put(output.chunk(entry), now_s)
            if not keeps_up:
                self._log.warning("slow reader, request aborted", request_id=request_id)
                self._send_abort(request_id)
            if output.finish[entry]:
                self._end_choice(number, request_id)

    def _end_choice(self, number: int, request_id: str) -> None:
        """The engine sends nothing more under `number`."""
        del self._names[number]
        self._live[request_id] -= 1
        if self._live[request_id] == 0:
            self._forget(request_id)

    def _on_refused(self, refused: wire.Refused) -> None:
        stream = self._streams.get(refused.request_id)
        if stream is not None:
            stream.fail(
                rebuild_error(refused.code, refused.message, refused.param, refused.retry_after_s)
            )
            self._forget(refused.request_id)

    async def _listen(self, child: ChildProcess) -> str:
        """Handle events until the engine is gone; returns the reason, empty if it gave none."""
        reason = ""
        while True:
            try:
                async with asyncio.timeout(self._limits.hang_timeout_s):
                    event = await child.receive()
            except wire.BrokenChannel:
                return reason
            except TimeoutError:
                child.kill()
                return f"gave no sign of life for {self._limits.hang_timeout_s:g} s"
            if isinstance(event, wire.Outputs):
                self._on_outputs(event)
            elif isinstance(event, wire.Accepted):
                self._on_accepted(event)
            elif isinstance(event, wire.Refused):
                self._on_refused(event)
            elif isinstance(event, wire.StatsReply):
                self._stats = event.stats
            elif isinstance(event, wire.Failed):
                reason = event.message

    # --- supervision ---------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Listen, and restart the engine when it is lost, until it is lost too often."""
        try:
            while self._child is not None:
                reason = await self._listen(self._child)
                await self._lose(reason)
                if self._draining:
                    return
                await self._relaunch()
        except Exception as error:  # a bug here must not leave requests waiting for ever
            self._log.exception("supervision failed")
            self._give_up(f"supervision failed: {error!r}")

    async def _lose(self, reason: str) -> None:
        """The engine is gone: reap it, end its requests, note the time."""
        self._state = EngineState.RESTARTING
        self._retry_at_s = time.monotonic() + self._load_time_s + self._limits.restart_backoff_s
        self._stats = _no_stats()
        pid = self.pid
        exit_text = await self._reap(1.0)
        self._note_loss(f"{reason} (process {exit_text})" if reason else f"process {exit_text}")
        self._log.error("engine lost", pid=pid, reason=self._last_error, requests=self.num_requests)
        self._end_streams(
            f"The engine was lost: {self._last_error}.",
            retry_after_s=max(1.0, self._retry_at_s - time.monotonic()),
        )

    def _note_loss(self, reason: str) -> None:
        now_s = time.monotonic()
        self._last_error = reason
        self._losses_s.append(now_s)
        while now_s - self._losses_s[0] > self._limits.restart_window_s:
            self._losses_s.popleft()

    async def _relaunch(self) -> None:
        """Restart with back-off until it succeeds or the engine is given up."""
        limits = self._limits
        while True:
            losses = len(self._losses_s)
            if losses > limits.max_restarts:
                self._give_up(self._last_error)
                return
            delay_s = min(
                limits.restart_backoff_s * 2 ** (losses - 1), limits.restart_backoff_max_s
            )
            self._retry_at_s = time.monotonic() + delay_s + self._load_time_s
            self._log.info("restarting engine", attempt=losses, delay_s=delay_s)
            await asyncio.sleep(delay_s)
            try:
                await self._launch(None)
                self._restarts += 1
                return
            except (HeadraceError, OSError) as error:
                self._note_loss(str(error))
                self._log.error("engine restart failed", reason=self._last_error)

    def _give_up(self, reason: str) -> None:
        self._last_error = reason
        self._state = EngineState.FAILED
        self._log.error("engine given up", losses=len(self._losses_s), reason=reason)
        self._end_streams(f"The engine has failed: {reason}.")
        self._failed.set()

    async def _launch(self, progress: ProgressCallback | None) -> EngineInfo:
        """Spawn a process and wait until it is ready; leaves none behind when that fails."""
        start_s = time.monotonic()
        self._child = await ChildProcess.spawn()
        try:
            self._child.send(
                wire.Start(
                    factory=self._limits.factory,
                    checkpoint=str(self._checkpoint),
                    config=self._config,
                    import_paths=self._limits.import_paths,
                    heartbeat_s=self._limits.heartbeat_s,
                    step_warning_s=self._limits.step_warning_s,
                    send_timeout_s=self._limits.send_timeout_s,
                )
            )
            async with asyncio.timeout(self._limits.load_timeout_s):
                info = await self._loaded(self._child, progress)
        except wire.BrokenChannel:
            exit_text = await self._reap(1.0)
            raise EngineLost(f"The engine process {exit_text} while it was loading.") from None
        except TimeoutError:
            await self._reap(0.0)
            raise EngineLost(
                f"The model was not loaded within {self._limits.load_timeout_s:g} s."
            ) from None
        except BaseException:
            await self._reap(0.0)
            raise
        self._load_time_s = time.monotonic() - start_s
        self._state = EngineState.READY
        self._log.info("engine ready", pid=self.pid, load_s=round(self._load_time_s, 2))
        return info

    async def _loaded(self, child: ChildProcess, progress: ProgressCallback | None) -> EngineInfo:
        while True:
            event = await child.receive()
            if isinstance(event, wire.Ready):
                return event.info
            if isinstance(event, wire.Failed):
                raise rebuild_error(event.code, event.message, event.param)
            if isinstance(event, wire.Progress) and progress is not None:
                progress(event.done_bytes, event.total_bytes)

    async def _reap(self, grace_s: float) -> str:
        """End the current process, if any; says how it ended."""
        child, self._child = self._child, None
        # Shielded: a process that is being ended must be waited for even when we are cancelled.
        return await asyncio.shield(child.reap(grace_s)) if child is not None else "had ended"


def _no_stats() -> EngineStats:
    required = (field.name for field in fields(EngineStats) if field.default is MISSING)
    counts: dict[str, Any] = dict.fromkeys(required, 0)
    return EngineStats(**counts)
