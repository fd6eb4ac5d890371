"""A scripted engine, and the server around it on a real socket.

`ScriptedEngine` follows the `EngineClient` protocol: it plays a script of token chunks, pauses and
errors for every request and notes what was asked of it. `LiveServer` runs the application with
uvicorn on a loopback port in a thread of its own.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from types import TracebackType
from typing import Any

import httpx
import uvicorn

from headrace.config.server import ServerConfig
from headrace.core.output import FinishReason, TokenChunk, TokenLogprobs
from headrace.core.request import Request
from headrace.engine.stats import EngineStats
from headrace.engine.stops import StopStrings
from headrace.model.tiny_tokenizer import IMAGE, NOISE, control_ids, tiny_tokenizer
from headrace.recipe import Codec, ConfigTokenIds, Tokenizer, bind
from headrace.serve.app import create_app
from headrace.serve.connection import connection_class
from headrace.serve.log import RequestLogger
from headrace.serve.state import ModelCard, ServerState

IDS = control_ids()
EOS, THINK_END = IDS["<｜end▁of▁sentence｜>"], IDS["</think>"]
TOKENIZER = Tokenizer(json.dumps(tiny_tokenizer()).encode())
CODEC = Codec(TOKENIZER, bind(TOKENIZER, ConfigTokenIds(EOS, IDS[IMAGE], IDS[NOISE])))
MODEL = "scripted"
CONTEXT = 4096
USER = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Pause:
    """Wait, without a chunk; with `until`, for an event that the test sets."""

    seconds: float = 0.0
    until: threading.Event | None = None


@dataclass(frozen=True)
class Last:
    """The last chunk: tokens and why the answer ends. At STOP the last token is the stop token."""

    finish: FinishReason
    tokens: Sequence[int] = ()


@dataclass(frozen=True)
class Of:
    """A step of another choice than the first."""

    choice: int
    step: Sequence[int] | str | Last | FinishReason


Step = Sequence[int] | str | Pause | Last | FinishReason | Of | Exception
Script = Callable[[Request], Iterable[Step]]


def answer(text: str = "Hello there", *, reasoning: str | None = None) -> Script:
    """A script that answers token by token and ends with EOS."""

    def script(request: Request) -> Sequence[Step]:
        ids = TOKENIZER.encode(text)
        if reasoning is not None:
            ids = [*TOKENIZER.encode(reasoning), THINK_END, *ids]
        return [*([token] for token in ids), Last(FinishReason.STOP, [EOS])]

    return script


def call_ids(name: str, city: str) -> list[int]:
    """Ids of the markup of one tool call with one parameter."""
    dsml = TOKENIZER.added[CODEC.special.dsml]
    parts = (
        "<",
        "tool_calls>\n<",
        f'invoke name="{name}">\n<',
        f'parameter name="city" string="true">{city}</',
        "parameter>\n</",
        "invoke>\n</",
        "tool_calls>",
    )
    ids = TOKENIZER.encode(parts[0])
    for part in parts[1:]:
        ids += [dsml, *TOKENIZER.encode(part)]
    return ids


def calling(
    city: str = "Paris", *, text: str = "Let me see.", reasoning: str | None = None
) -> Script:
    """A script that says something and then calls the tool `weather`."""

    def script(request: Request) -> Sequence[Step]:
        ids = TOKENIZER.encode(text) + call_ids("weather", city)
        if reasoning is not None:
            ids = [*TOKENIZER.encode(reasoning), THINK_END, *ids]
        return [*([token] for token in ids), Last(FinishReason.STOP, [EOS])]

    return script


class ScriptedChoice:
    """Turns the steps of one choice into chunks; ends it at a stop string like the engine."""

    def __init__(self, request: Request, choice: int, cached_tokens: int = 0) -> None:
        self._request = request
        self._cached_tokens = cached_tokens
        self._choice = choice
        self._index = 0
        self.ended = False
        sampling = request.sampling
        self._stops = StopStrings(
            sampling.stop,
            TOKENIZER.detokenizer(skip_special=False),
            sampling.stop_scope,
            sampling.min_tokens,
        )

    def chunk(self, step: Sequence[int] | str | Last | FinishReason) -> TokenChunk:
        """The chunk of a step; of its tokens those up to a stop string."""
        if isinstance(step, FinishReason):
            step = Last(step)
        finish = step.finish if isinstance(step, Last) else None
        tokens = step.tokens if isinstance(step, Last) else step
        tokens = tuple(TOKENIZER.encode(tokens) if isinstance(tokens, str) else tokens)
        found = None
        for count, token in enumerate(tokens, 1):
            found = self._stops.push(token)
            if found is not None:
                tokens, finish = tokens[:count], FinishReason.STOP
                break
        chunk = TokenChunk(
            self._request.request_id,
            self._index,
            tokens,
            finish,
            "broken" if finish is FinishReason.ERROR else None,
            "internal_error" if finish is FinishReason.ERROR else None,
            choice=self._choice,
            stop=None if found is None else found.stop,
            stop_cut=0 if found is None else found.cut,
            logprobs=self._logprobs(tokens),
            cached_tokens=self._cached_tokens,
        )
        self._cached_tokens = 0
        self._index += len(tokens)
        self.ended = finish is not None
        return chunk

    def _logprobs(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
        """-0.5 for the first token, -1.5 for the second, ...; the best ids are 0, 1, ...."""
        count = self._request.sampling.logprobs
        if count is None:
            return None
        best = tuple(range(count)), tuple(-0.25 * n for n in range(count))
        return tuple(TokenLogprobs(-0.5 - self._index - n, *best) for n in range(len(tokens)))


class ScriptedEngine:
    """Plays `script(request)`; text in a script stands for its ids."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or answer(reasoning="Hm.")
        self.ready = True
        self.restarts = 0
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.produced = 0
        self.cached_tokens = 0  # what the first chunk of a choice says
        self.drained_s: float | None = None
        self.closed = False

    async def submit(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of the script, with gapless indices."""
        self.requests.append(request)
        self.running.add(request.request_id)
        choices = [
            ScriptedChoice(request, number, self.cached_tokens)
            for number in range(request.sampling.n)
        ]
        try:
            for step in self.script(request):
                if request.request_id in self.aborted:
                    step = FinishReason.ABORT
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Pause):
                    await self._pause(step, request)
                    continue
                number, part = (step.choice, step.step) if isinstance(step, Of) else (0, step)
                if choices[number].ended:
                    continue
                chunk = choices[number].chunk(part)
                self.produced += len(chunk.tokens)
                await asyncio.sleep(0)
                yield chunk
                if all(choice.ended for choice in choices):
                    return
        finally:
            self.running.discard(request.request_id)

    async def _pause(self, pause: Pause, request: Request) -> None:
        end = time.monotonic() + (pause.seconds or 30.0)
        while time.monotonic() < end and request.request_id not in self.aborted:
            if pause.until is not None and pause.until.is_set():
                return
            await asyncio.sleep(0.005)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def drain(self, timeout_s: float) -> None:
        self.drained_s = timeout_s
        self.aborted += list(self.running)

    async def close(self) -> None:
        self.closed = True

    async def wait_failed(self) -> str:
        await asyncio.Event().wait()
        return ""

    def stats(self) -> EngineStats:
        return EngineStats(
            **{field.name: 0 for field in fields(EngineStats) if field.default is MISSING}
        )


def make_state(
    engine: ScriptedEngine | None = None, *, loaded: bool = True, **settings: Any
) -> ServerState:
    """Everything an application needs; its log goes to memory (`log_of`)."""
    card = ModelCard(MODEL, 1_700_000_000, CONTEXT) if loaded else None
    logger = RequestLogger("json", io.StringIO())
    config = ServerConfig(**settings)
    return ServerState(config, engine or ScriptedEngine(), CODEC, logger, card)


class LiveServer:
    """The server on a free loopback port; a context manager."""

    def __init__(
        self, engine: ScriptedEngine | None = None, *, loaded: bool = True, **settings: Any
    ) -> None:
        self.engine = engine or ScriptedEngine()
        self.log = io.StringIO()
        self.state = make_state(self.engine, loaded=loaded, **settings)
        self.state.logger = RequestLogger("json", self.log)
        config = self.state.config
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(self.state),
                host="127.0.0.1",
                port=0,
                http=connection_class(config.header_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=round(config.idle_timeout_s),
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run)
        self.port = 0

    def __enter__(self) -> LiveServer:
        self._thread.start()
        wait_for(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self.state.close()
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def chat(self, **fields: Any) -> httpx.Response:
        """One chat request, not streamed unless asked for."""
        body = {"model": MODEL, "messages": USER, **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=20)

    def log_lines(self) -> list[dict[str, Any]]:
        """Request lines of the log so far."""
        lines = [
            json.loads(line)
            for line in self.log.getvalue().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return [line for line in lines if line["event"] == "request"]


@contextmanager
def one_log_line(live: LiveServer) -> Iterator[dict[str, Any]]:
    """The request line that the block causes; filled when the block ends.

    A line is written after its response, so it may come later than the response.
    """
    before = len(live.log_lines())
    line: dict[str, Any] = {}
    yield line
    wait_for(lambda: len(live.log_lines()) > before)
    line.update(live.log_lines()[before])


def wait_for(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds; fails when it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """Data of the events of a stream, parsed; `[DONE]` stays text."""
    data = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def running_at(url: str) -> int:
    """Requests that a server is answering, the one that asks left out."""
    text = httpx.get(f"{url}/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("headrace_requests_running ")]
    return int(float(line.split()[1])) - 1
