"""What the routes share: settings, engine, codec, model card, limits, metrics.

Contract: one `ServerState` per application, made by whoever starts the server and passed to
`create_app`; there are no globals, two servers can live in one process. `draining` and `model` are
the only fields that change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.config.server import ServerConfig
from headrace.errors import Draining, EngineLost, ModelNotFound, Overloaded
from headrace.recipe.codec import Codec
from headrace.recipe.protocols.responses_store import MemoryResponseStore, ResponseStore
from headrace.serve.auth import KeyRing
from headrace.serve.encoding import Encoders
from headrace.serve.engine_client import EngineClient
from headrace.serve.limits import RequestLimits
from headrace.serve.log import RequestLogger
from headrace.serve.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What GET /v1/models says about the model.

    description: one sentence for people, e.g. that the weights are random. details: more facts,
    given as the field `headrace`. max_model_len: tokens of prompt plus answer. created: Unix time.
    """

    id: str
    created: int
    max_model_len: int
    description: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)


class ServerState:
    """Everything one application works with; `close` it after the last request."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient,
        codec: Codec,
        logger: RequestLogger,
        model: ModelCard | None = None,
    ) -> None:
        """`model` is None while the model loads: then nothing is ready."""
        self.config = config
        self.engine = engine
        self.codec = codec
        self.logger = logger
        self.model = model
        self.keys = KeyRing(config.api_keys)
        self.limits = RequestLimits(config.max_requests, config.max_requests_per_key)
        self.metrics = Metrics(engine)
        self.encoders = Encoders(config.encode_threads)
        self.responses: ResponseStore | None = None
        if config.max_stored_responses:
            self.responses = MemoryResponseStore(
                max_responses=config.max_stored_responses, max_bytes=config.max_stored_bytes
            )
        self.draining = False
        self._was_ready = False

    @property
    def status(self) -> str:
        """One word for /health/ready: ready, draining, loading or restarting."""
        if self.draining:
            return "draining"
        if self.model is not None and self.engine.ready:
            self._was_ready = True
            return "ready"
        return "restarting" if self._was_ready else "loading"

    def require_ready(self) -> ModelCard:
        """The model, or Draining / Overloaded / EngineLost (all 503) while it cannot be used."""
        match self.status:
            case "draining":
                raise Draining("The server is shutting down and takes no new requests.")
            case "loading":
                raise Overloaded("The model is still loading.", retry_after_s=5)
            case "restarting":
                raise EngineLost("The engine is restarting.", retry_after_s=5)
        if self.model is None:
            raise Overloaded("The model is still loading.", retry_after_s=5)
        return self.model

    def require_model(self, name: str) -> ModelCard:
        """The model called `name`, or ModelNotFound with the name that exists."""
        model = self.require_ready()
        if name != model.id:
            raise ModelNotFound(
                f'The model "{name}" does not exist here. This server serves "{model.id}".',
                param="model",
            )
        return model

    def close(self) -> None:
        """Give the threads back."""
        self.encoders.close()
