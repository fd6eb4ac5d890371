"""What `headrace generate` does once its arguments are read: check, load, feed the engine, write.

Contract: everything that can be refused without the model (usage, input ids, output file,
tokenizer) is refused before weights are read. The engine gets a bounded number of requests at a
time; every finished answer is written at once, so a stop loses only what was being computed. Called
by `cli/generate.py`, which stays small so that `--help` imports nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.cli.answer_file import (
    Answer,
    AnswerFile,
    FailedAnswer,
    LineError,
    ToolCall,
    Usage,
)
from headrace.cli.generate_progress import GenerateScreen, StopSignals
from headrace.cli.prompt_file import (
    PreparedPrompt,
    PromptEncoder,
    PromptOptions,
    RawLine,
    read_lines,
    scan,
)
from headrace.config import (
    EngineConfig,
    build_section,
    check_sections,
    read_settings,
    unknown_variables,
)
from headrace.core.files import require_checkpoint
from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.errors import (
    EngineLost,
    HeadraceError,
    InvalidRequest,
    OutputError,
    Overloaded,
    rebuild_error,
)
from headrace.recipe import Codec, Tokenizer
from headrace.serve.model_card import read_note

EXIT_LINES_FAILED = 1
MAX_PROMPT_BYTES = 64 * 2**20
_OPTION = re.compile(r"--?[a-zA-Z][\w-]*(=.*)?", re.DOTALL)
ProgressCallback = Callable[[int, int], None]


class GenerateSpec(Protocol):
    """What `generate` needs to know of a model."""

    @property
    def bos_id(self) -> int:
        """Token in front of every raw text."""
        ...


class GenerateEngine(Protocol):
    """What `generate` needs of an engine; `engine.Engine` has it."""

    @property
    def spec(self) -> GenerateSpec:
        """Facts of the model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        ...

    def add(self, request: Request) -> object:
        """Take a request; raises a HeadraceError to refuse it."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request."""
        ...

    def step(self) -> Iterable[TokenChunk]:
        """One engine step."""
        ...


EngineLoader = Callable[[Path, EngineConfig, ProgressCallback], GenerateEngine]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The command line. overrides: dotted settings, None = not given."""

    checkpoint: Path
    prompt: str | None
    input_path: Path | None
    output_path: Path | None
    prompts: PromptOptions
    config_path: Path | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)


def load_engine(
    checkpoint: Path, config: EngineConfig, progress: ProgressCallback
) -> GenerateEngine:
    """The checkpoint's engine, in this process."""
    # Imported here: torch takes seconds, and most refusals come before it is needed.
    from headrace.engine.load import load_engine as load

    # Grammars of answers need the vocabulary.
    tokenizer = Tokenizer.from_directory(checkpoint)
    return load(checkpoint, config, tokenizer=tokenizer, progress=progress)


def generate(options: GenerateOptions, load: EngineLoader = load_engine) -> int:
    """Run the command; returns its exit code. Raises HeadraceError."""
    _check_usage(options)
    settings = read_settings(options.config_path, overrides=options.overrides)
    check_sections(settings, ("engine", "server"))
    config = _engine_config(settings)
    text = "" if options.prompt is None else _prompt_text(options.prompt)
    require_checkpoint(options.checkpoint)
    codec = Codec.from_directory(options.checkpoint)
    screen = GenerateScreen()
    for warning in unknown_variables():
        screen.note(f"warning: {warning}")

    def start() -> tuple[GenerateEngine, PromptEncoder]:
        if read_note(options.checkpoint).get("random") is True:
            screen.note("NOTE: random weights, every answer is random text")
        engine = load(options.checkpoint, config, screen.loading)
        screen.loaded()
        return engine, PromptEncoder(codec, engine.spec.bos_id, engine.max_model_len)

    try:
        if options.input_path is None:
            engine, encoder = start()
            return _answer_one(engine, encoder.encode_text(text, options.prompts), screen)
        numbers = scan(options.input_path)
        with AnswerFile.open(options.output_path) as answers:
            _check_resumed(answers, numbers, options)
            screen.begin(len(numbers), len(answers.finished), answers.failed, answers.cut_bytes)
            if len(answers.finished) == len(numbers):
                return EXIT_LINES_FAILED if answers.failed else 0
            engine, encoder = start()
            run = FileRun(engine, encoder, options.prompts, answers, screen, config.max_num_seqs)
            return _answer_file(run, read_lines(options.input_path), answers, screen)
    finally:
        screen.close()


def _check_usage(options: GenerateOptions) -> None:
    if (options.prompt is None) == (options.input_path is None):
        raise InvalidRequest(
            "give either a prompt or --input FILE, such as\n"
            '  headrace generate my-model "Hello"\n'
            "  headrace generate my-model --input prompts.jsonl --output answers.jsonl"
        )
    if options.input_path is None and options.output_path is not None:
        raise InvalidRequest("--output needs --input; one prompt is answered on standard output.")
    if options.input_path is not None and options.output_path is not None:
        same = options.input_path.resolve() == options.output_path.resolve()
        if same:
            raise InvalidRequest("--input and --output are the same file.", param="output")


def _engine_config(settings: Mapping[str, Mapping[str, object]]) -> EngineConfig:
    section = dict(settings.get("engine", {}))
    sequences = section.get("max_num_seqs")
    if isinstance(sequences, int) and "max_num_batched_tokens" not in section:
        # --batch 1000 should not need a second flag: every request needs a row of a step.
        default = EngineConfig().max_num_batched_tokens
        section["max_num_batched_tokens"] = max(default, sequences)
    return build_section(EngineConfig, "engine", {"engine": section})


def _prompt_text(prompt: str) -> str:
    """The prompt of the command line, or standard input for `-`."""
    if not prompt:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if _OPTION.fullmatch(prompt):
        # A prompt may begin with a hyphen, so the command line takes a mistyped option for one.
        raise InvalidRequest(
            f"unknown option {prompt}. (If it is the prompt: echo '{prompt}' | headrace generate "
            "MODEL -)"
        )
    if prompt != "-":
        return prompt
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"The prompt is longer than {MAX_PROMPT_BYTES} bytes.", param="prompt")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The prompt on standard input is not UTF-8 (byte {error.start}).", param="prompt"
        ) from error


def _check_resumed(
    answers: AnswerFile, numbers: Mapping[str, int], options: GenerateOptions
) -> None:
    foreign = next((name for name in answers.finished if name not in numbers), None)
    if foreign is not None:
        raise InvalidRequest(
            f'{options.output_path} has an answer to "{foreign}", which {options.input_path} does '
            "not ask; nothing was changed. Choose another output file, or move this one away.",
            param="output",
        )


def _answer_one(engine: GenerateEngine, prompt: PreparedPrompt, screen: GenerateScreen) -> int:
    """Stream one answer to standard output. Raises what ended it."""
    engine.add(prompt.request("generate"))
    finish: FinishReason | None = None
    while finish is None:
        for chunk in engine.step():
            finish = chunk.finish
            screen.answer(prompt.parser.push(chunk.text_tokens))
            if finish is FinishReason.ERROR:
                error = chunk.error or "The request failed."
                raise rebuild_error(chunk.error_code or HeadraceError.code, error)
    screen.answer(prompt.parser.finish(stopped=finish is FinishReason.STOP))
    screen.answer_ended(finish is FinishReason.LENGTH)
    return 0


def _answer_file(
    run: FileRun, lines: Iterator[RawLine], answers: AnswerFile, screen: GenerateScreen
) -> int:
    """Answer all lines that are not finished yet; returns the exit code."""
    again = " Run the same command again to go on." if answers.resumable else ""
    with StopSignals(screen.stopping) as stop:
        try:
            run.answer(lines, stop)
            answers.sync()
        except OutputError as error:
            raise OutputError(f"{error.message} {screen.count()}{again}") from error
    if stop.exit_code is not None:
        screen.note(f"interrupted: {screen.count()}{again}")
        return stop.exit_code
    screen.summary()
    return EXIT_LINES_FAILED if screen.failed else 0


@dataclass(slots=True)
class _Job:
    """A line while the engine works on it."""

    line: RawLine
    prompt: PreparedPrompt
    token_ids: list[int] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class FileRun:
    """Feeds lines to the engine and writes their answers.

    Twice as many requests as the engine computes at once are handed over, so that the next ones are
    always there; the others stay in the input file.
    """

    def __init__(
        self,
        engine: GenerateEngine,
        encoder: PromptEncoder,
        options: PromptOptions,
        answers: AnswerFile,
        screen: GenerateScreen,
        max_num_seqs: int,
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._options = options
        self._answers = answers
        self._screen = screen
        self._max_running = 2 * max_num_seqs
        self._running: dict[str, _Job] = {}
        self._refused: _Job | None = None  # the engine's queue was full; tried again later

    def answer(self, lines: Iterator[RawLine], stop: StopSignals) -> None:
        """Answer lines until all are answered or `stop` was asked for. Raises OutputError."""
        try:
            while not stop.requested:
                self._feed(lines, stop)
                if not self._running:
                    return
                for chunk in self._engine.step():
                    self._take(chunk)
        finally:
            for request_id in self._running:
                self._engine.abort(request_id)

    def _feed(self, lines: Iterator[RawLine], stop: StopSignals) -> None:
        while len(self._running) < self._max_running and not stop.requested:
            job, self._refused = self._refused, None
            if job is None:
                line = next(lines, None)
                if line is None:
                    return
                if line.id in self._answers.finished:
                    continue
                job = self._prepare(line)
            if job is not None and not self._start(job):
                return

    def _prepare(self, line: RawLine) -> _Job | None:
        """The line as a job; None: it is bad, and its error is written."""
        try:
            return _Job(line, self._encoder.encode(line, self._options))
        except InvalidRequest as error:
            self._fail(line, error.code, error.message, error.param)
            return None

    def _start(self, job: _Job) -> bool:
        """Hand a job to the engine; False: its queue is full, nothing more can be started."""
        request_id = f"line-{job.line.number}"
        try:
            self._engine.add(job.prompt.request(request_id))
        except Overloaded:
            if not self._running:
                raise
            self._refused = job
            return False
        except InvalidRequest as error:
            self._fail(job.line, error.code, error.message, error.param)
            return True
        self._running[request_id] = job
        return True

    def _take(self, chunk: TokenChunk) -> None:
        job = self._running.get(chunk.request_id)
        if job is None:
            raise EngineLost(f"The engine answered {chunk.request_id!r}, which nobody asked.")
        job.token_ids += chunk.tokens
        deltas = [job.prompt.parser.push(chunk.text_tokens)]
        if chunk.finish is not None:
            deltas.append(job.prompt.parser.finish(stopped=chunk.finish is FinishReason.STOP))
        job.reasoning += [delta.reasoning for delta in deltas]
        job.text += [delta.content for delta in deltas]
        if chunk.finish is None:
            return
        del self._running[chunk.request_id]
        if chunk.finish is FinishReason.ERROR:
            code = chunk.error_code or HeadraceError.code
            self._fail(job.line, code, chunk.error or "The request failed.", None)
            return
        self._answers.write(_answer(job, chunk.finish))
        self._screen.finished(len(job.token_ids))

    def _fail(self, line: RawLine, code: str, message: str, param: str | None) -> None:
        self._answers.write(
            FailedAnswer(
                id=line.id,
                error=LineError(line=line.number, code=code, message=message, param=param),
            )
        )
        self._screen.line_failed(line.number, message)


def _answer(job: _Job, finish: FinishReason) -> Answer:
    prompt_tokens, completion_tokens = len(job.prompt.token_ids), len(job.token_ids)
    return Answer(
        id=job.line.id,
        prompt_tokens=prompt_tokens,
        text="".join(job.text),
        reasoning="".join(job.reasoning),
        tool_calls=[ToolCall(name, arguments) for name, arguments in job.prompt.parser.calls],
        token_ids=job.token_ids,
        finish_reason=finish.value,
        usage=Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens),
    )
