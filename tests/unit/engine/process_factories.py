"""Engines without a model for the process tests; imported by the engine process by name."""

from __future__ import annotations

import os
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.engine.host import ProgressCallback
from headrace.engine.outputs import StepOutput
from headrace.engine.stats import EngineStats
from headrace.engine.wire import EngineInfo
from headrace.errors import CheckpointError, InvalidRequest

REFUSE = 900  # first prompt token: `add` raises
CRASH = 901  # `step` raises
HANG = 902  # `step` never returns


class ScriptedEngine:
    """A prompt (first, count, delay_ms) gives the tokens first, first + 1, ..., one per step."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Request, int]] = {}
        self._numbers: dict[str, int] = {}
        self._pending: list[TokenChunk] = []
        self._steps = 0

    def add(self, request: Request) -> int:
        if request.prompt_token_ids[0] == REFUSE:
            raise InvalidRequest("token 900 is refused.", param="prompt")
        self._running[request.request_id] = (request, 0)
        self._numbers[request.request_id] = len(self._numbers)
        return self._numbers[request.request_id]

    def abort(self, request_id: str) -> None:
        entry = self._running.pop(request_id, None)
        if entry is not None:
            self._pending.append(TokenChunk(request_id, entry[1], (), FinishReason.ABORT))

    def has_work(self) -> bool:
        return bool(self._running or self._pending)

    def step(self) -> StepOutput:
        chunks, self._pending = self._pending, []
        self._steps += 1
        delay_ms = 0
        for request_id, (request, done) in list(self._running.items()):
            first, count, request_delay_ms = request.prompt_token_ids
            if first == CRASH:
                raise RuntimeError("the step went wrong")
            if first == HANG:
                time.sleep(3600)
            delay_ms = max(delay_ms, request_delay_ms)
            finish = FinishReason.LENGTH if done + 1 == count else None
            chunks.append(TokenChunk(request_id, done, (first + done,), finish))
            if finish is None:
                self._running[request_id] = (request, done + 1)
            else:
                del self._running[request_id]
        time.sleep(delay_ms / 1000)
        return StepOutput.of_chunks(chunks, [self._numbers[c.request_id] for c in chunks])

    def stats(self) -> EngineStats:
        zeros = EngineStats(
            **{field.name: 0 for field in fields(EngineStats) if field.default is MISSING}
        )
        return replace(zeros, running=len(self._running), steps=self._steps)


def scripted(
    checkpoint: Path, config: EngineConfig, progress: ProgressCallback
) -> tuple[ScriptedEngine, EngineInfo]:
    for done_bytes in (0, 50, 100):
        progress(done_bytes, 100)
    print("a library that prints to stdout")
    return ScriptedEngine(), EngineInfo(
        model_name=config.served_model_name or checkpoint.name,
        architecture="Scripted",
        dtype=config.dtype or "float32",
        vocab_size=1000,
        max_model_len=4096,
        eos_token_id=0,
        load_time_s=0.0,
    )


def bad_checkpoint(
    checkpoint: Path, config: EngineConfig, progress: ProgressCallback
) -> tuple[ScriptedEngine, EngineInfo]:
    raise CheckpointError(f"{checkpoint}: model.safetensors is missing.", param="weights")


def dies_while_loading(
    checkpoint: Path, config: EngineConfig, progress: ProgressCallback
) -> tuple[ScriptedEngine, EngineInfo]:
    os._exit(3)


def never_loads(
    checkpoint: Path, config: EngineConfig, progress: ProgressCallback
) -> tuple[ScriptedEngine, EngineInfo]:
    time.sleep(3600)
    raise AssertionError("the process should have been killed")


def dies_when_restarted(
    checkpoint: Path, config: EngineConfig, progress: ProgressCallback
) -> tuple[ScriptedEngine, EngineInfo]:
    """Loads once; `checkpoint` is a marker file."""
    if checkpoint.exists():
        raise CheckpointError("the disk is gone.")
    checkpoint.touch()
    return scripted(checkpoint, config, progress)
