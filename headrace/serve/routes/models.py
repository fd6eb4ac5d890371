"""GET /v1/models and /v1/models/{name}.

Contract: the OpenAI shape, plus what a user must know: the context length, and a description when
the answers are not to be taken seriously (random weights).
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.serve.middleware import RECORD
from headrace.serve.state import ModelCard, ServerState


class ModelRoutes:
    """Handlers of one application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list_models(self, request: Request) -> Response:
        """All models: the one that is served, none while it loads."""
        request.scope[RECORD].route = "/v1/models"
        model = self._state.model
        data = [] if model is None else [_to_wire(model)]
        return _json({"object": "list", "data": data})

    async def get_model(self, request: Request) -> Response:
        """One model by name."""
        request.scope[RECORD].route = "/v1/models/{name}"
        return _json(_to_wire(self._state.require_model(request.path_params["name"])))


def _to_wire(model: ModelCard) -> dict[str, object]:
    card: dict[str, object] = {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "headrace",
        "max_model_len": model.max_model_len,
    }
    if model.description is not None:
        card["description"] = model.description
    if model.details:
        card["headrace"] = dict(model.details)
    return card


def _json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
