"""The ASGI application: routes and the layer around them.

Contract: `create_app` takes a finished ServerState and returns an application without side effects;
starting and stopping the engine is the business of `serve/run.py` (or of a test).
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.serve.middleware import RequestScope
from headrace.serve.routes.answers import COUNT_PATH, PATHS, AnswerRoute, CountRoute
from headrace.serve.routes.health import HealthRoutes
from headrace.serve.routes.models import ModelRoutes
from headrace.serve.state import ServerState


def create_app(state: ServerState) -> Starlette:
    """The application of one server."""
    health = HealthRoutes(state)
    models = ModelRoutes(state)
    app = Starlette(
        routes=[
            *(
                Route(path, AnswerRoute(state, protocol), methods=["POST"])
                for protocol, path in PATHS.items()
            ),
            Route(COUNT_PATH, CountRoute(state), methods=["POST"]),
            Route("/v1/models", models.list_models),
            Route("/v1/models/{name:path}", models.get_model),
            Route("/health/live", health.live),
            Route("/health/ready", health.ready),
            Route("/metrics", health.metrics),
        ],
        middleware=[Middleware(RequestScope, state=state)],
        # Starlette answers its own 404 and 405 in plain text; handed on, they get our body.
        exception_handlers={404: _hand_on, 405: _hand_on},
    )
    # A redirect would send the client to whatever its Host header says.
    app.router.redirect_slashes = False
    return app


async def _hand_on(request: Request, error: Exception) -> Response:
    raise error
