"""The one exception hierarchy of headrace.

Contract: every error that a user can cause or must see is a `HeadraceError`; the class knows its
HTTP status, its machine-readable code and the exit code of the command line. The text says what
was wrong, what is allowed and what to do. The server maps them in `serve/errors.py`, the command
line in `cli/main.py`; nobody else translates errors.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors raised on purpose; `param` names the offending field if there is one."""

    http_status = 500
    code = "internal_error"
    exit_code = 1

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InternalError(HeadraceError):
    """A part of headrace broke another's contract (double release, unknown key): always a bug."""


# --- what a request can do wrong -------------------------------------------------------------


class InvalidRequest(HeadraceError):
    """A field of a request is malformed or out of range."""

    http_status = 400
    code = "invalid_request_error"
    exit_code = 2


class InvalidBody(InvalidRequest):
    """The body is not JSON, or does not have the fields and types of its protocol."""


class ContextTooLong(InvalidRequest):
    """Prompt (plus requested output) exceeds the context; the text says limit and length."""

    code = "context_length_exceeded"


class InvalidGrammar(InvalidRequest):
    """A grammar cannot be compiled: malformed, contradictory, too large, or not supported."""

    code = "invalid_grammar"


class StreamError(HeadraceError):
    """Engine output that the output parser cannot read; it ends the stream."""


class Unauthorized(HeadraceError):
    """No API key was given."""

    http_status = 401
    code = "missing_api_key"


class Forbidden(HeadraceError):
    """The API key is not one of the configured ones."""

    http_status = 403
    code = "invalid_api_key"


class ModelNotFound(HeadraceError):
    """The request names a model that this server does not serve."""

    http_status = 404
    code = "model_not_found"


class NotFound(HeadraceError):
    """No such route."""

    http_status = 404
    code = "not_found"


class MethodNotAllowed(HeadraceError):
    """The route exists, the method does not."""

    http_status = 405
    code = "method_not_allowed"


class BodyTooLarge(HeadraceError):
    """The request body exceeds the configured limit."""

    http_status = 413
    code = "body_too_large"


class LimitReached(HeadraceError):
    """A limit that belongs to the caller (requests at once per key) is reached."""

    http_status = 429
    code = "rate_limit_exceeded"


class Cancelled(HeadraceError):
    """The client went away; 499 appears in the log only."""

    http_status = 499
    code = "client_closed_request"


class Overloaded(HeadraceError):
    """The queue of the engine is full; try again after `retry_after_s`."""

    http_status = 503
    code = "overloaded"


class Draining(HeadraceError):
    """The server is shutting down and takes no new requests."""

    http_status = 503
    code = "draining"


class EngineLost(HeadraceError):
    """The engine process died while it worked on the request."""

    http_status = 503
    code = "engine_lost"


# --- what a deployment can do wrong ----------------------------------------------------------


class ConfigError(HeadraceError):
    """A configuration value is unknown, malformed or impossible; `param` is its dotted name."""

    code = "invalid_config"
    exit_code = 2


class ModelConfigError(ConfigError):
    """config.json describes an unknown architecture or an impossible combination."""

    code = "invalid_model_config"
    exit_code = 3


class CheckpointError(HeadraceError):
    """Files of a checkpoint are missing, damaged or do not fit the config."""

    code = "invalid_checkpoint"
    exit_code = 3


class UnsupportedError(HeadraceError):
    """No implementation fits what was asked; the text names the nearest working choice."""

    code = "unsupported"
    exit_code = 3


class OutputError(HeadraceError):
    """Results could not be written (disk full, permission)."""

    code = "output_error"
    exit_code = 4


# --- errors that come as their code ----------------------------------------------------------

# Only classes with a code of their own: the others share that of their base.
_CLASS_OF_CODE = {
    cls.code: cls
    for cls in list(vars().values())
    if isinstance(cls, type) and issubclass(cls, HeadraceError) and "code" in vars(cls)
}


def rebuild_error(
    code: str, message: str, param: str | None = None, retry_after_s: float | None = None
) -> HeadraceError:
    """The error that another process or layer raised (unknown code: HeadraceError)."""
    cls = _CLASS_OF_CODE.get(code, HeadraceError)
    return cls(message, param=param, retry_after_s=retry_after_s)


def is_refusal(code: str) -> bool:
    """Whether an error of this code is the request's own, not one of headrace or the machine."""
    return _CLASS_OF_CODE.get(code, HeadraceError).http_status < 500
