"""A checkpoint folder without weights and an engine that echoes, for the tests of `generate`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.generate_run import GenerateOptions, generate
from headrace.cli.prompt_file import PromptOptions
from headrace.config import EngineConfig
from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.errors import ContextTooLong, Overloaded
from headrace.model.tiny_presets import preset_config
from headrace.model.tiny_tokenizer import control_ids, tiny_tokenizer
from headrace.recipe import Tokenizer

TEXT = "héllo wörld"
BROKEN_TOKEN = 77  # a prompt that ends with it fails while it runs


@functools.cache
def codec_files() -> dict[str, str]:
    config = preset_config("tiny-8", quantised=True, compressed_vocab=100)
    return {"config.json": json.dumps(config), "tokenizer.json": json.dumps(tiny_tokenizer())}


def write_codec_files(directory: Path) -> Path:
    """config.json and tokenizer.json: enough for everything but the model."""
    directory.mkdir()
    for name, content in codec_files().items():
        (directory / name).write_text(content)
    (directory / "model.safetensors").touch()
    return directory


@dataclass(frozen=True)
class Spec:
    bos_id: int = 0


@dataclass
class EchoEngine:
    """Answers each prompt by `text`, one token a step, then EOS. queue: requests held at most."""

    tokenizer: Tokenizer
    text: str = TEXT
    queue: int = 1000
    on_step: Callable[[], None] = lambda: None
    max_model_len: int = 4096
    spec: Spec = field(default_factory=Spec)
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    most_running: int = 0
    loads: int = 0
    config: EngineConfig | None = None

    def __post_init__(self) -> None:
        self._running: dict[str, tuple[Request, int]] = {}
        eos = control_ids()["<｜end▁of▁sentence｜>"]
        self._answer = [*self.tokenizer.encode(self.text), eos]

    def load(
        self, checkpoint: Path, config: EngineConfig, progress: Callable[[int, int], None]
    ) -> EchoEngine:
        self.loads += 1
        self.config = config
        progress(1, 2)
        progress(2, 2)
        return self

    def add(self, request: Request) -> None:
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise ContextTooLong("The prompt is too long.", param="prompt")
        if len(self._running) >= self.queue:
            raise Overloaded("The queue is full.", retry_after_s=1.0)
        self.requests.append(request)
        self._running[request.request_id] = (request, 0)
        self.most_running = max(self.most_running, len(self._running))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def step(self) -> list[TokenChunk]:
        self.on_step()
        chunks = []
        for request_id, (request, index) in list(self._running.items()):
            if request.prompt_token_ids[-1] == BROKEN_TOKEN:
                chunk = TokenChunk(
                    request_id, index, (), FinishReason.ERROR, "not finite", "internal_error"
                )
            else:
                finish = None
                if index + 1 == request.sampling.max_tokens:
                    finish = FinishReason.LENGTH
                if index + 1 == len(self._answer):
                    finish = FinishReason.STOP
                chunk = TokenChunk(request_id, index, (self._answer[index],), finish)
            chunks.append(chunk)
            self._running[request_id] = (request, index + 1)
            if chunk.finish is not None:
                del self._running[request_id]
        return chunks


class Case:
    """A folder with a checkpoint, an input and an output file."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint = write_codec_files(directory / "model")
        self.tokenizer = Tokenizer.from_directory(self.checkpoint)
        self.input = directory / "prompts.jsonl"
        self.output = directory / "answers.jsonl"

    def engine(self, **changes: Any) -> Any:
        return EchoEngine(self.tokenizer, **changes)

    def write(self, *lines: object) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("\n".join(texts) + "\n")

    def run(self, engine: Any, output: Path | None = None, **changes: Any) -> int:
        prompts = changes.pop("prompts", PromptOptions(SamplingParams()))
        options = GenerateOptions(
            checkpoint=self.checkpoint,
            prompt=None,
            input_path=self.input,
            output_path=output or self.output,
            prompts=prompts,
            **changes,
        )
        return generate(options, engine.load)

    def ask(self, engine: Any, prompt: str, prompts: PromptOptions | None = None) -> int:
        options = GenerateOptions(
            checkpoint=self.checkpoint,
            prompt=prompt,
            input_path=None,
            output_path=None,
            prompts=prompts or PromptOptions(SamplingParams()),
        )
        return generate(options, engine.load)

    def answers(self) -> dict[str, Any]:
        lines = self.output.read_text().splitlines()
        answers = {entry["id"]: entry for entry in map(json.loads, lines)}
        assert len(answers) == len(lines)
        return answers
