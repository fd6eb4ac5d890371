"""GET /health/live, /health/ready and /metrics.

Contract: live says that the process answers; ready is 200 only while new requests are taken, 503
while the model loads, the engine restarts or the server drains. Orchestrators use both.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.serve.metrics import CONTENT_TYPE
from headrace.serve.middleware import RECORD
from headrace.serve.state import ServerState


class HealthRoutes:
    """Handlers of one application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def live(self, request: Request) -> Response:
        """Always 200."""
        request.scope[RECORD].route = "/health/live"
        return _json({"status": "live"}, 200)

    async def ready(self, request: Request) -> Response:
        """200 or 503 with the state in one word."""
        request.scope[RECORD].route = "/health/ready"
        status = self._state.status
        return _json({"status": status}, 200 if status == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        request.scope[RECORD].route = "/metrics"
        return Response(self._state.metrics.render(), media_type=CONTENT_TYPE)


def _json(body: dict[str, str], status: int) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
