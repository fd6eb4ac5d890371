"""One log line per request, as text or JSON on stderr.

Contract: a line has the request id, the route, the status (499 when the client went away), token
counts and times; it never holds prompt text, answers or keys. Made per server, no global
configuration of structlog.
"""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

_PROBES = frozenset({"/health/live", "/health/ready", "/metrics"})


@dataclass(slots=True)
class RequestRecord:
    """What is known about a request so far; filled by routes, written when it ends."""

    method: str
    path: str
    id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    caller: str = "-"
    route: str = "other"
    status: int = 0
    code: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self.started_s

    def saw_tokens(self, count: int) -> float | None:
        """Count answer tokens; the seconds to the first one if these hold it."""
        is_first = count > 0 and self.first_token_s is None
        self.completion_tokens = (self.completion_tokens or 0) + count
        if is_first:
            self.first_token_s = self.elapsed_s
            return self.first_token_s
        return None


def log_processors(log_format: str, out: TextIO) -> list[Processor]:
    """structlog processors of all log lines of a server: text for people, or JSON."""
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=out.isatty(), pad_event_to=0, pad_level=False, sort_keys=False
        )
    )
    common: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # The renderer for people formats tracebacks itself.
    if log_format == "json":
        common.append(structlog.processors.format_exc_info)
    return [*common, renderer]


class RequestLogger:
    """Writes request lines and failures."""

    def __init__(self, log_format: str = "text", stream: TextIO | None = None) -> None:
        out = stream if stream is not None else sys.stderr
        self._log: Any = structlog.wrap_logger(
            structlog.PrintLogger(out),
            processors=log_processors(log_format, out),
            wrapper_class=structlog.BoundLogger,
        )

    def request(self, record: RequestRecord) -> None:
        """The line of a finished request; probes that ask every second get none."""
        if record.route in _PROBES:
            return
        fields: dict[str, object] = {
            "id": record.id,
            "method": record.method,
            "path": _printable(record.path),
            "status": record.status,
            "caller": record.caller,
            "ms": round(record.elapsed_s * 1e3, 1),
        }
        optional = {
            "code": record.code,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "ttft_ms": None
            if record.first_token_s is None
            else round(record.first_token_s * 1e3, 1),
        }
        fields.update({name: value for name, value in optional.items() if value is not None})
        # 503 is how the server protects itself, 500 is a fault.
        level = self._log.error if record.status == 500 else self._log.info
        level("request", **fields)

    def bug(self, record: RequestRecord, error: BaseException) -> None:
        """A failure that no user caused, with its traceback."""
        self._log.error(
            "internal error", id=record.id, path=_printable(record.path), exc_info=error
        )

    def info(self, event: str, **fields: object) -> None:
        """Something about the server itself."""
        self._log.info(event, **fields)


def _printable(path: str) -> str:
    """A path comes from the client: it must not forge log lines or control a terminal."""
    return "".join(char if char.isprintable() else "?" for char in path[:200])
