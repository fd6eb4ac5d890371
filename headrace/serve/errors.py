"""HeadraceError -> HTTP: status, headers and the OpenAI error body.

Contract: the one place of the server that translates errors (docs/api.md has the table). An
exception that is no HeadraceError is a bug: the client gets a 500 without details, the log gets the
traceback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace.errors import (
    Draining,
    EngineLost,
    HeadraceError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
}
_RETRY_AFTER_S: dict[type[HeadraceError], float] = {Overloaded: 1, Draining: 10, EngineLost: 5}
_MAX_MESSAGE_CHARACTERS = 2_000


def error_body(error: HeadraceError) -> bytes:
    """`{"error": {message, type, param, code}}`; long user input in a message is shortened."""
    message = error.message
    if len(message) > _MAX_MESSAGE_CHARACTERS:
        message = message[: _MAX_MESSAGE_CHARACTERS - 1] + "…"
    body = {
        "message": message,
        "type": _TYPES.get(error.http_status, "invalid_request_error"),
        "param": error.param[:200] if error.param is not None else None,
        "code": error.code,
    }
    # A name taken from a body may hold characters that UTF-8 cannot carry.
    return msgspec.json.encode({"error": {key: _clean(value) for key, value in body.items()}})


def error_response(
    error: HeadraceError, *, close: bool = False, extra_headers: Mapping[str, str] | None = None
) -> Response:
    """The response of an error; `close` ends the connection, e.g. with a body still unread."""
    headers = dict(extra_headers or {})
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.http_status in (429, 503):
        retry_after_s = _RETRY_AFTER_S.get(type(error), 1)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    if close:
        headers["connection"] = "close"
    return Response(error_body(error), error.http_status, headers, media_type="application/json")


def from_http_exception(error: HTTPException, method: str, path: str) -> HeadraceError:
    """Starlette's own errors (unknown route, wrong method) in our terms."""
    if error.status_code == 404:
        return NotFound(f"There is no {path}. See /v1/models and /v1/chat/completions.")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{method} is not possible on {path}; allowed: {allowed}.")
    return InvalidRequest(str(error.detail))


def internal_error(request_id: str) -> HeadraceError:
    """What a client is told about a bug."""
    return HeadraceError(f"The server failed on this request (id {request_id}); its log says why.")


def _clean(value: str | None) -> str | None:
    return None if value is None else value.encode("utf-8", "replace").decode("utf-8")
