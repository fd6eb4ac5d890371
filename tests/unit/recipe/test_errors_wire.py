"""Errors in the shapes of the protocols."""

from __future__ import annotations

import importlib.util
import json

import pytest

from headrace.errors import (
    BodyTooLarge,
    ContextTooLong,
    EngineLost,
    Forbidden,
    HeadraceError,
    InternalError,
    InvalidBody,
    InvalidRequest,
    LimitReached,
    ModelNotFound,
    Overloaded,
    Unauthorized,
)
from headrace.recipe.converted import Protocol
from headrace.recipe.options import Level
from headrace.recipe.protocols.errors_wire import error_body, error_event


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("kind", [InvalidRequest, InvalidBody, ContextTooLong])
def test_official_body_is_the_same_for_all_protocols(
    protocol: Protocol, kind: type[HeadraceError]
) -> None:
    message = "x" * 5000
    assert error_body(kind(message, param="p"), protocol, Level.OFFICIAL) == (
        400,
        {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": None,
                "code": "invalid_request_error",
            }
        },
    )


def test_official_internal_error() -> None:
    status, body = error_body(InternalError("m"), Protocol.CHAT, Level.OFFICIAL)
    assert status == 500
    assert body["error"]["type"] == body["error"]["code"] == "internal_error"


@pytest.mark.parametrize("protocol", [Protocol.CHAT, Protocol.RESPONSES])
def test_clients_openai_envelope(protocol: Protocol) -> None:
    status, body = error_body(ContextTooLong("m", param="messages"), protocol, Level.CLIENTS)
    assert status == 400
    assert body == {
        "error": {
            "message": "m",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("m"), 400, "invalid_request_error"),
        (Unauthorized("m"), 401, "authentication_error"),
        (Forbidden("m"), 403, "permission_error"),
        (ModelNotFound("m"), 404, "not_found_error"),
        (BodyTooLarge("m"), 413, "request_too_large"),
        (LimitReached("m"), 429, "rate_limit_error"),
        (InternalError("m"), 500, "api_error"),
        (EngineLost("m"), 503, "overloaded_error"),
        (Overloaded("m"), 529, "overloaded_error"),
    ],
)
def test_clients_anthropic_envelope(error: HeadraceError, status: int, kind: str) -> None:
    body = {"type": "error", "error": {"type": kind, "message": "m"}}
    assert error_body(error, Protocol.MESSAGES, Level.CLIENTS) == (status, body)


def test_anthropic_sdk_reads_the_body() -> None:
    anthropic = importlib.import_module("anthropic")
    # Newer versions of the SDK come with an HTTP client of another name.
    newer = importlib.util.find_spec("httpx2") is not None
    httpx = importlib.import_module("httpx2" if newer else "httpx")
    status, body = error_body(LimitReached("slow down"), Protocol.MESSAGES)
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=body))
    with httpx.Client(transport=transport) as http:
        client = anthropic.Anthropic(api_key="k", http_client=http, max_retries=0)
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(
                model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}]
            )
    assert caught.value.body["error"]["type"] == "rate_limit_error"


def test_events_of_a_running_stream() -> None:
    error = EngineLost("gone")
    name, data = error_event(Protocol.CHAT, error)
    assert name is None
    assert json.loads(data)["error"]["code"] == "engine_lost"
    name, data = error_event(Protocol.MESSAGES, error)
    assert name == "error"
    assert json.loads(data) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "gone"},
    }
    name, data = error_event(Protocol.RESPONSES, error, sequence_number=7)
    assert name == "error"
    assert json.loads(data) == {
        "type": "error",
        "code": "engine_lost",
        "message": "gone",
        "param": None,
        "sequence_number": 7,
    }
    name, data = error_event(Protocol.RESPONSES, error, Level.OFFICIAL)
    assert json.loads(data)["error"]["param"] is None


def test_user_input_in_texts_is_shortened_and_encodable() -> None:
    error = InvalidRequest("\ud800" * 5000, param="p" * 5000)
    for protocol in Protocol:
        _, data = error_event(protocol, error)
        data.decode()
        assert len(data) < 7000
