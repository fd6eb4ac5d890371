"""Start, drain, stop: a server process and its signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from headrace.config.server import ServerConfig
from headrace.errors import ConfigError
from headrace.serve.run import open_socket, socket_url
from tests.server.scripted import MODEL, USER, events_of, running_at, wait_for


class ServerProcess:
    """`scripted_main` in a process of its own."""

    def __init__(self, answer_s: float, load_s: float, drain_timeout_s: float) -> None:
        arguments = [str(answer_s), str(load_s), str(drain_timeout_s)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.scripted_main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self.line("listening ")

    def line(self, start: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith(start), (line, self.process.stderr and self.process.stderr.read())
        return line.removeprefix(start)

    def post(self, stream: bool = False) -> httpx.Response:
        body = {
            "model": MODEL,
            "messages": USER,
            "stream": stream,
            "thinking": {"type": "disabled"},
        }
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30)

    def status(self) -> int:
        return httpx.get(f"{self.url}/health/ready").status_code


@contextmanager
def server_process(
    answer_s: float = 0.0, load_s: float = 0.0, drain_timeout_s: float = 20.0
) -> Iterator[ServerProcess]:
    server = ServerProcess(answer_s, load_s, drain_timeout_s)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate(timeout=10)


def test_sigterm_lets_running_requests_finish() -> None:
    with server_process(answer_s=3.0) as server:
        server.line("ready ")
        results: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda stream=stream: results.append(server.post(stream)))
            for stream in (True, False)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: running_at(server.url) == 2)
        assert server.status() == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.line("draining ") == "2"
        refused = server.post()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.status() == 503
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        for thread in threads:
            thread.join()
        assert {result.status_code for result in results} == {200}
        assert all("end" in result.text for result in results)
        assert sum("[DONE]" in result.text for result in results) == 1
        assert server.process.wait(10) == 0
        assert server.line("stopped ") == "2 0"
        assert server.line("closed ") == "20.0"


def test_what_is_left_after_the_drain_timeout_gets_an_error() -> None:
    with server_process(answer_s=30.0, drain_timeout_s=0.5) as server:
        server.line("ready ")
        results: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: results.append(server.post(stream=True)))
        thread.start()
        wait_for(lambda: running_at(server.url) == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        thread.join()
        assert events_of(results[0].text)[-1]["error"]["code"] == "draining"
        server.line("draining ")
        assert server.line("stopped ") == "0 1"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second: signal.Signals) -> None:
    with server_process(answer_s=30.0) as server:
        server.line("ready ")
        lost: list[httpx.HTTPError] = []

        def post() -> None:
            try:
                server.post()
            except httpx.HTTPError as error:
                lost.append(error)

        thread = threading.Thread(target=post)
        thread.start()
        wait_for(lambda: running_at(server.url) == 1)
        server.process.send_signal(signal.SIGINT)
        server.line("draining ")
        server.process.send_signal(second)
        assert server.process.wait(5) == 128 + second
        thread.join()
        assert lost


def test_it_answers_while_the_model_loads_and_can_be_stopped_then() -> None:
    with server_process(load_s=30.0) as server:
        assert server.status() == 503
        assert server.post().json()["error"]["code"] == "overloaded"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0


def test_an_idle_connection_does_not_hold_up_the_end() -> None:
    with server_process() as server, httpx.Client() as client:
        server.line("ready ")
        assert client.get(f"{server.url}/health/ready").is_success
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 5


def test_a_port_in_use_is_named() -> None:
    with open_socket(ServerConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        assert socket_url(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1 port {port}.*in use.*--port"
        ) as caught:
            open_socket(ServerConfig(port=port))
        assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        open_socket(ServerConfig(host="no.such.host.invalid"))
