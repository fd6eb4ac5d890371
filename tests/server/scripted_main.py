"""A whole server process around the scripted engine, for tests of signals.

Prints `listening URL` and `ready URL` on stdout. The answer takes about `argv[1]` seconds.
"""

from __future__ import annotations

import asyncio
import sys

from headrace.config.server import ServerConfig
from headrace.core.output import FinishReason
from headrace.core.request import Request
from headrace.serve.log import RequestLogger
from headrace.serve.model_card import make_card
from headrace.serve.run import run_server
from headrace.serve.state import ModelCard, ServerState
from tests.server.scripted import CODEC, CONTEXT, MODEL, Pause, ScriptedEngine, Step


class Facts:
    """What the engine says."""

    model_name = MODEL
    max_model_len = CONTEXT


class Hooks:
    """Tell the test."""

    def listening(self, url: str) -> None:
        print("listening", url, flush=True)

    def ready(self, url: str, model: ModelCard) -> None:
        print("ready", url, flush=True)

    def draining(self, running: int, timeout_s: float) -> None:
        print("draining", running, flush=True)

    def stopped(self, finished: int, cut: int) -> None:
        print("stopped", finished, cut, flush=True)


async def main(answer_s: float, load_s: float, drain_timeout_s: float) -> None:
    """Serve until a signal comes."""

    def script(request: Request) -> list[Step]:
        return ["begin ", Pause(answer_s), "end", FinishReason.STOP]

    async def load() -> Facts:
        await asyncio.sleep(load_s)
        return Facts()

    engine = ScriptedEngine(script)
    config = ServerConfig(port=0, drain_timeout_s=drain_timeout_s)
    state = ServerState(config, engine, CODEC, RequestLogger())
    await run_server(state, load, engine, lambda facts: make_card({}, facts), Hooks())
    print("closed" if engine.closed else "not closed", engine.drained_s, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*(float(argument) for argument in sys.argv[1:4])))
