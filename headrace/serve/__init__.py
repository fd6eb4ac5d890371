"""The HTTP server: routes of three protocols in front of one engine.

`create_app` makes the ASGI application for any `EngineClient`; `run` listens on a socket and obeys
signals. The routes do HTTP only: text and ids are the business of `recipe`.
"""

from __future__ import annotations

from headrace.serve.app import create_app
from headrace.serve.engine_client import EngineClient, EngineFacts
from headrace.serve.state import ModelCard, ServerState

__all__ = ["EngineClient", "EngineFacts", "ModelCard", "ServerState", "create_app"]
