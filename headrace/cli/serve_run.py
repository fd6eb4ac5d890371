"""What `headrace serve` does once its arguments are read: check, show, run.

Contract: everything that can be refused cheaply (settings, tokenizer, prompt format, address) is
refused before the engine process starts. All text goes to stderr. Called by `cli/serve.py`, which
stays small so that `--help` imports nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from headrace.config import EngineConfig, build_section, check_sections, read_settings
from headrace.config.server import ServerConfig
from headrace.engine.process import EngineClient, SupervisionConfig
from headrace.errors import CheckpointError
from headrace.recipe.codec import ChatCodec
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
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} is no directory. A checkpoint is a directory with config.json, "
            "tokenizer.json and *.safetensors; `headrace tiny --out DIR` writes one to try."
        )
    note = read_note(checkpoint)
    codec = ChatCodec.from_directory(checkpoint)
    with _supervisor_log(server_config.log_format):
        await _serve(checkpoint, server_config, engine_config, codec, note)


@contextmanager
def _supervisor_log(log_format: str) -> Iterator[None]:
    """The engine's supervisor logs through structlog's defaults: same lines, same place."""
    structlog.configure(
        processors=log_processors(log_format, sys.stderr),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.reset_defaults()


async def _serve(
    checkpoint: Path,
    server_config: ServerConfig,
    engine_config: EngineConfig,
    codec: ChatCodec,
    note: dict[str, object],
) -> None:
    engine = EngineClient(
        checkpoint, engine_config, SupervisionConfig(factory=SERVE_ENGINE_FACTORY)
    )
    state = ServerState(server_config, engine, codec, RequestLogger(server_config.log_format))
    screen = StartUpScreen(checkpoint, bool(server_config.api_keys))

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
    """What a person sees on stderr while the server starts and stops."""

    def __init__(self, checkpoint: Path, has_keys: bool) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._checkpoint = checkpoint
        self._has_keys = has_keys
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def listening(self, url: str) -> None:
        """The socket is open."""
        self._print(f"headrace: loading {self._checkpoint} ({url}/health/ready says when done)")

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Bytes of weights read; a bar on a terminal, nothing in a log file."""
        if not self._console.is_terminal:
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
        self._print(f"headrace: serving {model.id} at {url} (context {model.max_model_len} tokens)")
        if model.description is not None:
            self._print(f"headrace: NOTE: {model.description}")
        key = "-H 'authorization: Bearer YOUR_KEY' " if self._has_keys else ""
        self._print("headrace: try it:")
        self._print(
            f"  curl -N {url}/v1/chat/completions {key}-H 'content-type: application/json' "
            f'-d \'{{"model": "{model.id}", "stream": true, "max_tokens": 64, '
            '"messages": [{"role": "user", "content": "Hello"}]}\''
        )

    def draining(self, running: int, timeout_s: float) -> None:
        """A signal came."""
        self._print(
            f"headrace: stopping; {running} running requests have {timeout_s:g} s to finish "
            "(a second signal stops at once)"
        )

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)
