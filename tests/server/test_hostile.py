"""Clients that misbehave: huge prompts, pipelining, bodies over the limit, what is no HTTP."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from headrace.serve.connection import MAX_PIPELINED_BYTES
from headrace.serve.encoding import LONG_BODY_BYTES
from tests.server.scripted import (
    CONTEXT,
    MODEL,
    TOKENIZER,
    USER,
    LiveServer,
    Pause,
    ScriptedEngine,
    wait_for,
)

CHAT = "/v1/chat/completions"


def raw_request(body: bytes, *more: str) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *more]
    return "\r\n".join([*lines, "", ""]).encode() + body


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": USER, **fields}).encode()


def post(live: LiveServer, content: bytes, **headers: str) -> httpx.Response:
    return httpx.post(f"{live.url}{CHAT}", content=content, headers=headers, timeout=20)


# --- prompts that cannot fit ------------------------------------------------------------------


def test_a_huge_prompt_is_refused_before_it_is_tokenized(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    original = TOKENIZER.encode_prompt

    def encode_prompt(prompt: Any) -> list[int]:
        encoded.append(1)
        return original(prompt)

    monkeypatch.setattr(TOKENIZER, "encode_prompt", encode_prompt)
    content = "x" * (15 * 2**20)
    error = server.chat(messages=[{"role": "user", "content": content}]).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert f"{CONTEXT} tokens" in error["message"]
    found = re.search(r"at least (\d+) tokens", error["message"])
    assert found
    # With the control tokens and the effort line of the prompt.
    assert 0 < int(found[1]) - TOKENIZER.least_text_tokens(content) < 20
    assert not encoded
    assert server.chat().is_success
    assert encoded


@pytest.mark.parametrize("text", ["", "hello world", "é" * 300, "the " * 500, "\U0001f600"])
def test_the_lower_bound_of_a_length_is_one(text: str) -> None:
    assert TOKENIZER.least_text_tokens(text) <= len(TOKENIZER.encode(text))


def test_short_requests_do_not_wait_for_long_ones() -> None:
    """The long thread is busy: a long request whose client leaves is dropped, never encoded."""
    with LiveServer(encode_threads=1) as live:
        begun, go = threading.Event(), threading.Event()

        def block(body: bytes) -> None:
            begun.set()
            go.wait(20)

        live.state.encoders._long.submit(block, b"")
        assert begun.wait(10)
        try:
            assert live.chat().is_success
            requests = len(live.engine.requests)
            body = body_of(user="x" * LONG_BODY_BYTES)
            with socket.create_connection(("127.0.0.1", live.port)) as client:
                client.sendall(raw_request(body))
                wait_for(lambda: live.state.limits.running == 1)
            wait_for(lambda: live.state.limits.running == 0)
        finally:
            go.set()
        assert live.log_lines()[-1]["status"] == 499
        assert len(live.engine.requests) == requests
        assert post(live, body).is_success


# --- one connection ---------------------------------------------------------------------------


@pytest.mark.parametrize("pipelined", [100, MAX_PIPELINED_BYTES // 2, 16 * MAX_PIPELINED_BYTES])
def test_a_client_that_goes_is_noticed_behind_pipelined_data(pipelined: int) -> None:
    engine = ScriptedEngine(lambda request: ["ok", Pause(30)])
    with LiveServer(engine) as live:
        client = socket.create_connection(("127.0.0.1", live.port))
        client.sendall(raw_request(body_of()))
        wait_for(lambda: engine.running)
        try:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * pipelined)
        except ConnectionError:
            assert pipelined > MAX_PIPELINED_BYTES  # the server has hung up
        client.close()
        wait_for(lambda: engine.aborted and not engine.running, 5)


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(raw_request(body_of()) * 2 + b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        data = b""
        while data.count(b"HTTP/1.1 ") < 3 or b"not_found" not in data:
            data += client.recv(65536)
    assert [part[:3] for part in data.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01 hello\r\n\r\n", b"GET\r\n\r\n", b"A B C D\r\n\r\n"]
)
def test_what_is_no_http_gets_our_error_body(server: LiveServer, junk: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(junk)
        response = http.client.HTTPResponse(client)
        response.begin()
        body = json.loads(response.read())
    assert (response.status, response.getheader("content-type")) == (400, "application/json")
    assert body["error"]["code"] == "invalid_request_error"
    assert server.chat().is_success


def test_413_reaches_a_client_that_sends_all_before_it_reads() -> None:
    limit = 12 * 2**20
    with LiveServer(max_body_bytes=limit) as live:
        connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
        connection.request("POST", CHAT, b"x" * (limit + 100_000))
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "body_too_large"
        connection.close()


def test_a_refused_body_that_does_not_come_holds_nothing_for_long() -> None:
    with LiveServer(max_body_bytes=1000, body_timeout_s=0.3) as live:
        with socket.create_connection(("127.0.0.1", live.port), timeout=10) as client:
            start = time.monotonic()
            client.sendall(raw_request(b"").replace(b"Length: 0", b"Length: 2000"))
            assert b" 413 " in client.recv(4096)
        assert time.monotonic() - start < 5


# --- headers and routes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"content-encoding": "gzip"}, "gzip"),
        ({"content-type": "application/json; charset=latin-1"}, "latin-1"),
        ({"content-type": "text/plain"}, "text/plain"),
    ],
)
def test_bodies_in_another_encoding_are_refused(
    server: LiveServer, headers: dict[str, str], word: str
) -> None:
    response = post(server, body_of(), **headers)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "identity"},
        {"content-type": 'application/json; charset="UTF-8"'},
        {"content-type": "application/problem+json;charset=utf8; x=y"},
    ],
)
def test_bodies_in_plain_utf8_are_taken(server: LiveServer, headers: dict[str, str]) -> None:
    assert post(server, body_of(), **headers).is_success


def test_405_names_the_methods_and_slashes_do_not_redirect(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}{CHAT}").headers["allow"] == "POST"
    assert "GET" in httpx.delete(f"{server.url}/v1/models").headers["allow"]
    for path in (f"{CHAT}/", "/health/ready/", "/metrics/"):
        response = httpx.get(server.url + path, headers={"host": "evil.example"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


# --- JSON that cannot be taken ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        (b'{"model": "m", "messages": [{"content": "\\ud800"}]}', "messages", "surrogate"),
        (b'{"model": "\\udc00\\ud800"}', "model", "surrogate"),
        (b'{"model": "m", "temperature": 1e999}', "temperature", "out of range"),
        (b'{"logit_bias": {"1": -1e999}}', "logit_bias", "out of range"),
        (b"[1e999]", None, "out of range"),
        (b'{"model": "\\ud800", ', None, "truncated"),
    ],
)
def test_the_field_is_named_also_where_json_itself_fails(
    server: LiveServer, body: bytes, param: str | None, word: str
) -> None:
    error = post(server, body).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request_error", param)
    assert word in error["message"]
    assert param is None or f"{param}: " in error["message"]


def test_no_messages_names_the_field(server: LiveServer) -> None:
    assert "messages" in server.chat(messages=[]).json()["error"]["message"]
