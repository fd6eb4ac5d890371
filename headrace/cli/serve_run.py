"""What `headrace serve` does once its arguments are read: check, show, run.

Contract: everything that can be refused cheaply (settings, tokenizer, prompt format, address) is
refused before the engine process starts. All text goes to stderr. Called by `cli/serve.py`, which
stays small so that `--help` imports nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from headrace.config import (
    EngineConfig,
    build_section,
    check_sections,
    read_settings,
    unknown_variables,
)
from headrace.config.server import ServerConfig
from headrace.core.files import require_checkpoint
from headrace.engine.process import EngineClient, SupervisionConfig
from headrace.recipe import Codec
from headrace.serve.log import RequestLogger, log_processors
from headrace.serve.model_card import make_card, read_note
from headrace.serve.run import run_server
from headrace.serve.state import ModelCard, ServerState

SECTIONS = ("engine", "server")
SERVE_ENGINE_FACTORY = "headrace.cli.serve_engine:load_engine"


async def serve(
    checkpoint: Path, config_path: Path | None, overrides: Mapping[str, object]
) -> None:
    """Run the server until a signal ends it.

    Raises ConfigError, CheckpointError, ModelConfigError, UnsupportedError, EngineLost.
    """
    settings = read_settings(config_path, overrides=overrides)
    check_sections(settings, SECTIONS)
    server_config = build_section(ServerConfig, "server", settings).with_key_file()
    engine_config = build_section(EngineConfig, "engine", settings)
    require_checkpoint(checkpoint)
    note = read_note(checkpoint)
    codec = Codec.from_directory(checkpoint)
    with other_logs(server_config.log_format):
        await _serve(checkpoint, server_config, engine_config, codec, note)


@contextmanager
def other_logs(log_format: str) -> Iterator[None]:
    """The engine's supervisor and uvicorn log as the server does: same lines, same place."""
    structlog.configure(
        processors=log_processors(log_format, sys.stderr),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    uvicorn_log, handler = logging.getLogger("uvicorn.error"), _ToLog()
    uvicorn_log.addHandler(handler)
    try:
        yield
    finally:
        uvicorn_log.removeHandler(handler)
        structlog.reset_defaults()


class _ToLog(logging.Handler):
    """Records of Python's logging as lines of the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with its traceback if it has one."""
        log = structlog.get_logger()
        log.log(record.levelno, record.getMessage().strip(), exc_info=record.exc_info)


async def _serve(
    checkpoint: Path,
    server_config: ServerConfig,
    engine_config: EngineConfig,
    codec: Codec,
    note: dict[str, object],
) -> None:
    engine = EngineClient(
        checkpoint, engine_config, SupervisionConfig(factory=SERVE_ENGINE_FACTORY)
    )
    state = ServerState(server_config, engine, codec, RequestLogger(server_config.log_format))
    screen = StartUpScreen(checkpoint, server_config, state.logger)
    for warning in unknown_variables():
        screen.warn(warning)

    try:
        await run_server(
            state,
            lambda: engine.start(screen.progress),
            engine,
            lambda facts: make_card(note, facts),
            screen,
        )
    finally:
        screen.close()


class StartUpScreen:
    """What a person sees on stderr while the server starts and stops; with a JSON log, its lines.

    In JSON mode every line of stderr is one JSON object: the sentences become events.
    """

    def __init__(self, checkpoint: Path, config: ServerConfig, logger: RequestLogger) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._checkpoint = checkpoint
        self._has_keys = bool(config.api_keys)
        self._json_log = logger if config.log_format == "json" else None
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def listening(self, url: str) -> None:
        """The socket is open."""
        self._say(
            f"loading {self._checkpoint} ({url}/health/ready says when done)",
            "loading",
            checkpoint=str(self._checkpoint),
            url=url,
        )

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Bytes of weights read; a bar on a terminal, nothing in a log file."""
        if not self._console.is_terminal or self._json_log is not None:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("weights"),
                BarColumn(),
                DownloadColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("weights", total=total_bytes)
            self._progress.start()
        self._progress.update(self._task, completed=done_bytes, total=total_bytes)

    def ready(self, url: str, model: ModelCard) -> None:
        """Requests are taken."""
        self.close()
        self._say(
            f"serving {model.id} at {url} (context {model.max_model_len} tokens)",
            "serving",
            model=model.id,
            url=url,
            max_model_len=model.max_model_len,
        )
        if model.description is not None:
            self._say(f"NOTE: {model.description}", "note", text=model.description)
        if self._json_log is not None:
            return
        key = "-H 'authorization: Bearer YOUR_KEY' " if self._has_keys else ""
        self._say("try it:", "")
        self._print(
            f"  curl -N {url}/v1/chat/completions {key}-H 'content-type: application/json' "
            f'-d \'{{"model": "{model.id}", "stream": true, "max_tokens": 64, '
            '"messages": [{"role": "user", "content": "Hello"}]}\''
        )

    def draining(self, running: int, timeout_s: float) -> None:
        """A signal came."""
        requests = f"{_requests(running)} {'has' if running == 1 else 'have'}"
        self._say(
            f"stopping; {requests} {timeout_s:g} s to finish (a second signal stops at once)"
            if running
            else "stopping; no request is running",
            "stopping",
            running=running,
            timeout_s=timeout_s,
        )

    def stopped(self, finished: int, cut: int) -> None:
        """All is over."""
        self._say(
            f"stopped; {_requests(finished)} finished, {cut} cut off"
            if finished + cut
            else "stopped",
            "stopped",
            finished=finished,
            cut=cut,
        )

    def warn(self, text: str) -> None:
        """Something that is probably a mistake."""
        self._say(f"warning: {text}", "warning", text=text)

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, sentence: str, event: str, **fields: object) -> None:
        if self._json_log is not None:
            self._json_log.info(event, **fields)
        else:
            self._print(f"headrace: {sentence}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)


def _requests(count: int) -> str:
    return "1 running request" if count == 1 else f"{count} running requests"
