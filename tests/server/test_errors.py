"""The error table of docs/api.md, row by row, and the bodies of errors."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import errors
from headrace.core.output import FinishReason
from tests.server.scripted import (
    CONTEXT,
    MODEL,
    USER,
    LiveServer,
    Pause,
    ScriptedEngine,
    answer,
    events_of,
    one_log_line,
    wait_for,
)

KEY = "a-good-key"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with LiveServer(api_keys=(KEY, "another-key"), max_body_bytes=2000) as live:
        yield live


def check(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """The one shape of all errors; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert ("retry-after" in response.headers) == (status in (429, 503))
    return str(error["message"])


def post(live: LiveServer, content: Any, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"} | headers
    return httpx.post(f"{live.url}{CHAT}", content=content, headers=headers, timeout=20)


def test_400_invalid_field(server: LiveServer) -> None:
    message = check(server.chat(temperature="hot"), 400, "invalid_request_error", "temperature")
    assert message == "invalid request body: temperature: Expected float, got str"
    check(server.chat(max_tokens=-1), 400, "invalid_request_error", "max_tokens")
    for wrong in (0, 1_000_000):  # the limit of this model, not that of the official codec
        message = check(server.chat(max_tokens=wrong), 400, "invalid_request_error", "max_tokens")
        assert message.endswith(f"the valid range of max_tokens is [1, {CONTEXT}]")
    check(server.chat(n=129), 400, "invalid_request_error", "n")
    check(server.chat(messages=[]), 400, "invalid_request_error", "messages")


def test_400_context_too_long_says_limit_and_length(server: LiveServer) -> None:
    response = server.chat(messages=[{"role": "user", "content": "x " * 3 * CONTEXT}])
    message = check(response, 400, "context_length_exceeded", "messages")
    numbers = [int(number) for number in re.findall(r"\d+", message)]
    assert numbers[0] == CONTEXT < numbers[1] == numbers[2]
    message = check(server.chat(max_tokens=CONTEXT), 400, "context_length_exceeded", "messages")
    assert f"{CONTEXT} in the completion" in message


@pytest.mark.parametrize(
    "body",
    [b"", b"not json", b"[1]", b"\xff\xfe{}", b'{"model":"\xc3"}', b'{"a":' * 9000, b"\x00"],
)
def test_400_not_json_or_not_utf8(server: LiveServer, body: bytes) -> None:
    check(post(server, body), 400, "invalid_request_error")


def test_400_wrong_content_type(server: LiveServer) -> None:
    body = json.dumps({"model": MODEL, "messages": USER})
    response = post(server, body, **{"content-type": "text/plain"})
    assert "application/json" in check(response, 400, "invalid_request_error")
    assert post(server, body, **{"content-type": "application/json; charset=utf-8"}).is_success


def test_401_without_a_key(locked: LiveServer) -> None:
    for value in ({}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}):
        for path in ("/v1/models", "/metrics", "/nowhere"):
            response = httpx.get(f"{locked.url}{path}", headers=value)
            check(response, 401, "missing_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "authentication_error"


def test_403_with_a_wrong_key(locked: LiveServer) -> None:
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": b"Bearer \xff\xfe"}):
        check(httpx.get(f"{locked.url}/v1/models", headers=headers), 403, "invalid_api_key")


def test_every_key_and_both_headers_open(locked: LiveServer) -> None:
    for headers in (
        {"authorization": f"Bearer {KEY}"},
        {"authorization": "bearer another-key"},
        {"x-api-key": KEY},
    ):
        assert httpx.get(f"{locked.url}/v1/models", headers=headers).is_success
    assert httpx.get(f"{locked.url}/health/live").is_success
    assert KEY not in locked.log.getvalue()


def test_404_model(server: LiveServer) -> None:
    message = check(server.chat(model="gpt-9"), 404, "model_not_found", "model")
    assert "gpt-9" in message
    assert MODEL in message
    response = httpx.get(f"{server.url}/v1/models/org/other")
    check(response, 404, "model_not_found", "model")


def test_404_route(server: LiveServer) -> None:
    assert "/v1/nothing" in check(httpx.get(f"{server.url}/v1/nothing"), 404, "not_found")


def test_405(server: LiveServer) -> None:
    assert "POST" in check(httpx.get(f"{server.url}{CHAT}"), 405, "method_not_allowed")
    check(httpx.delete(f"{server.url}/v1/models"), 405, "method_not_allowed")


def big_body(size: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * size}]}
    return json.dumps(body).encode()


def test_413_by_content_length(locked: LiveServer) -> None:
    message = check(post(locked, big_body(2000)), 413, "body_too_large")
    assert "2000 bytes" in message
    check(post(locked, big_body(3_000_000)), 413, "body_too_large")
    assert post(locked, big_body(100)).is_success


def test_413_while_reading_a_chunked_body(locked: LiveServer) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(50):
            sent += 1000
            yield b"x" * 1000

    check(post(locked, parts()), 413, "body_too_large")
    assert len(locked.engine.requests) <= 1


def test_413_before_the_body_is_sent(locked: LiveServer) -> None:
    # A client that announces a huge body and waits gets its answer without sending anything.
    connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=10)
    connection.putrequest("POST", CHAT)
    for name, value in (
        ("authorization", f"Bearer {KEY}"),
        ("content-length", "9" * 18),
        ("expect", "100-continue"),
    ):
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert response.getheader("connection") == "close"
    connection.close()


def test_429_per_key_and_503_in_all() -> None:
    go = threading.Event()
    engine = ScriptedEngine(lambda request: ["ok", Pause(until=go), FinishReason.STOP])
    with LiveServer(
        engine, api_keys=(KEY, "another-key"), max_requests_per_key=1, max_requests=2
    ) as live:
        body = big_body(1)
        threads = [
            threading.Thread(
                target=post, args=(live, body), kwargs={"authorization": f"Bearer {k}"}
            )
            for k in (KEY, "another-key")
        ]
        threads[0].start()
        wait_for(lambda: len(engine.running) == 1)
        response = post(live, body)
        check(response, 429, "rate_limit_exceeded")
        assert response.json()["error"]["type"] == "rate_limit_error"
        threads[1].start()
        wait_for(lambda: len(engine.running) == 2)
        live.state.limits._max_requests_per_key = 2
        check(post(live, body), 503, "overloaded")
        go.set()
        for thread in threads:
            thread.join()
        assert post(live, body).is_success
        wait_for(lambda: live.state.limits.running == 0)


def test_499_only_in_the_log(server: LiveServer) -> None:
    server.engine.script = lambda request: [Pause(20), FinishReason.STOP]
    with one_log_line(server) as line, pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}{CHAT}",
            json={"model": MODEL, "messages": USER},
            timeout=httpx.Timeout(5, read=0.3),
        )
    assert line["status"] == 499
    assert (line["code"], line["level"]) == ("client_closed_request", "info")
    assert server.engine.aborted[-1] == server.engine.requests[-1].request_id


def test_500_tells_nothing_and_logs_the_traceback(server: LiveServer) -> None:
    server.engine.script = lambda request: [RuntimeError("secret detail")]
    response = server.chat()
    message = check(response, 500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in message
    assert "secret detail" in server.log.getvalue()
    # The request could not be ended by the engine itself; it must not stay there.
    assert server.chat(model="other").status_code == 404


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.Overloaded("full", retry_after_s=2.5), 503, "overloaded"),
        (errors.Draining("bye"), 503, "draining"),
        (errors.EngineLost("dead"), 503, "engine_lost"),
        (errors.InvalidRequest("bad", param="seed"), 400, "invalid_request_error"),
        (errors.ContextTooLong("long"), 400, "context_length_exceeded"),
    ],
)
def test_what_the_engine_refuses_has_its_status(
    server: LiveServer, error: errors.HeadraceError, status: int, code: str
) -> None:
    server.engine.script = lambda request: [error]
    for stream in (False, True):
        response = server.chat(stream=stream)
        assert check(response, status, code, error.param) == error.message
        if error.retry_after_s is not None:
            assert response.headers["retry-after"] == "3"


def test_503_while_draining_restarting_and_loading(server: LiveServer) -> None:
    assert server.chat().is_success
    server.engine.ready = False
    check(server.chat(), 503, "engine_lost")
    server.engine.ready = True
    server.state.draining = True
    check(server.chat(), 503, "draining")
    server.state.draining = False
    with LiveServer(loaded=False) as live:
        check(live.chat(), 503, "overloaded")


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (errors.EngineLost("dead"), "engine_lost"),
        (RuntimeError("secret detail"), "internal_error"),
        (FinishReason.ERROR, "internal_error"),
        (FinishReason.ABORT, "engine_lost"),
    ],
)
def test_an_error_in_a_stream_is_an_event_and_ends_it(
    server: LiveServer, step: Exception | FinishReason, code: str
) -> None:
    server.engine.script = lambda request: ["some text", step]
    with one_log_line(server) as line:
        response = server.chat(stream=True)
    assert response.status_code == 200
    events = events_of(response.text)
    assert events[-1]["error"]["code"] == code
    assert set(events[-1]) == {"error"}
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert line["code"] == code


def test_a_message_with_user_input_is_short_and_valid(server: LiveServer) -> None:
    message = check(
        server.chat(reasoning_effort="😀" * 5000),
        400,
        "invalid_request_error",
        "reasoning_effort",
    )
    assert len(message) <= 2000
    response = post(server, b'{"' + b"x" * 5000 + b'": "\\ud800", "model": "m"}')
    assert len(response.json()["error"]["param"]) == 200


def test_the_table_in_the_documentation_is_complete() -> None:
    """docs/api.md has every status and code that a server can send."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    for cls in vars(errors).values():
        if not isinstance(cls, type) or not issubclass(cls, errors.HeadraceError):
            continue
        if cls.http_status != 500 or cls is errors.HeadraceError:
            assert f"| {cls.http_status} | `{cls.code}` |" in text


def test_good_requests_still_work_after_all_this(server: LiveServer) -> None:
    server.engine.script = answer("fine")
    assert (
        server.chat(thinking={"type": "disabled"}).json()["choices"][0]["message"]["content"]
        == "fine"
    )
