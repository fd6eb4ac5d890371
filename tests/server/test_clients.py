"""Clients that misbehave (gone, slow to send, slow to read), and the official SDK."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from headrace.core.output import FinishReason
from headrace.core.request import Request
from tests.server.scripted import (
    MODEL,
    TOKENIZER,
    USER,
    LiveServer,
    Pause,
    ScriptedEngine,
    answer,
    one_log_line,
    wait_for,
)


def receive(client: socket.socket, until: bytes) -> bytes:
    data = b""
    while until not in data:
        part = client.recv(65536)
        assert part, f"the connection ended after {data!r}"
        data += part
    return data


def stands_still(value: Callable[[], int]) -> bool:
    before = value()
    time.sleep(0.3)
    return value() == before


def connect(live: LiveServer, receive_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(10)
    client.connect(("127.0.0.1", live.port))
    return client


def raw_request(stream: bool = True, **fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "messages": USER, "stream": stream, **fields}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(server: LiveServer, stream: bool) -> None:
    engine = server.engine
    engine.script = lambda request: ["first ", Pause(20), FinishReason.STOP]
    with one_log_line(server) as line:
        with connect(server) as client:
            client.sendall(raw_request(stream))
            wait_for(lambda: engine.running)
            if stream:
                receive(client, b"data: ")
        wait_for(lambda: not engine.running)
    assert engine.aborted[-1] == engine.requests[-1].request_id
    assert line["status"] == 499
    assert server.state.limits.running == 0


def test_a_client_that_goes_away_while_sending(server: LiveServer) -> None:
    before = len(server.engine.requests)
    with one_log_line(server) as line:
        with connect(server) as client:
            client.sendall(raw_request()[:-5])
            wait_for(lambda: server.state.limits.running == 1)
        wait_for(lambda: server.state.limits.running == 0)
    assert line["status"] == 499
    assert len(server.engine.requests) == before


def test_a_slow_reader_holds_up_only_itself_and_is_dropped() -> None:
    words = TOKENIZER.encode("some words " * 200)

    def endless(request: Request) -> Iterator[Sequence[int]]:
        while True:
            yield words

    engine = ScriptedEngine(endless)
    with LiveServer(engine, send_timeout_s=1.5) as live:
        with connect(live, receive_bytes=4096) as client:
            client.sendall(raw_request(thinking={"type": "disabled"}))
            # Once the buffers of both sockets are full, nothing more is taken from the engine.
            wait_for(lambda: engine.produced > 0 and stands_still(lambda: engine.produced))
            assert httpx.get(f"{live.url}/health/live").is_success
            wait_for(lambda: not engine.running)
        assert engine.aborted == [engine.requests[0].request_id]
        wait_for(lambda: any(line["status"] == 499 for line in live.log_lines()))


def test_a_head_that_does_not_come_closes_the_connection() -> None:
    with LiveServer(header_timeout_s=0.3) as live:
        for first in (b"", b"GET /health/live HT"):
            with connect(live) as client:
                client.sendall(first)
                assert client.recv(100) == b""
        # A later request on a kept connection has the same deadline, an idle one has not.
        with connect(live) as client:
            client.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            receive(client, b'"live"')
            time.sleep(0.5)
            client.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            receive(client, b'"live"')
            client.sendall(b"GET /he")
            assert client.recv(100) == b""


def test_a_slow_answer_is_not_a_slow_head() -> None:
    engine = ScriptedEngine(lambda request: [Pause(0.6), "done", FinishReason.STOP])
    with LiveServer(engine, header_timeout_s=0.2) as live:
        answer = live.chat(thinking={"type": "disabled"}).json()
        assert answer["choices"][0]["message"]["content"] == "done"


def test_a_body_that_does_not_come_is_a_400() -> None:
    with LiveServer(body_timeout_s=0.3) as live, connect(live) as client:
        client.sendall(raw_request()[:-5])
        assert receive(client, b"did not arrive").startswith(b"HTTP/1.1 400")
        assert live.state.limits.running == 0


def test_a_path_cannot_forge_log_lines(server: LiveServer) -> None:
    with one_log_line(server) as line:
        httpx.get(f"{server.url}/a%0a%1b[31mb")
    assert line["path"] == "/a??[31mb"


TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def sdk(live: LiveServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=20)


def test_openai_sdk_complete(server: LiveServer) -> None:
    server.engine.script = answer("Hello there", reasoning="I think.")
    with sdk(server) as client:
        result = client.chat.completions.create(model=MODEL, messages=USER, temperature=0)
    message = result.choices[0].message
    assert (message.role, message.content) == ("assistant", "Hello there")
    assert message.reasoning_content == "I think."  # type: ignore[attr-defined]
    assert result.choices[0].finish_reason == "stop"
    assert result.usage is not None
    assert result.usage.completion_tokens_details is not None
    assert result.usage.completion_tokens_details.reasoning_tokens > 0


def test_openai_sdk_stream(server: LiveServer) -> None:
    server.engine.script = answer("né 北京", reasoning="I think.")
    with sdk(server) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "né 北京"
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == "I think."
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 0


def test_openai_sdk_models_and_errors(server: LiveServer) -> None:
    with sdk(server) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "headrace"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="other", messages=USER)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL, messages=USER, tools=[TOOL], tool_choice="always"
            )
        assert caught.value.param == "tool_choice"
        server.engine.script = lambda request: ["text", FinishReason.ERROR]
        stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="broken"):
            list(stream)
    with LiveServer(api_keys=("a-good-key",)) as locked:
        with sdk(locked, "a-good-key") as client:
            assert client.models.list().data
        with sdk(locked, "a-wrong-key") as client, pytest.raises(openai.PermissionDeniedError):
            client.models.list()
