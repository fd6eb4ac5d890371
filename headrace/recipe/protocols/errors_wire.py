"""Errors in the shapes of the three protocols, as bodies and as events of a running stream.

Contract: level `official` writes the one body that the official codec has for all protocols; level
`clients` writes what the SDK of each protocol reads: OpenAI's envelope for Chat Completions and
Responses, Anthropic's for Messages. Texts are shortened and always encodable. Called by the server
for responses and by `events/` for errors inside an answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.recipe.converted import Protocol
from headrace.recipe.options import Level

MAX_MESSAGE_CHARACTERS = 2_000
MAX_PARAM_CHARACTERS = 200

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_ANTHROPIC_OVERLOADED = 529


def error_body(
    error: HeadraceError, protocol: Protocol, level: Level = Level.CLIENTS
) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error that ends a request before its answer begins."""
    status = error.http_status
    if level is Level.OFFICIAL:
        return status, {"error": _official(error)}
    if protocol is Protocol.MESSAGES:
        if isinstance(error, Overloaded):
            status = _ANTHROPIC_OVERLOADED  # clients: error-shapes
        return status, _anthropic(error)
    return status, {"error": _openai(error)}


def error_event(
    protocol: Protocol,
    error: HeadraceError,
    level: Level = Level.CLIENTS,
    *,
    sequence_number: int = 0,
) -> tuple[str | None, bytes]:
    """Name and JSON of the event by which an error ends a stream that has begun.

    sequence_number: of the event, Responses only. Chat events have no name.
    """
    name = None if protocol is Protocol.CHAT else "error"
    data: dict[str, Any]
    if level is Level.CLIENTS and protocol is Protocol.RESPONSES:
        fields = _openai(error)
        data = {
            "type": "error",
            "code": fields["code"],
            "message": fields["message"],
            "param": fields["param"],
            "sequence_number": sequence_number,
        }
    else:
        data = error_body(error, protocol, level)[1]
    return name, msgspec.json.encode(data)


def _official(error: HeadraceError) -> dict[str, Any]:
    """The codec's own errors are one code; errors of the server around it keep theirs."""
    if isinstance(error, InvalidRequest):
        kind = code = InvalidRequest.code
    else:
        kind = _OPENAI_TYPES.get(error.http_status, InvalidRequest.code)
        code = error.code
    # Never shortened: the texts are compared byte for byte.
    return {"message": _clean(error.message), "type": kind, "param": None, "code": code}


def _openai(error: HeadraceError) -> dict[str, Any]:
    return {
        "message": _short(error.message, MAX_MESSAGE_CHARACTERS),
        "type": _OPENAI_TYPES.get(error.http_status, InvalidRequest.code),
        "param": None if error.param is None else _short(error.param, MAX_PARAM_CHARACTERS),
        "code": error.code,
    }


def _anthropic(error: HeadraceError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.http_status, InvalidRequest.code)
    message = _short(error.message, MAX_MESSAGE_CHARACTERS)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _short(text: str, limit: int) -> str:
    return _clean(text if len(text) <= limit else text[: limit - 1] + "…")


def _clean(text: str) -> str:
    """Without lone surrogates, which names taken from a body may hold and UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode()
