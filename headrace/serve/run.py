"""The life of a server: listen, load the model, serve, drain, leave.

Contract: `run_server` returns when the server has been told to stop (exit code 0) and raises the
HeadraceError that keeps it from serving. It listens before the model is loaded, so that probes see
"loading" instead of a refused connection. First SIGTERM or SIGINT: no new requests, running ones
finish within `drain_timeout_s`. Second one: the process leaves at once. Called by `cli/serve.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import uvicorn

from headrace.config.server import ServerConfig
from headrace.errors import ConfigError, EngineLost
from headrace.serve.app import create_app
from headrace.serve.connection import connection_class
from headrace.serve.engine_client import EngineClient, EngineFacts
from headrace.serve.state import ModelCard, ServerState

_FLUSH_TIMEOUT_S = 5.0
_POLL_S = 0.05
_MAX_HEAD_BYTES = 64 * 2**10


class SupervisedEngine(EngineClient, Protocol):
    """An engine that is restarted when it dies, until it is given up."""

    async def wait_failed(self) -> str:
        """Returns the reason once the engine is given up."""
        ...


class RunHooks(Protocol):
    """What the command line wants to hear; all calls come from the event loop."""

    def listening(self, url: str) -> None:
        """The socket is open, the model is not loaded yet."""
        ...

    def ready(self, url: str, model: ModelCard) -> None:
        """Requests are taken from now on."""
        ...

    def draining(self, running: int, timeout_s: float) -> None:
        """A signal came; `running` requests may finish."""
        ...

    def stopped(self, finished: int, cut: int) -> None:
        """All is over; of the running requests `finished` are complete, `cut` are not."""
        ...


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: ours knows about running requests."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_server(
    state: ServerState,
    start_engine: Callable[[], Coroutine[Any, Any, EngineFacts]],
    engine: SupervisedEngine,
    make_card: Callable[[EngineFacts], ModelCard],
    hooks: RunHooks,
) -> None:
    """Serve until a signal comes.

    start_engine: loads the model. Raises ConfigError when the address cannot
    be used, what loading raises, and EngineLost when the engine died too often.
    """
    config = state.config
    sock = open_socket(config)
    url = socket_url(sock)
    server = _Server(_uvicorn_config(state, config))
    stop = _StopSignals()
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="http-server")
    try:
        hooks.listening(url)
        loading = asyncio.create_task(start_engine(), name="engine-start")
        if not await _first(loading, stop.wait()):
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return
        state.model = make_card(loading.result())
        hooks.ready(url, state.model)
        failed = asyncio.create_task(engine.wait_failed())
        if await _first(failed, stop.wait()):
            raise EngineLost(f"The engine has failed and is not restarted: {failed.result()}")
        failed.cancel()
        finished, cut = await _drain(state, engine, hooks)
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await engine.close()
        state.close()
        stop.close()
    hooks.stopped(finished, cut)


async def _first(wanted: asyncio.Future[Any], other: asyncio.Future[Any]) -> bool:
    """Whether `wanted` ends before `other`."""
    await asyncio.wait({wanted, other}, return_when=asyncio.FIRST_COMPLETED)
    return wanted.done()


async def _drain(state: ServerState, engine: EngineClient, hooks: RunHooks) -> tuple[int, int]:
    """Let running requests finish; those left at the end of the time are aborted.

    Returns how many finished and how many were aborted.
    """
    state.draining = True
    timeout_s = state.config.drain_timeout_s
    running = state.limits.running
    hooks.draining(running, timeout_s)
    if not await _until_idle(state, timeout_s):
        state.logger.info("drain timed out", requests=state.limits.running)
    cut = state.limits.running
    await engine.drain(0.0 if cut else timeout_s)
    # Aborted requests still have to tell their clients.
    await _until_idle(state, _FLUSH_TIMEOUT_S)
    return running - cut, cut


async def _until_idle(state: ServerState, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while state.limits.running and loop.time() < end_s:
        await asyncio.sleep(_POLL_S)
    return not state.limits.running


class _StopSignals:
    """SIGTERM and SIGINT: the first one is an event, the second one ends the process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = self._loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def wait(self) -> asyncio.Future[None]:
        """Done after the first signal."""
        return self._first

    def close(self) -> None:
        """Give the signals back."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if not self._first.done():
            self._first.set_result(None)
            return
        # The engine process notices the death of this one and leaves too.
        sys.stderr.flush()
        os._exit(128 + number)


def open_socket(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises ConfigError when the address is unknown or in use."""
    try:
        addresses = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = addresses[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        # The text of create_server names the address once more; getaddrinfo has its own numbers.
        known = error.errno if not isinstance(error, socket.gaierror) else None
        reason = os.strerror(known) if known else error.strerror or error
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {reason}. "
            "Choose another --host or --port.",
            param="server.port",
        ) from error


def socket_url(sock: socket.socket) -> str:
    """http://host:port of a listening socket, as a client on this machine can use it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _uvicorn_config(state: ServerState, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        http=connection_class(config.header_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=config.max_connections,
        timeout_keep_alive=max(1, round(config.idle_timeout_s)),
        timeout_graceful_shutdown=max(1, round(_FLUSH_TIMEOUT_S)),
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )
