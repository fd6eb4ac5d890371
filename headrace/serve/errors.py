"""HeadraceError -> HTTP: status, headers and the body in the shape of the route's protocol.

Contract: the one place of the server that translates errors (docs/api.md has the table); the shapes
are those of `recipe/protocols/errors_wire.py`. An exception that is no HeadraceError is a bug: the
client gets a 500 without details, the log gets the traceback.
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
from headrace.recipe.converted import Protocol
from headrace.recipe.protocols.errors_wire import error_body

_RETRY_AFTER_S: dict[type[HeadraceError], float] = {Overloaded: 1, Draining: 10, EngineLost: 5}


def protocol_of(path: str) -> Protocol:
    """Whose error bodies a path answers with: OpenAI's unless the path belongs to Messages."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Protocol.MESSAGES
    return Protocol.CHAT


def error_response(
    error: HeadraceError,
    protocol: Protocol = Protocol.CHAT,
    *,
    close: bool = False,
    extra_headers: Mapping[str, str] | None = None,
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
    status, body = error_body(error, protocol)
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def from_http_exception(error: HTTPException, method: str, path: str) -> HeadraceError:
    """Starlette's own errors (unknown route, wrong method) in our terms."""
    if error.status_code == 404:
        return NotFound(
            f"There is no {path}. See /v1/models, /v1/chat/completions, /v1/responses and "
            "/v1/messages."
        )
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{method} is not possible on {path}; allowed: {allowed}.")
    return InvalidRequest(str(error.detail))


def internal_error(request_id: str) -> HeadraceError:
    """What a client is told about a bug."""
    return HeadraceError(f"The server failed on this request (id {request_id}); its log says why.")
